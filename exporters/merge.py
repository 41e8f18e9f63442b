"""Merges what the local ranks say about one step: moments by series, and the few numbers of the step as a whole."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from trainermon.monitor.catalogue import LOSS_SERIES, STEP_TIME_SERIES
from trainermon.monitor.journal import Header
from trainermon.monitor.values import NO_ELEMENTS, STATISTICS, Kind, Placement, SeriesKey, StatBlock

Floats: TypeAlias = npt.NDArray[np.float64]
Indices: TypeAlias = npt.NDArray[np.intp]

HEATMAP_STATISTICS = ("rms", "absmax", "zero_ratio")
SCALAR_KINDS = frozenset({Kind.LOSS, Kind.STEP})
LOSS = SeriesKey(Kind.LOSS, LOSS_SERIES)
DURATION = SeriesKey(Kind.STEP, STEP_TIME_SERIES)

_COUNT, _MIN, _MAX, _SUM, _SUM_SQ, _ZEROS, _NANS, _INFS = range(len(STATISTICS))
_NEUTRAL = np.array([[getattr(NO_ELEMENTS, name)] for name in STATISTICS])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """One step over all local ranks; NaN where nothing was recorded, infinity where something was not finite.

    `loss` is the mean over the ranks, `step_time_s` the largest. `grad_norm` is the norm of all reduced gradients, each
    element counted once.
    """

    step: int
    time_s: float
    loss: float
    grad_norm: float
    step_time_s: float


class SeriesTable(NamedTuple):
    """How the series of one rank are used; all arrays run by series id."""

    header: Header
    rows: Indices  # row in the heat maps, -1 for none
    weights: Floats  # of the sum of squares in the gradient norm: 1 / scale² for a reduced gradient, else 0
    in_global_norm: npt.NDArray[np.bool_]
    is_loss: npt.NDArray[np.bool_]
    is_duration: npt.NDArray[np.bool_]


class RankStep(NamedTuple):
    """What one rank says of a step as a whole, NaN for nothing; `share` is its part of the squared global norm."""

    time_s: float
    step_time: float
    loss: float
    grad_norm: float
    share: float


class OpenStep:
    """A step as far as the ranks have reached it."""

    def __init__(self) -> None:
        self.moments = np.empty((len(STATISTICS), 0))
        self.ranks: dict[int, RankStep] = {}

    def add(self, table: SeriesTable, block: StatBlock) -> None:
        """Merge the block of one rank."""
        series = np.asarray(block.series)
        values = np.asarray(block.values)
        rows = table.rows[series]
        shown = rows >= 0
        self._merge(rows[shown], values[:, shown])
        self.ranks[table.header.coordinates.rank] = _rank_step(table, series, values, block.time_s)

    def heat(self, statistic: str) -> Floats:
        """Return one statistic by row: NaN without any element, +inf where one is not finite."""
        return heat(self.moments, statistic)

    def by_rank(self, quantity: str, rows: Mapping[int, int]) -> Floats:
        """Return one quantity by the row of each rank, NaN where it has not reached the step.

        `lag` is in seconds behind the first rank, by their own clocks.
        """
        values = np.full(len(rows), np.nan)
        first_s = min(rank.time_s for rank in self.ranks.values())
        for rank, says in self.ranks.items():
            values[rows[rank]] = says.time_s - first_s if quantity == "lag" else getattr(says, quantity)
        return values

    def summary(self, step: int) -> StepSummary:
        """Return the step as a whole, over the ranks that have reached it."""
        ranks = self.ranks.values()
        shares = _present(rank.share for rank in ranks)
        losses = _present(rank.loss for rank in ranks)
        return StepSummary(
            step=step,
            time_s=max(rank.time_s for rank in ranks),
            loss=sum(losses) / len(losses) if losses else math.nan,
            # Where all counted copies are on other nodes, every rank here holds a replica of some of them.
            grad_norm=math.sqrt(sum(shares)) if shares else _largest(rank.grad_norm for rank in ranks),
            step_time_s=_largest(rank.step_time for rank in ranks),
        )

    def _merge(self, rows: Indices, values: Floats) -> None:
        missing = int(rows.max(initial=-1)) + 1 - self.moments.shape[1]
        if missing > 0:
            self.moments = np.concatenate([self.moments, np.repeat(_NEUTRAL, missing, axis=1)], axis=1)
        for statistic, target in enumerate(self.moments):
            _MERGE[statistic].at(target, rows, values[statistic])


_MERGE = [{_MIN: np.minimum, _MAX: np.maximum}.get(statistic, np.add) for statistic in range(len(STATISTICS))]


def series_table(header: Header, keys: Sequence[SeriesKey], row_of: Callable[[SeriesKey, int], int]) -> SeriesTable:
    """Return the table of a rank; `row_of` gives the heat maps' row for a key and its place in the table, or -1."""
    placements = [*header.placements[: len(keys)], *[None] * (len(keys) - len(header.placements))]
    is_first_copy = header.coordinates.dp == 0
    return SeriesTable(
        header=header,
        rows=np.array(
            [-1 if key.kind in SCALAR_KINDS else row_of(key, place) for place, key in enumerate(keys)], np.intp
        ),
        weights=np.array([_weight(key, at) for key, at in zip(keys, placements, strict=True)], np.float64),
        in_global_norm=np.array([at.in_global_norm if at else is_first_copy for at in placements], np.bool_),
        is_loss=np.array([key == LOSS for key in keys], np.bool_),
        is_duration=np.array([key == DURATION for key in keys], np.bool_),
    )


def heat(moments: Floats, statistic: str) -> Floats:
    """Return `statistic` of moments [8, n]: NaN without any element, +inf where one is not finite."""
    count, finite = moments[_COUNT], moments[_COUNT] - moments[_NANS] - moments[_INFS]
    with np.errstate(divide="ignore", invalid="ignore"):
        if statistic == "rms":
            values = np.sqrt(moments[_SUM_SQ] / finite)
        elif statistic == "absmax":
            values = np.where(finite > 0, np.maximum(-moments[_MIN], moments[_MAX]), np.nan)
        else:
            values = moments[_ZEROS] / count
    return np.where(finite < count, np.inf, np.where(count > 0, values, np.nan))


def _weight(key: SeriesKey, placement: Placement | None) -> float:
    if key.kind is not Kind.GRAD_REDUCED:
        return 0.0
    return placement.scale**-2 if placement else 1.0


def _rank_step(table: SeriesTable, series: Indices, values: Floats, time_s: float) -> RankStep:
    weights = table.weights[series]
    is_grad = weights > 0
    counts = is_grad & table.in_global_norm[series]
    is_loss, is_duration = table.is_loss[series], table.is_duration[series]
    return RankStep(
        time_s=time_s,
        step_time=_scalar(values[:, is_duration]),
        loss=_scalar(values[:, is_loss]),
        grad_norm=math.sqrt(_sum_sq(values[:, is_grad], weights[is_grad])),
        share=_sum_sq(values[:, counts], weights[counts]),
    )


def _sum_sq(moments: Floats, weights: Floats) -> float:
    """Return the weighted sum of squares; NaN of nothing, infinity with a non-finite element."""
    if not moments.size:
        return math.nan
    if moments[[_NANS, _INFS]].any():
        return math.inf
    return float(moments[_SUM_SQ] @ weights)


def _scalar(moments: Floats) -> float:
    """Return the mean of the series' elements; NaN of nothing, infinity with a non-finite element."""
    if moments[[_NANS, _INFS]].any():
        return math.inf
    finite = moments[_COUNT].sum()
    return float(moments[_SUM].sum() / finite) if finite else math.nan


def _present(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _largest(values: Iterable[float]) -> float:
    return max(_present(values), default=math.nan)
