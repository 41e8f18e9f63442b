"""Which ranks share the data of a step, and what the parts of a tensor add up to over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trainermon.alerts.conditions.condition import Indices, Mask
from trainermon.alerts.laws.law import LawStep
from trainermon.core.derived import COUNT, MAX, MIN, SUM, SUM_SQ, Array
from trainermon.core.values import Coordinates, Kind, Placement

DATA_AXES = frozenset({"dp", "cp"})
_PLAIN_AXES = DATA_AXES | {"tp", "pp"}


class MergedTensors(NamedTuple):
    """What the parts of each tensor add up to, over ranks that hold all of it.

    Attributes:
        num_elements: Number of elements, `[tensors]`.
        sum: Their sum.
        sum_sq: Their sum of squares.
        least: The smallest element.
        greatest: The largest one.
    """

    num_elements: Array
    sum: Array
    sum_sq: Array
    least: Array
    greatest: Array


def data_groups(places: Sequence[Coordinates]) -> list[Indices]:
    """Return the groups of ranks that hold the same part of the model for other data, as positions among `places`.

    Only those of which every rank is there: what is on another node is not known here.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for number, place in enumerate(places):
        groups.setdefault((place.tp, place.pp), []).append(number)
    size = {place.world_size // (place.tp_size * place.pp_size) for place in places}
    return [np.array(members, np.intp) for members in groups.values() if {len(members)} == size]


def is_plain(placement: Placement | None) -> bool:
    """Return whether a tensor lies along data, tensor and pipeline axes only: groups of experts are others."""
    return placement is not None and {*placement.replicated_over, *placement.partitioned_over} <= _PLAIN_AXES


def merged(step: LawStep, kind: Kind, members: Indices) -> MergedTensors:
    """Return what the `members` of a group hold together of each tensor, every element once; NaN where one holds none.

    A part that several hold counts as one of them holds it, the first.
    """
    rows, placements = step.rows[kind], step.placements[kind]
    total = MergedTensors(*(np.full(len(step.tensors), np.nan) for _ in MergedTensors._fields))
    seen: list[set[tuple[int, int | None]]] = [set() for _ in step.tensors]
    for rank in members:
        fresh = np.flatnonzero(_unseen(placements[rank], ~np.isnan(rows[rank, COUNT]), seen))
        own = rows[rank][:, fresh]
        for whole, row, join in (
            (total.num_elements, COUNT, np.add),
            (total.sum, SUM, np.add),
            (total.sum_sq, SUM_SQ, np.add),
            (total.least, MIN, np.fmin),
            (total.greatest, MAX, np.fmax),
        ):
            known = whole[fresh]
            whole[fresh] = np.where(np.isnan(known), own[row], join(known, own[row]))
    return total


def _unseen(placements: Sequence[Placement | None], shown: Mask, seen: list[set[tuple[int, int | None]]]) -> list[bool]:
    fresh = []
    for placement, is_shown, known in zip(placements, shown.tolist(), seen, strict=True):
        part = (0, None) if placement is None else (placement.offset, placement.length)
        fresh.append(is_shown and part not in known)
        if is_shown:
            known.add(part)
    return fresh
