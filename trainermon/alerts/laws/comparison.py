"""Applies a law to the ranks of a node: lines their rows up by tensor, and says of each whether the law is broken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from trainermon.alerts.across_ranks.comparing import ComparedSeries, ComparisonMemory, are_calm
from trainermon.alerts.across_ranks.peers import PeerPart
from trainermon.alerts.conditions.condition import ConditionVerdict, Indices
from trainermon.alerts.conditions.criteria import BreaksLaw
from trainermon.alerts.laws.law import Law, LawStep, LawVerdict, TensorPlace
from trainermon.alerts.laws.registry import law_of
from trainermon.core.values import STATISTICS, Kind, Placement

_MOST_PATTERNS = 16


class LawComparison(ComparisonMemory):
    """Judges one law on each step, when all ranks of the node have shown it.

    Ranks are waited for however far they are behind: those that no longer reduce their gradients have nothing that
    holds them together.
    """

    is_patient = True

    def __init__(self, condition: BreaksLaw) -> None:
        super().__init__()
        self._law = law_of(condition.law)
        self._relation = self._law.relation({**self._law.settings, **condition.settings})
        self._table = LawTable(self._law)

    def reset(self) -> None:  # noqa: D102 - as in ComparisonMemory, here and below
        self._table.reset()

    def judge(self, parts: Sequence[PeerPart]) -> list[ComparedSeries | None]:  # noqa: D102
        verdict = self._relation.judge(self._table.line_up(parts))
        if verdict is None or not (verdict.broken.any() or (verdict.judged.any() and not are_calm(parts))):
            return [None] * len(parts)
        return [self._found(part, place, verdict) for place, part in enumerate(parts)]

    def _found(self, part: PeerPart, place: int, verdict: LawVerdict) -> ComparedSeries:
        slots, columns = self._table.judged(part)
        size, explained = verdict.size[place, columns], verdict.explained[place, columns]
        judged, bad = verdict.judged[place, columns], verdict.broken[place, columns]
        score = size / np.where(explained > 0.0, explained, 1.0)
        shown = np.full((len(STATISTICS), len(slots)), np.nan)
        return ComparedSeries(slots, shown, ConditionVerdict(size, score, bad, judged & ~bad, ~judged), explained)


class LawTable:
    """Lines up the rows of all ranks by tensor.

    Args:
        law: Says which kinds.
    """

    def __init__(self, law: Law) -> None:
        self._law = law
        self._tensors: dict[TensorPlace, int] = {}
        self._known: dict[int, _LinedUpSeries] = {}

    def reset(self) -> None:
        """Forget how tensors are placed: they may lie elsewhere in the next attempt. Columns stay."""
        self._known.clear()

    def line_up(self, parts: Sequence[PeerPart]) -> LawStep:
        """Return what the ranks show of a step."""
        known = [self._series(part) for part in parts]
        kinds, shape = (*self._law.rows, *self._law.also), (len(parts), len(STATISTICS), len(self._tensors))
        rows = {kind: np.full(shape, np.nan) for kind in kinds}
        for place, (part, series) in enumerate(zip(parts, known, strict=True)):
            for number, shown, columns in series.shown(part.indices):
                rows[kinds[number]][place][:, columns] = part.moments[:, shown]
        return LawStep(
            step=parts[0].step,
            attempt=parts[0].attempt,
            places=[part.place for part in parts],
            tensors=list(self._tensors),
            rows=rows,
            placements={kind: [series.placed(kind, len(self._tensors)) for series in known] for kind in kinds},
        )

    def judged(self, part: PeerPart) -> tuple[Indices, Indices]:
        """Return the series of a rank that the verdict is about, as positions among the rule's, and their columns."""
        series = self._series(part)
        slots = np.flatnonzero(series.kinds == 0)
        return slots, series.columns[slots]

    def _series(self, part: PeerPart) -> _LinedUpSeries:
        watch, known = part.watch, self._known.get(part.rank)
        if known is None or len(known.columns) != len(watch.keys):
            places = [TensorPlace.of(key) for key in watch.keys]
            columns = [self._tensors.setdefault(place, len(self._tensors)) for place in places]
            kinds = [(*self._law.rows, *self._law.also).index(key.kind) for key in watch.keys]
            placed: dict[Kind, dict[int, Placement | None]] = {}
            for key, column, placement in zip(watch.keys, columns, watch.placements, strict=True):
                placed.setdefault(key.kind, {})[column] = placement
            known = self._known[part.rank] = _LinedUpSeries(
                np.array(columns, np.intp), np.array(kinds, np.intp), placed
            )
        return known


class _ShownRows(NamedTuple):
    """Which rows of a step belong where; keeps `indices` alive, whose identity it is known by."""

    indices: Indices
    by_kind: Sequence[tuple[int, Indices, Indices]]


class _LinedUpSeries:
    """The series of one rank that a law looks at: their columns, the number of their kinds, and how they are placed."""

    def __init__(self, columns: Indices, kinds: Indices, placed: Mapping[Kind, Mapping[int, Placement | None]]) -> None:
        self.columns = columns
        self.kinds = kinds
        self._shown: dict[int, _ShownRows] = {}
        self._of_kind = placed
        self._placed: dict[Kind, list[Placement | None]] = {}

    def shown(self, indices: Indices) -> Sequence[tuple[int, Indices, Indices]]:
        """Return the rows of a step by kind: its number, which rows they are, and in which columns they belong.

        `indices`: of which series the rows are; the same array comes again with each step that shows the same series.
        """
        known = self._shown.get(id(indices))
        if known is None or known.indices is not indices:
            if len(self._shown) == _MOST_PATTERNS:
                self._shown.clear()
            kinds = self.kinds[indices]
            chosen = [(number, np.flatnonzero(kinds == number)) for number in np.unique(kinds).tolist()]
            by_kind = [(number, rows, self.columns[indices[rows]]) for number, rows in chosen]
            known = self._shown[id(indices)] = _ShownRows(indices, by_kind)
        return known.by_kind

    def placed(self, kind: Kind, num_tensors: int) -> Sequence[Placement | None]:
        """Return the placements of the tensors by column; None where this rank has none of them."""
        known = self._placed.get(kind)
        if known is None or len(known) != num_tensors:
            of_kind = self._of_kind.get(kind, {})
            known = self._placed[kind] = [of_kind.get(column) for column in range(num_tensors)]
        return known
