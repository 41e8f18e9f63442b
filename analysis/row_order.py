"""In which order a training step comes to its series: weights, forward, backward, reduction, optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from trainermon.analysis.domains import Places
from trainermon.analysis.findings import FaultPhase
from trainermon.monitor.values import Kind

PHASES: Mapping[str, FaultPhase] = {
    Kind.CHECKSUM: FaultPhase.PARAMETER,
    Kind.PARAM_ORIGIN: FaultPhase.PARAMETER,
    Kind.ACTV: FaultPhase.FORWARD,
    Kind.LOSS: FaultPhase.FORWARD,
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
_OF_PARAMETERS = frozenset(PHASES) - {Kind.ACTV, Kind.ACTV_GRAD, Kind.LOSS, Kind.COMM}
_LAST = math.inf


class Series(Protocol):
    """What is asked of a row: which series it is."""

    @property
    def kind(self) -> str: ...  # noqa: D102
    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def slot(self) -> str: ...  # noqa: D102
    @property
    def call(self) -> int: ...  # noqa: D102
    @property
    def micro_step(self) -> int | None: ...  # noqa: D102
    @property
    def stage(self) -> int: ...  # noqa: D102
    @property
    def rank(self) -> int: ...  # noqa: D102


class StepOrder:
    """Orders series of several ranks as one step comes to them.

    Within a phase it is micro step by micro step, along the pipeline (in the backward against it), and along the
    modules in their definition order (in the backward against it). A module ends its forward after those inside of it.
    `is_single` tells that the run has one rank.
    """

    def __init__(self, modules: Sequence[str], places: Places, *, is_single: bool = False) -> None:
        self._begins = {name: number for number, name in enumerate(modules)}
        self._ends = _ends(modules)
        self._places = places
        # with one rank nothing is reduced: its gradients are its own
        self._phases = {**PHASES, Kind.GRAD_REDUCED: FaultPhase.BACKWARD} if is_single else PHASES
        self._num_stages = 1 + max((place.get("pp", 0) for place in places.values()), default=0)

    def phase(self, kind: str) -> FaultPhase:
        """Return in which part of the step a series comes about; after the reduction it is unknown."""
        return self._phases.get(kind, FaultPhase.UNKNOWN)

    def key(self, row: Series) -> tuple[float, ...]:
        """Return what a series is sorted by: the phase, micro step, direction, pipeline, module, and the rest."""
        phase = self.phase(row.kind)
        pipeline = row.stage * self._num_stages + self._places.get(row.rank, {}).get("pp", 0)
        module = module_of(row.kind, row.name)
        depth = -module.count(".")
        group = _GROUPS[phase]
        if phase is FaultPhase.FORWARD:
            end = _LAST if row.kind == Kind.LOSS else self._ends.get(module, _LAST)
            return (group, row.micro_step or 0, 0, pipeline, end, depth, row.slot.startswith("output"), row.rank)
        if phase is FaultPhase.BACKWARD:
            # what has no micro step was added up over all of them
            whole = row.micro_step is None and row.kind in (Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED)
            begin = -self._begins.get(module, -1)
            return (group, _LAST if whole else row.micro_step or 0, 1, -pipeline, begin, depth, 0, row.rank)
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
    FaultPhase.OPTIMIZER: 3,
}


def module_of(kind: str, name: str) -> str:
    """Return the module that a series belongs to, "" if it belongs to none."""
    if kind in _OF_PARAMETERS:
        return name.rpartition(".")[0]
    return "" if kind in (Kind.LOSS, Kind.COMM) else name
