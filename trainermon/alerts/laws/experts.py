"""The law of experts: those of different ranks have gradients of their own."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from trainermon.alerts.across_ranks.peers import copy_axes
from trainermon.alerts.conditions.condition import Indices
from trainermon.alerts.laws.law import LawRelation, LawStep, LawVerdict, TensorPlace, are_the_same
from trainermon.core.derived import COUNT, INFS, NANS, SUM_SQ, Array
from trainermon.core.values import Kind, Placement

_EXPERT = re.compile(r"(.*experts?\.)(\d+)(\..*)")
"""A parameter of one expert, as frameworks name it: what comes before its number, the number, what comes after it."""


class ExpertCells(NamedTuple):
    """Where the rows of experts stand; of copies of an expert on several ranks only those of the first one.

    Attributes:
        ranks: Positions of the ranks, `[n]`.
        columns: Those of the tensors, `[n]`.
        parts: Numbers, `[n]`: equal where different experts have the same parameter, or the same part of it.
        owners: Places along the axis of expert parallelism, `[n]`: experts of one place are not compared.
    """

    ranks: Indices
    columns: Indices
    parts: Indices
    owners: Indices


class OwnExperts(LawRelation):
    """Experts that lie on different ranks have different reduced gradients.

    The size is the number of other experts with the very same moments of a gradient that is not zero.
    """

    def __init__(self, settings: Mapping[str, float]) -> None:
        super().__init__(settings)
        self._placements: Sequence[Sequence[Placement | None]] = ()
        self._cells: ExpertCells | None = None

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        placements = step.placements[Kind.GRAD_REDUCED]
        if not are_the_same(placements, self._placements):
            self._placements, self._cells = placements, _find(step, placements)
        if self._cells is None:
            return None
        rows = step.rows[Kind.GRAD_REDUCED]
        shown = rows[self._cells.ranks, :, self._cells.columns]
        with np.errstate(invalid="ignore"):
            usable = (shown[:, SUM_SQ] > 0) & (shown[:, COUNT] > 1) & (shown[:, NANS] + shown[:, INFS] == 0)
        ranks, columns, parts, owners = (one[usable] for one in self._cells)
        moments = np.column_stack((parts, shown[usable]))
        size = np.full(rows[:, COUNT].shape, np.nan)
        size[ranks, columns] = _num_alike(moments) - _num_alike(np.column_stack((moments, owners)))
        return LawVerdict(size, np.zeros(size.shape), ~np.isnan(size))


def _num_alike(rows: Array) -> Array:
    """Return of each row of `[n, m]` how many rows are equal to it, itself included."""
    _, which, number = np.unique(rows, axis=0, return_inverse=True, return_counts=True)
    found: Array = number[which.reshape(-1)].astype(np.float64)
    return found


def _find(step: LawStep, placements: Sequence[Sequence[Placement | None]]) -> ExpertCells | None:
    """Return where experts stand; None if there are no two on different ranks to be compared."""
    ranks: dict[tuple[int, int, int], int] = {}
    numbers: dict[Hashable, int] = {}
    for rank, (place, held) in enumerate(zip(step.places, placements, strict=True)):
        for column, placement in enumerate(held):
            layer = _layer_of(step.tensors[column], placement) if placement and place.ep_size > 1 else None
            if placement and layer:
                part = layer, placement.shape, placement.offset, placement.length, place.tp, place.pp
                ranks.setdefault((column, numbers.setdefault(part, len(numbers)), place.ep), rank)
    if len({owner for _, _, owner in ranks}) < 2:
        return None
    columns, parts, owners = np.array([*ranks], np.intp).T
    return ExpertCells(np.array([*ranks.values()], np.intp), columns, parts, owners)


def _layer_of(tensor: TensorPlace, placement: Placement) -> TensorPlace | None:
    """Return what a parameter has in common with those of the other experts of its layer; None if it is no expert's."""
    if "ep" in placement.partitioned_over:  # all experts of the rank in one tensor
        return tensor
    found = _EXPERT.fullmatch(tensor.name)
    is_own = found is not None and "ep" not in copy_axes(placement)
    return tensor._replace(name=f"{found[1]}*{found[3]}") if found and is_own else None
