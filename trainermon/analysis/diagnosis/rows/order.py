"""In which order a training step comes to its series: weights, forward, backward, reduction, optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from trainermon.analysis.diagnosis.domains import Places
from trainermon.analysis.diagnosis.findings import FaultPhase
from trainermon.analysis.diagnosis.wording import SeriesName
from trainermon.core.catalogue import GRADIENT_AT_STEP
from trainermon.core.values import Kind

PHASES: Mapping[str, FaultPhase] = {
    Kind.CHECKSUM: FaultPhase.PARAMETER,
    Kind.PARAM_ORIGIN: FaultPhase.PARAMETER,
    Kind.PARAM_USED: FaultPhase.PARAMETER,
    Kind.BUFFER: FaultPhase.PARAMETER,
    Kind.ACTV: FaultPhase.FORWARD,
    Kind.LOSS: FaultPhase.FORWARD,
    Kind.ACTV_RECOMPUTED: FaultPhase.BACKWARD,
    Kind.ACTV_GRAD: FaultPhase.BACKWARD,
    Kind.GRAD_UNREDUCED: FaultPhase.BACKWARD,
    Kind.COMM: FaultPhase.UNKNOWN,
    Kind.GRAD_REDUCED: FaultPhase.UNKNOWN,
    Kind.EXP_AVG: FaultPhase.OPTIMIZER,
    Kind.EXP_AVG_SQ: FaultPhase.OPTIMIZER,
    Kind.STATE: FaultPhase.OPTIMIZER,
    Kind.UPDATE: FaultPhase.OPTIMIZER,
    Kind.RATIO: FaultPhase.OPTIMIZER,
    Kind.MG_DIRECTION: FaultPhase.OPTIMIZER,
    Kind.PARAM_UPDATED: FaultPhase.OPTIMIZER,
}
OF_PARAMETERS = frozenset(PHASES) - {Kind.ACTV, Kind.ACTV_RECOMPUTED, Kind.ACTV_GRAD, Kind.LOSS, Kind.COMM}
_LAST = math.inf


class RowSeries(SeriesName, Protocol):
    """Interface of a stored row: which series (rank, kind, module or parameter, slot …) it belongs to."""

    @property
    def call(self) -> int: ...  # noqa: D102
    @property
    def stage(self) -> int: ...  # noqa: D102
    @property
    def rank(self) -> int: ...  # noqa: D102
    @property
    def fingerprint(self) -> object:
        """A key that is equal if two tensors' elements are; None if that is not known."""


class StepOrder:
    """Orders series of several ranks as one step comes to them.

    Within a phase it is micro step by micro step, along the pipeline (in the backward against it), and along the
    modules as they are called (in the backward against it). A module ends its forward after those inside of it.
    `is_single` tells that the run has one rank, `has_unreduced` that gradients before the reduction are stored.
    """

    def __init__(
        self, modules: Sequence[str], places: Places, *, is_single: bool = False, has_unreduced: bool = False
    ) -> None:
        self._begins = {name: number for number, name in enumerate(modules)}
        self._ends = _ends(modules)
        self._places = places
        # with one rank nothing is reduced: its gradients are its own
        reduced = FaultPhase.BACKWARD if is_single else FaultPhase.REDUCTION if has_unreduced else FaultPhase.UNKNOWN
        self._phases = {**PHASES, Kind.GRAD_REDUCED: reduced}
        self._num_stages = 1 + max((place.get("pp", 0) for place in places.values()), default=0)

    def phase(self, row: RowSeries) -> FaultPhase:
        """Return in which part of the step (forward, backward, reduction, optimizer …) a series comes about.

        After the reduction it may be unknown.
        """
        if row.slot == GRADIENT_AT_STEP:
            return FaultPhase.BEFORE_STEP
        if is_weight(row):
            return FaultPhase.PARAMETER
        return self._phases.get(row.kind, FaultPhase.UNKNOWN)

    def earliest(self, modules: Iterable[str]) -> str:
        """Return which of `modules` is called first."""
        return min(modules, key=lambda name: self._begins.get(name, _LAST))

    def is_last(self, row: RowSeries, called: Iterable[str]) -> bool:
        """Return whether the row's module, or one inside of it, is the last of those `called` before the loss."""
        last = max(called, key=lambda name: self._begins.get(name, -1), default="")
        is_last_stage = self._places.get(row.rank, {}).get("pp", 0) == self._num_stages - 1
        return is_last_stage and f"{last}.".startswith(f"{module_of(row)}.")

    def key(self, row: RowSeries, sharing: str = "", *, is_likely: bool = False) -> tuple[float, ...]:
        """Return a tuple by which series sort as they come about in a step: phase, micro step, stage, module.

        The gradient of a tensor that several modules were given is there when the first of them, `sharing`, has given
        its own one back. Of these the one that `is_likely` comes first, then the innermost.
        """
        phase = self.phase(row)
        pipeline = row.stage * self._num_stages + self._places.get(row.rank, {}).get("pp", 0)
        module = sharing or module_of(row)
        depth = -module_of(row).count(".")
        group = _GROUPS[phase]
        if phase is FaultPhase.FORWARD:
            end = _LAST if row.kind == Kind.LOSS else self._ends.get(module, _LAST)
            return (group, row.micro_step or 0, 0, pipeline, end, depth, row.slot.startswith("output"), row.rank)
        if phase is FaultPhase.BACKWARD:
            # what has no micro step was added up over all of them
            whole = row.micro_step is None and row.kind in (Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED)
            begin = -self._begins.get(module, -1)
            is_input = not row.slot.startswith("output")
            micro_step = _LAST if whole else row.micro_step or 0
            return (group, micro_step, 1, -pipeline, begin, not is_likely, depth, is_input, row.rank)
        return (group, 0, 0, 0, self._begins.get(module, _LAST), depth, 0, row.rank)


def _ends(modules: Sequence[str]) -> dict[str, int]:
    """Return by module the number of the last one inside of it, or its own."""
    ends: dict[str, int] = {}
    for number, name in enumerate(modules):
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            ends[".".join(parts[:length])] = number
    return ends


_GROUPS = {
    FaultPhase.PARAMETER: 0,
    FaultPhase.FORWARD: 1,
    FaultPhase.BACKWARD: 1,
    FaultPhase.UNKNOWN: 2,
    FaultPhase.REDUCTION: 2,
    FaultPhase.BEFORE_STEP: 3,
    FaultPhase.OPTIMIZER: 4,
}
AFTER_BACKWARD = (FaultPhase.UNKNOWN, FaultPhase.REDUCTION, FaultPhase.BEFORE_STEP, FaultPhase.OPTIMIZER)


def is_weight(row: RowSeries) -> bool:
    """Return whether the row is a weight that is passed to the module with each call, as a tied one may be."""
    return row.kind == Kind.ACTV and row.slot in ("input.weight", "input.bias")


def module_of(row: SeriesName) -> str:
    """Return the module that a series belongs to, "" if it belongs to none."""
    if row.kind in OF_PARAMETERS:
        return row.name.rpartition(".")[0]
    return "" if row.kind in (Kind.LOSS, Kind.COMM) else row.name
