"""What the modes of a free benchmark do with a call that has run: try it another way, and judge what comes back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from trainermon.accuracy.judge import Judgement, judge_call
from trainermon.dump.online.findings import CallFinding
from trainermon.dump.online.observed_calls import ObservedCall, as_seen, unobserved
from trainermon.dump.online.options import JUDGING, FreeBenchmarkConfig


class Trials:
    """Tries calls as a configuration says.

    Nothing that it does reaches the training: inputs are copied, generators put back, gradients not recorded.
    """

    def __init__(self, config: FreeBenchmarkConfig) -> None:
        self._config = config

    def of_result(self, observed: ObservedCall, result: Any) -> Iterator[CallFinding]:
        """Yield a finding for each tensor of `result`, what the call gave.

        Raises:
            Exception: Whatever the function raises when it is run again.
        """
        if self._config.pert_mode in JUDGING:
            yield from self._against_precise(observed, result)

    def _against_precise(self, observed: ObservedCall, result: Any) -> Iterator[CallFinding]:
        call, inside = as_seen(observed.call, result)
        device = next((tensor.device.type for tensor in call.tensors), "cpu")
        with unobserved(device), observed.generators.repeated():
            judgements = judge_call(observed.name, call, result, inside=inside)
        for number, judgement in enumerate(judgements):
            yield CallFinding(
                key=observed.key,
                mode=self._config.pert_mode.value,
                stage="forward",
                number=number,
                judgement=judgement,
                max_rel=_relative(judgement),
                flips=_flips(judgement),
            )


def _relative(judgement: Judgement) -> float:
    """Return the relative difference of the worst element; NaN if one of the two is not finite."""
    given, golden = judgement.device_value, judgement.golden_value
    if given == golden:
        return 0.0
    difference = abs(given - golden)
    return difference / abs(golden) if golden and math.isfinite(difference) else math.nan


def _flips(judgement: Judgement) -> bool:
    given, golden = judgement.device_value, judgement.golden_value
    if isinstance(given, complex) or isinstance(golden, complex):
        return False
    unit = torch.finfo(torch.float32).eps * judgement.worst
    return given * golden < 0 and unit > 0 and judgement.worst > 1
