"""What was told of one rank last, and how its series stand together: by series id, in arrays.

What is not known or not finite becomes NaN here and no sample in the exposition.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainermon.core.catalogue import STEP_TIME_SERIES
from trainermon.core.journal.patterns import ByPattern, Rows, compact
from trainermon.core.values import STATISTICS, Kind, Placement, SeriesKey, StatBlock
from trainermon.exporters.prometheus.scalar_series import WAITED, ScalarSeries, collectives, losses, step_values

Array = npt.NDArray[Any]

_COUNT, _MAX, _SUM, _SUM_SQ, _NANS, _INFS = (
    STATISTICS.index(name) for name in ("count", "max", "sum", "sum_sq", "nans", "infs")
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SeriesIndex:
    """Which of a rank's series, by id, enter which Prometheus metric.

    Attributes:
        kinds: The kinds of series that the rank has.
        kind_of: By series id, the position of its kind in `kinds`.
        losses: The loss.
        step_values: Other numbers of the step.
        collectives: Numbers of process groups.
        scalars: All three of these.
        scalar_of: By series id, the position in `scalars`; -1: in none.
        waits: By purpose of a process group: for each id, whether it is a waiting time.
        step_time: The id of the duration of the step.
        gradients: The ids of the reduced gradients.
        counted_gradients: Those that count in the global norm.
    """

    kinds: list[Kind]
    kind_of: Array
    losses: list[ScalarSeries]
    step_values: list[ScalarSeries]
    collectives: list[ScalarSeries]
    scalars: list[ScalarSeries]
    scalar_of: Array
    waits: dict[str, Array]
    step_time: Array
    gradients: Array
    counted_gradients: Array

    @classmethod
    def of(cls, keys: Sequence[SeriesKey], placements: Sequence[Placement | None]) -> SeriesIndex:
        """Return the index of a series table; placements are parallel to the keys, or shorter."""
        kinds = list(dict.fromkeys(key.kind for key in keys))
        parts = losses(keys), step_values(keys), collectives(keys)
        scalars = [scalar for part in parts for scalar in part]
        scalar_of = np.full(len(keys), -1, np.intp)
        for number, scalar in enumerate(scalars):
            scalar_of[scalar.ids] = number
        waits = {scalar.labels["purpose"]: scalar for scalar in parts[2] if scalar.metric == WAITED}
        elsewhere = {i for i, placement in enumerate(placements) if placement and not placement.in_global_norm}
        gradients = [i for i, key in enumerate(keys) if key.kind is Kind.GRAD_REDUCED]
        return cls(
            kinds=kinds,
            kind_of=_ids(kinds.index(key.kind) for key in keys),
            losses=parts[0],
            step_values=parts[1],
            collectives=parts[2],
            scalars=scalars,
            scalar_of=scalar_of,
            waits={purpose: np.isin(np.arange(len(keys)), scalar.ids) for purpose, scalar in waits.items()},
            step_time=_ids(i for i, key in enumerate(keys) if key.kind is Kind.STEP and key.name == STEP_TIME_SERIES),
            gradients=_ids(gradients),
            counted_gradients=_ids(i for i in gradients if i not in elsewhere),
        )


class ToldSeries(NamedTuple):
    """What a block tells, by the ids of its series.

    Attributes:
        series: The ids, as a slice where they are consecutive.
        kind_of: By row, the position of its kind among the rank's.
        rows: The rows that belong to scalars.
        numbers: To which one each of them belongs.
        distinct: The scalars that are told, each once.
        has_step_time: Whether the duration of the step is told.
        waits: By purpose of a process group: the rows that are waiting times.
    """

    series: Rows
    kind_of: Array
    rows: Array
    numbers: Array
    distinct: tuple[int, ...]
    has_step_time: bool
    waits: tuple[tuple[str, Array], ...]

    @classmethod
    def of(cls, index: SeriesIndex, series: Array) -> ToldSeries:
        """Return what the block with these series tells."""
        numbers = index.scalar_of[series]
        rows = np.flatnonzero(numbers >= 0)
        return cls(
            series=compact(series.astype(np.intp)),
            kind_of=index.kind_of[series],
            rows=rows,
            numbers=numbers[rows],
            distinct=tuple(np.unique(numbers[rows]).tolist()),
            has_step_time=bool(np.isin(index.step_time, series).any()),
            waits=tuple((purpose, np.flatnonzero(is_wait[series])) for purpose, is_wait in index.waits.items()),
        )


class RankValues:
    """Keeps the last values of one rank by series id, and the sums over all its blocks.

    Attributes:
        index: Where things stand in the rank's series table.
        step: The newest step; NaN before the first.
        time_s: When it ended.
        totals: By identity of a scalar that adds up, its sum.
        nonfinite: By kind, how many elements were not finite.
        rows: By series id: finite elements, their sum, sum of squares, and the largest.
    """

    def __init__(self) -> None:
        self.index = SeriesIndex.of((), ())
        self.step = self.time_s = math.nan
        self.totals: dict[tuple[str, str], float] = {}
        self.nonfinite: dict[Kind, float] = {}
        self.rows: Array = np.zeros((4, 0))
        self._bad: Array = np.zeros(0)  # elements that are not finite
        self._told = ByPattern(self._told_by)

    def register(
        self, keys: Sequence[SeriesKey], placements: Sequence[Placement | None], *, is_same_attempt: bool
    ) -> None:
        """Set the series table; within an attempt it only grows, and values of its series stay."""
        rows, bad = np.zeros((4, len(keys))), np.zeros(len(keys))
        if is_same_attempt:
            rows[:, : self.rows.shape[1]] = self.rows
            bad[: len(self._bad)] = self._bad
        self.rows, self._bad, self.index = rows, bad, SeriesIndex.of(keys, placements)
        self._told.clear()
        for kind in self.index.kinds:
            self.nonfinite.setdefault(kind, 0.0)
        for scalar in self.index.scalars:
            self.totals.setdefault(scalar.identity, 0.0)

    def told(self, block: StatBlock) -> ToldSeries:
        """Return which series of the table a block tells."""
        return self._told.of(np.asarray(block.series))

    def _told_by(self, series: Array) -> ToldSeries:
        return ToldSeries.of(self.index, series)

    def update(self, block: StatBlock) -> None:
        """Store the rows of a block (one step); rows of series that are not in it stay as they were."""
        told, values = self.told(block), np.asarray(block.values)
        bad = values[_NANS] + values[_INFS]
        self._forget_and_add(told, values[_SUM])
        finite = values[_COUNT] - bad
        for row, source in zip(self.rows, (finite, values[_SUM], values[_SUM_SQ], values[_MAX]), strict=True):
            row[told.series] = source
        self._bad[told.series] = bad
        if np.count_nonzero(bad):
            kinds = self.index.kinds
            totals = np.bincount(told.kind_of, weights=bad, minlength=len(kinds))
            for kind, total in zip(kinds, totals.tolist(), strict=True):
                self.nonfinite[kind] += total
        self.step, self.time_s = block.step, block.time_s

    def mean(self, ids: Array) -> float:
        """Return the mean of the finite elements of the series `ids`; NaN without any."""
        finite = float(self.rows[0, ids].sum())
        return float(self.rows[1, ids].sum()) / finite if finite else math.nan

    def loss(self, ids: Array) -> float:
        """Return the mean of the losses `ids`; infinity if any part was not finite."""
        return math.inf if self._bad[ids].any() else self.mean(ids)

    def norm(self, ids: Array) -> float:
        """Return the norm (root of the sum of squares) over the series `ids`.

        NaN if a part was not finite or none is known.
        """
        is_known = self.rows[0, ids].any() and not self._bad[ids].any()
        return math.sqrt(float(self.rows[2, ids].sum())) if is_known else math.nan

    def _forget_and_add(self, told: ToldSeries, sums: Array) -> None:
        """Forget all parts of the scalars that the step tells anew: it may have fewer micro steps; add to totals."""
        added = np.bincount(told.numbers, weights=sums[told.rows], minlength=len(self.index.scalars))
        for number in told.distinct:
            scalar = self.index.scalars[number]
            if scalar.adds_up:
                self.totals[scalar.identity] += float(added[number])
            elif len(scalar.ids) > 1:
                self.rows[:, scalar.ids] = 0.0


def _ids(values: Iterable[int]) -> Array:
    return np.fromiter(values, dtype=np.intp)
