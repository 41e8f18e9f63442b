"""The first steps of a free benchmark learn how far off the CPU's own kernels are: what is no worse is no error.

A kernel of the recorded type may be off by more than its allowance on every device, as some of torch's are.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from trainermon.accuracy.calls import call_on
from trainermon.accuracy.judge import Judgement, judge_call
from trainermon.accuracy.peers import baseline_text, excused, learn
from trainermon.dump.online.observed_calls import ObservedCall, as_seen, unobserved
from trainermon.dump.online.options import JUDGING, FreeBenchmarkConfig


class PeerErrors:
    """What the CPU's kernels are off by, in the types of the training; it outlives steps.

    Args:
        config: How many steps learn, and from how many calls of each operation and type.
    """

    def __init__(self, config: FreeBenchmarkConfig) -> None:
        self._learning_steps = config.preheat_step if config.if_preheat and config.pert_mode in JUDGING else 0
        self._max_sample = config.max_sample
        self._step = 0
        self._counts: Counter[tuple[str, str]] = Counter()
        self._worst: dict[str, float] = {}

    def begin_step(self) -> None:
        """Count a step."""
        self._step += 1

    @property
    def is_learning(self) -> bool:
        """Whether this step is one of those that learn."""
        return 0 < self._step <= self._learning_steps

    def watch(self, observed: ObservedCall) -> None:
        """Run a call on the CPU, and learn how far off that is; no more than so many of an operation and type.

        Raises:
            Exception: Whatever the function raises there.
        """
        kind = observed.name, ",".join(str(tensor.dtype) for tensor in observed.call.tensors)
        if not self.is_learning or self._counts[kind] >= self._max_sample:
            return
        self._counts[kind] += 1
        with unobserved(observed.device), observed.generators.repeated():
            result = call_on(observed.call, "cpu")
            call, inside = as_seen(observed.call, result)
            for judgement in judge_call(observed.name, call, result, inside=inside):
                learn(observed.key, judgement, self._worst)

    def excused(self, key: str, judgement: Judgement) -> Judgement:
        """Return the judgement on a call, as a warning where the CPU is about as far off."""
        return excused(key, judgement, self._worst)

    def write(self, path: Path) -> None:
        """Write what was learned as a baseline, as `trainermon check calibrate` does, if this step learns.

        Raises:
            OSError: It cannot be written.
        """
        if self.is_learning:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(baseline_text(self._worst, [f"the CPU, in {self._step} steps of a training"]))
