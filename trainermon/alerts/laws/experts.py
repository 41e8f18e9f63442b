"""The law of experts: those of different ranks have gradients of their own."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from trainermon.alerts.across_ranks.peers import copy_axes
from trainermon.alerts.conditions.condition import Indices
from trainermon.alerts.laws.law import LawRelation, LawStep, LawVerdict, TensorPlace
from trainermon.core.derived import COUNT, INFS, NANS, SUM_SQ
from trainermon.core.values import Kind, Placement

_EXPERT = re.compile(r"(.*experts?\.)(\d+)(\..*)")
"""A parameter of one expert, as frameworks name it: what comes before its number, the number, what comes after it."""


class ExpertCells(NamedTuple):
    """Where rows of different experts stand that have the same shape and place in their layer, one rank for each part.

    Attributes:
        ranks: Positions of the ranks, `[n]`.
        columns: Those of the tensors, `[n]`.
        owners: Places along the axis of expert parallelism, `[n]`: experts of one place are not compared.
    """

    ranks: Indices
    columns: Indices
    owners: Indices


class OwnExperts(LawRelation):
    """Experts that lie on different ranks have different reduced gradients.

    The size is the number of other experts with the very same moments of a gradient that is not zero.
    """

    def __init__(self, settings: Mapping[str, float]) -> None:
        super().__init__(settings)
        self._placements: Sequence[Sequence[Placement | None]] = ()
        self._cells: Sequence[ExpertCells] = ()

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        cells = self._cells_of(step)
        if not cells:
            return None
        rows = step.rows[Kind.GRAD_REDUCED]
        size = np.full(rows[:, COUNT].shape, np.nan)
        for ranks, columns, owners in cells:
            shown = rows[ranks, :, columns]
            with np.errstate(invalid="ignore"):
                usable = (shown[:, SUM_SQ] > 0) & (shown[:, COUNT] > 1) & (shown[:, NANS] + shown[:, INFS] == 0)
            for place in np.flatnonzero(usable):
                is_equal = usable & (shown == shown[place]).all(axis=1) & (owners != owners[place])
                size[ranks[place], columns[place]] = is_equal.sum()
        return LawVerdict(size, np.zeros(size.shape), ~np.isnan(size))

    def _cells_of(self, step: LawStep) -> Sequence[ExpertCells]:
        """Return where experts stand; they are found anew only where a series has come."""
        placements = step.placements[Kind.GRAD_REDUCED]
        known = self._placements
        if len(known) != len(placements) or any(a is not b for a, b in zip(known, placements, strict=True)):
            self._placements, self._cells = placements, _find(step, placements)
        return self._cells


def _find(step: LawStep, placements: Sequence[Sequence[Placement | None]]) -> Sequence[ExpertCells]:
    cells: dict[Hashable, dict[tuple[int, int], int]] = {}
    for rank, (place, held) in enumerate(zip(step.places, placements, strict=True)):
        for column, placement in enumerate(held) if place.ep_size > 1 else ():
            layer = None if placement is None else _layer_of(step.tensors[column], placement)
            if placement is not None and layer is not None:
                part = layer, placement.shape, placement.offset, placement.length, place.tp, place.pp
                cells.setdefault(part, {}).setdefault((column, place.ep), rank)
    found = (
        ExpertCells(*np.array([(rank, column, ep) for (column, ep), rank in ranks.items()], np.intp).T)
        for ranks in cells.values()
    )
    return [one for one in found if len(set(one.owners.tolist())) > 1]


def _layer_of(tensor: TensorPlace, placement: Placement) -> TensorPlace | None:
    """Return what a parameter has in common with those of the other experts of its layer; None if it is no expert's."""
    if "ep" in placement.partitioned_over:  # all experts of the rank in one tensor
        return tensor
    found = _EXPERT.fullmatch(tensor.name)
    is_own = found is not None and "ep" not in copy_axes(placement)
    return tensor._replace(name=f"{found[1]}*{found[3]}") if found and is_own else None
