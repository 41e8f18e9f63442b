"""What the modes of a free benchmark do with a call that has run: try it another way, and judge what comes back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainermon.accuracy.calls import OperationCall
from trainermon.accuracy.changes import MovedCall, judge_change
from trainermon.accuracy.judge import Judgement, Status, judge_call
from trainermon.accuracy.screen import QuickReference
from trainermon.dump.files.records import BACKWARD, FORWARD
from trainermon.dump.online.backward_calls import GradientFunction
from trainermon.dump.online.differences import Apart, passed, ratio_of, repetition
from trainermon.dump.online.findings import CallFinding
from trainermon.dump.online.observed_calls import ObservedCall, as_seen, unobserved
from trainermon.dump.online.options import JUDGING, NOISY, FreeBenchmarkConfig, Perturbation
from trainermon.dump.online.perturbation import mover_of
from trainermon.dump.online.relations import (
    Relation,
    judge_relation,
    permutations_of,
    relations_of,
    relations_of_backward,
)


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
        mode = self._config.pert_mode
        if mode in JUDGING:
            yield from self._against_precise(observed, result)
        elif mode is Perturbation.NO_CHANGE:
            yield from self._repeated(observed, result)
        elif mode is Perturbation.RELATIONS:
            is_backward = isinstance(observed.call.function, GradientFunction)
            yield from self._related(observed, result, relations_of_backward if is_backward else relations_of)
        elif mode is Perturbation.CHANGE_VALUE:
            found = self._related(observed, result, permutations_of)
            broken = [one for one in found if one.judgement.status is Status.ERROR]
            # a result that is always the same follows every permutation
            yield from broken or self._moved(observed, result, mover_of(mode, 0))
        else:
            for seed in range(self._config.probes if mode in NOISY else 1):
                yield from self._moved(observed, result, mover_of(mode, seed))

    def _against_precise(self, observed: ObservedCall, result: Any) -> Iterator[CallFinding]:
        call, inside = as_seen(observed.call, result)
        with unobserved(observed.device), observed.generators.repeated():
            if self._config.report == "failed" and is_surely_right(observed.name, call, result):
                judgements = [passed(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            else:
                judgements = judge_call(observed.name, call, result, inside=inside)
        for number, judgement in enumerate(judgements):
            yield self._finding(observed, number, judgement, Apart(_relative(judgement), _flips(judgement)))

    def _repeated(self, observed: ObservedCall, result: Any) -> Iterator[CallFinding]:
        """Yield what a repetition with the same inputs and random numbers gives: the same bits."""
        again = _tensors(observed.again())
        for number, (one, other) in enumerate(zip(_tensors(result), again, strict=True)):
            with unobserved(one.device.type):
                judgement = repetition(one, other)
                apart = ratio_of(one, other) if self._shows(judgement) else Apart(0.0)
            yield self._finding(observed, number, judgement, apart)

    def _related(
        self,
        observed: ObservedCall,
        result: Any,
        relations_of_call: Callable[[str, OperationCall], Iterator[Relation]],
    ) -> Iterator[CallFinding]:
        """Yield whether the relations of a call hold, a finding for each and each tensor of the result."""
        with unobserved(observed.device), torch.no_grad():
            call, _ = as_seen(observed.call, result)
            relations = list(relations_of_call(observed.name, call))
        for relation in relations:
            tensors = _tensors(result)
            for number, (given, again) in enumerate(zip(tensors, _tensors(observed.of(relation.call)), strict=True)):
                with unobserved(observed.device), torch.no_grad(), observed.generators.repeated():
                    judgement = judge_relation(relation, observed.name, call, (given, again))
                    apart = ratio_of(relation.expected(given), again) if self._shows(judgement) else Apart()
                if relation.is_exact and judgement.status is Status.ERROR:  # bits are no evidence where they vary
                    repeated = repetition(given, _tensors(observed.again())[number])
                    judgement = judgement if repeated.status is Status.PASS else repeated
                finding = self._finding(observed, number, judgement, apart)
                yield dataclasses.replace(finding, mode=f"{finding.mode}:{relation.name}")

    def _shows(self, judgement: Judgement) -> bool:
        return self._config.report == "all" or judgement.status is not Status.PASS

    def _moved(self, observed: ObservedCall, result: Any, move: Callable[[Any], Any]) -> Iterator[CallFinding]:
        """Yield whether the result moves with the inputs as it should."""
        with unobserved(observed.device), observed.generators.repeated(), torch.no_grad():
            moved = observed.moved(move)
        again = observed.of(moved)
        with unobserved(observed.device), observed.generators.repeated(), torch.no_grad():
            (call, inside), (other, _) = (as_seen(one, result) for one in (observed.call, moved))
            changes = judge_change(MovedCall(observed.name, call, other, result, again), inside=inside)
        pairs = zip(_tensors(result), _tensors(again), strict=True)
        for number, (change, pair) in enumerate(zip(changes, pairs, strict=True)):
            with unobserved(observed.device):
                apart = ratio_of(*pair) if self._shows(change.judgement) else Apart()
            yield self._finding(observed, number, change.judgement, apart, change.condition)

    def _finding(
        self, observed: ObservedCall, number: int, judgement: Judgement, apart: Apart, condition: float = math.nan
    ) -> CallFinding:
        return CallFinding(
            key=observed.key,
            mode=self._config.pert_mode.value,
            stage=BACKWARD if observed.key.endswith(BACKWARD) else FORWARD,
            number=number,
            judgement=judgement,
            max_rel=apart.max_rel,
            flips=apart.flips,
            condition=condition,
        )


def is_surely_right(name: str, call: OperationCall, result: Any) -> bool:
    """Return whether a quick look finds nothing; False where it cannot be had."""
    try:
        return QuickReference(name, call, result).accepts(result)
    except Exception:  # noqa: BLE001  # whatever a foreign kernel raises in a finer type: the judge says what
        return False


def _tensors(result: Any) -> list[Tensor]:
    return [leaf.detach() for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


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
