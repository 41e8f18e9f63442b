"""Which ranks can be compared with which, for every series: their groups, and their values side by side."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainermon.alerts.conditions.condition import Indices
from trainermon.core.derived import Array
from trainermon.core.values import Coordinates, Kind, Placement, SeriesKey

if TYPE_CHECKING:
    from trainermon.alerts.watch import RuleWatch

AXES = ("dp", "tp", "pp", "cp", "ep")
Label = Callable[[SeriesKey, "Placement | None", Coordinates], Hashable]


class PeerPart(NamedTuple):
    """What one rule looks at on one rank in one step, to be compared with other ranks.

    Attributes:
        rank: The rank.
        attempt: The start of the job.
        step: The step.
        place: Its coordinates in the job.
        time_s: Unix time of the step.
        watch: The rule, as it watches this rank.
        indices: The series, as positions among those of the rule.
        moments: Their moments, [8, n].
    """

    rank: int
    attempt: int
    step: int
    place: Coordinates
    time_s: float
    watch: RuleWatch
    indices: Indices
    moments: Array


class PeerGroup(NamedTuple):
    """Ranks whose values may be compared.

    Attributes:
        members: Positions of the ranks among the parts of a step.
        columns: The columns (series) that they have in common.
    """

    members: Indices
    columns: Indices


class PeerTable:
    """Lines up the series of all ranks in columns, and finds the groups of ranks that may be compared.

    Args:
        label: Returns, for a series, what its peers have in common; None stands for a rank without peers.
    """

    def __init__(self, label: Label) -> None:
        self._label = label
        self._columns: dict[SeriesKey, int] = {}
        self._columns_of: dict[int, Indices] = {}  # by rank: column of each slot
        self._known: tuple[tuple[int, int], ...] = ()
        self._groups: list[PeerGroup] = []

    def reset(self) -> None:
        """Forget who is whose peer: ranks may stand elsewhere in the next attempt. Columns stay."""
        self._columns_of.clear()
        self._known = ()

    def arrange(self, parts: Sequence[PeerPart], values: Sequence[Array]) -> Array:
        """Return the ranks' `values` `[statistics, n]` as `[ranks, statistics, columns]`; NaN where there are none."""
        self._meet(parts)
        table = np.full((len(parts), len(values[0]), len(self._columns)), np.nan)
        for place, (part, value) in enumerate(zip(parts, values, strict=True)):
            table[place][:, self.columns_of(part)] = value
        return table

    def columns_of(self, part: PeerPart) -> Indices:
        """Return the column of each series of a rank's part."""
        return self._columns_of[part.rank][part.indices]

    def groups(self) -> list[PeerGroup]:
        """Return the groups of two and more comparable ranks among the parts last given to `arrange`."""
        return self._groups

    def _meet(self, parts: Sequence[PeerPart]) -> None:
        known = tuple((part.rank, len(part.watch.keys)) for part in parts)
        if known == self._known:
            return
        self._known = known
        for part in parts:
            columns = [self._columns.setdefault(key, len(self._columns)) for key in part.watch.keys]
            self._columns_of[part.rank] = np.array(columns, np.intp)
        self._groups = list(self._group(parts))

    def _group(self, parts: Sequence[PeerPart]) -> Iterator[PeerGroup]:
        by_column: list[dict[Hashable, list[int]]] = [{} for _ in self._columns]
        for place, part in enumerate(parts):
            watch = part.watch
            for column, key, placement in zip(self._columns_of[part.rank], watch.keys, watch.placements, strict=True):
                label = self._label(key, placement, part.place)
                if label is not None:
                    by_column[column].setdefault(label, []).append(place)
        return peer_groups(by_column)


def peer_groups(by_column: Sequence[Mapping[Hashable, Sequence[int]]]) -> Iterator[PeerGroup]:
    """Yield the groups of ranks with the same label in a column; columns with the same group are taken together.

    There are few such patterns.
    """
    columns_of: dict[tuple[int, ...], list[int]] = {}
    for column, groups in enumerate(by_column):
        for members in groups.values():
            if len(members) > 1:
                columns_of.setdefault(tuple(members), []).append(column)
    for together, columns in columns_of.items():
        yield PeerGroup(np.array(together, np.intp), np.array(columns, np.intp))


def same_elements(key: SeriesKey, placement: Placement | None, place: Coordinates) -> Hashable:
    """Return a label that is the same for ranks that must show the same; None if the series is not compared.

    Such ranks hold copies of the same elements, or are members of one process group. Numbers of the step, which have no
    placement, must be the same everywhere. Of a group's numbers only those of the groups along one axis are compared,
    and not along `pp`: the sends of pipeline stages differ.
    """
    if key.kind is Kind.COMM:
        if key.name == "world":
            return ()
        return _without(place, (key.name,)) if key.name in AXES and key.name != "pp" else None
    if placement is None:
        return () if key.kind is Kind.STEP else None
    return same_copy(placement, place)


def same_copy(placement: Placement, place: Coordinates) -> Hashable:
    """Return a label that is the same for ranks that hold copies of the same elements; None if there are no others."""
    axes = copy_axes(placement)
    return (placement.offset, placement.length, _without(place, axes)) if axes else None


def same_part(key: SeriesKey, placement: Placement | None, place: Coordinates) -> Hashable:
    """Return a label that is the same for ranks that hold the same part of the model for other data."""
    del key
    held = (placement.offset, placement.length) if placement else None
    return held, place.tp, place.pp


def same_stage(key: SeriesKey, placement: Placement | None, place: Coordinates) -> Hashable:
    """Return a label that is the same for ranks that have the same work to do: those of one pipeline stage."""
    del key, placement
    return (place.pp,)


def copy_axes(placement: Placement) -> frozenset[str]:
    """Return the axes of `Coordinates` along which ranks hold copies; none where there is no way to tell.

    The ranks of expert parallelism are data-parallel ones to a parameter that is no expert's. Experts are replicated
    over `edp`, which runs along the data axes between ranks of one expert-parallel place. Of an axis like `etp` no rank
    knows its place.
    """
    if not set(placement.partitioned_over) <= {*AXES, "edp"}:
        return frozenset()
    axes = set(placement.replicated_over)
    axes |= {"ep"} if "dp" in axes else set()
    axes |= {"dp", "cp"} if "edp" in axes else set()
    return frozenset(axes)


def _without(place: Coordinates, axes: Collection[str]) -> tuple[int, ...]:
    return tuple(getattr(place, axis) for axis in AXES if axis not in axes)
