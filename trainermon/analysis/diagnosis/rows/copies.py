"""Between which steps copies of parameters parted, and whether the forward of a module that all ranks have did it.

Ranks that differ in nothing but their place in tensor parallelism compute the same in modules that all of them have:
layer norms, routers, the dropout of embeddings. Where such a module is given the same and returns something else, as
with another random state on each rank, the gradients of copied parameters part, and with the update the parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from trainermon.analysis.diagnosis.domains import Places
from trainermon.analysis.diagnosis.rows.copy_rows import CopiedCall, Copies, CopyRows, SeriesName, read_copies
from trainermon.analysis.diagnosis.rows.order import StepOrder
from trainermon.analysis.diagnosis.rows.symptoms import Episode, Moved
from trainermon.core.values import Kind

if TYPE_CHECKING:
    import duckdb

MAX_SERIES = 100
OF_COPIES = frozenset({Kind.CHECKSUM, Kind.PARAM_ORIGIN, Kind.PARAM_UPDATED})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CopyParting:
    """Two stored steps between which copies of a parameter on several ranks stopped being equal.

    Attributes:
        before: The last stored step before `last_equal` that shows the copies; that one itself if there is none.
        last_equal: The last step on which they are known to be equal.
        found: The first step on which they are not.
        groups: Ranks that are given the same data and whose copies were equal; () if none are.
    """

    before: int
    last_equal: int
    found: int
    groups: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CopyDeparture:
    """The forward whose results first differed between ranks that should have the same.

    Attributes:
        step: The step.
        rows: What it returned on the ranks that departed from the others.
        ranks: Those ranks.
        is_tied: No value had a majority: then these are all ranks, and any of them may be the wrong one.
        has_parameters: Whether the parameters of the module are stored.
    """

    step: int
    rows: tuple[Moved, ...]
    ranks: tuple[int, ...]
    is_tied: bool
    has_parameters: bool


def find_parting(
    connection: duckdb.DuckDBPyConnection, attempt: int, episode: Episode, places: Places
) -> CopyParting | None:
    """Return the last stored step on which the copies of an episode were equal, and the one on which they are not.

    None if the episode is of something else, or no such step is known. They were equal on the last step on which every
    rank that was found wrong had a copy equal to more others than now. Of more series than a hundred the first count.
    """
    series = sorted(key for key in episode.series if key[0] in OF_COPIES)[:MAX_SERIES]
    shown = read_copies(connection, attempt, series, episode.first_step) if series else {}
    now = shown.pop(episode.first_step, {})
    equal = [step for step, then in shown.items() if all(_had_more_like_it(then, now, rank) for rank in episode.ranks)]
    if not equal or not episode.ranks:
        return None
    last = max(equal)
    groups = {group for rank in episode.ranks for key in now for group in _parted(shown[last], now, key, rank, places)}
    return CopyParting(
        before=max((step for step in shown if step < last), default=last),
        last_equal=last,
        found=episode.first_step,
        groups=tuple(sorted(groups)),
    )


def _had_more_like_it(then: Copies, now: Copies, rank: int) -> bool:
    common = (key for key in now if rank in now[key] and rank in then.get(key, {}))
    return any(len(_like(then[key], rank)) > len(_like(now[key], rank)) for key in common)


def _like(values: Mapping[int, object], rank: int) -> list[int]:
    return [other for other, value in values.items() if value == values[rank]]


def _parted(then: Copies, now: Copies, key: SeriesName, rank: int, places: Places) -> Iterator[tuple[int, ...]]:
    """Yield the ranks with the data of `rank` whose copies were equal to its own then, if they are not any more."""
    before = then.get(key, {})
    if rank in before and rank in places:
        data = _data_place(places[rank])
        group = [other for other in _like(before, rank) if other in places and _data_place(places[other]) == data]
        if len({now[key][other] for other in group if other in now[key]}) > 1:
            yield tuple(sorted(group))


def _data_place(place: Mapping[str, int]) -> dict[str, int]:
    return {axis: number for axis, number in place.items() if axis != "tp"}


def find_departure(
    connection: duckdb.DuckDBPyConnection, attempt: int, parting: CopyParting, order: StepOrder
) -> CopyDeparture | None:
    """Return where copies parted: the first forward that gave different values on ranks that were given the same.

    Only forwards since the copies were last equal count. The result has the rows and ranks that departed; all ranks, if
    none had a majority. None where no activations are stored that tell. A module that was given other values on each
    rank passed them on, one whose parameters are not known to be equal may be split over the ranks, and one that
    departed before without parting the copies is meant to. Cost: reads the activations of the ranks since the check
    before the last equal one.
    """
    found = []
    for group in parting.groups:
        candidates = _CandidateCalls(CopyRows(connection, attempt, group), parting, order)
        first = candidates.first()
        if first is not None:
            found.append((candidates, first))
    if not found:
        return None
    chosen, call = min(found, key=lambda one: one[0].place(one[1]))
    alike = [one.rows for one, other in found if other == call]
    departed = [rows.departed(call) for rows in alike]
    return CopyDeparture(
        step=call.step,
        rows=tuple(row for rows, _ in departed for row in rows),
        ranks=tuple(sorted(rank for rows in alike for rank in rows.ranks)),
        is_tied=any(is_tied for _, is_tied in departed),
        has_parameters=bool(chosen.inside(call)),
    )


class _CandidateCalls:
    """The calls of modules on ranks of one group, and which of them may have parted the copies."""

    def __init__(self, rows: CopyRows, parting: CopyParting, order: StepOrder) -> None:
        self.rows = rows
        self._parting = parting
        self._order = order
        calls = rows.departing(parting.before, parting.found)
        before = [call for call in calls if call.step < parting.last_equal and not call.given_differs]
        self._meant = {(call.stage, call.name) for call in before if call.departs}
        self._agreed = {(call.stage, call.name) for call in before} - self._meant
        self._departing = [call for call in calls if call.departs and call.step >= parting.last_equal]
        self._names, self._are_told = rows.parameters(parting.last_equal, parting.found)
        steps = {parting.last_equal, parting.found, *(call.step for call in self._departing)}
        self._weights = rows.weights_equal(steps)

    def place(self, call: CopiedCall) -> tuple[float, ...]:
        return (call.step, *self._order.key(call.row(self.rows.ranks[0])))

    def inside(self, call: CopiedCall) -> list[str]:
        """Return the names of the module's parameters, as far as rows tell."""
        return [name for name in self._names if name.startswith(f"{call.name}.")]

    def first(self) -> CopiedCall | None:
        """Return the first call of a module that should have returned the same on all ranks, and did not."""
        return next((call for call in sorted(self._departing, key=self.place) if self._is_copied(call)), None)

    def _is_copied(self, call: CopiedCall) -> bool:
        if (call.stage, call.name) in self._meant:
            return False
        inside = self.inside(call)
        if inside:
            return all(self._is_equal(name, call.step) for name in inside)
        return (call.stage, call.name) in self._agreed or (self._are_told and self._went_on(call))

    def _is_equal(self, name: str, step: int) -> bool:
        """Return whether a parameter is known to be equal on all ranks: on the step, else on both sides of it."""
        known = self._weights.get(name, {})
        sides = (step,) if step in known else (self._parting.last_equal, self._parting.found)
        return all(known.get(side, False) for side in sides)

    def _went_on(self, call: CopiedCall) -> bool:
        """Return whether the last module with copied parameters was given other values on each rank.

        What is split on purpose has been summed up or gathered until then, or comes after it.
        """
        copied = {name.rpartition(".")[0] for name in self._names if self._is_equal(name, self._parting.last_equal)}
        same = [one for one in self.rows.of_modules(copied, call.step) if _stream(one) == _stream(call)]
        return bool(same) and max(same, key=self.place).given_differs


def _stream(call: CopiedCall) -> tuple[int | None, int]:
    return call.micro_step, call.stage
