"""Merges what the local ranks say about one step: moments by series, and the few numbers of the step as a whole."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from trainermon.core.catalogue import (
    ACCELERATOR_CLOCK_SERIES,
    ACCELERATOR_MEMORY_SERIES,
    ACCELERATOR_POWER_SERIES,
    ACCELERATOR_TEMPERATURE_SERIES,
    ACCELERATOR_THROTTLED_SERIES,
    ACCELERATOR_UTILIZATION_SERIES,
    CLIP_RATIO_SERIES,
    GLOBAL_NORM_SERIES,
    LEARNING_RATE_SERIES,
    LOSS_SCALE_SERIES,
    LOSS_SERIES,
    ROLLOUT_DIFFERENCE_SERIES,
    ROLLOUT_RATIO_SERIES,
    ROLLOUT_SAMPLES_SERIES,
    SKIPPED_SERIES,
    STEP_TIME_SERIES,
    TOKENS_PER_SECOND_SERIES,
)
from trainermon.core.journal import Header
from trainermon.core.journal.patterns import ByPattern, Rows, compact
from trainermon.core.values import NO_ELEMENTS, STATISTICS, Kind, Placement, SeriesKey, StatBlock, measured_as_plain

Floats: TypeAlias = npt.NDArray[np.float64]
Indices: TypeAlias = npt.NDArray[np.intp]
Mask: TypeAlias = npt.NDArray[np.bool_]
RowMoments: TypeAlias = list[list[Any]]  # of each row: numbers, or arrays of as many ranks

STEP_TIME = "step_time"
WAIT = "wait"
LAG = "lag"
GRAD_NORM = "grad_norm"

_COUNT, _MIN, _MAX, _SUM, _SUM_SQ, _ZEROS, _NANS, _INFS = range(len(STATISTICS))
NEUTRAL = np.array([[getattr(NO_ELEMENTS, name)] for name in STATISTICS])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """One step over all local ranks; NaN where nothing was recorded, infinity where something was not finite.

    Attributes:
        step: The step.
        time_s: Unix time of its end.
        loss: Mean over ranks and micro steps.
        grad_norm: Norm of all reduced gradients, each element counted once.
        step_time_s: The largest duration.
        global_grad_norm: What the framework returned.
        learning_rate: The largest of the parameter groups.
        clip_ratio: What clipping multiplied the gradients by; the smallest, where ranks differ.
        loss_scale: What the loss was multiplied by; the smallest, where ranks differ.
        skipped: Whether the framework skipped the step: 1 or 0.
        tokens_per_second: The sum over the ranks.
        rl_mean_abs: How far log-probabilities of rollout and trainer are apart; the largest, where ranks differ.
        rl_ratio: The mean of their ratios, over the ranks.
        rl_ess: The effective share of the sampled tokens; the smallest, where ranks differ.
        accelerator_utilization: Share of time in which the accelerators computed; the smallest, where ranks differ.
        accelerator_memory_bytes: Memory in use on one accelerator; the largest.
        accelerator_power_watts: What the accelerators draw; the sum over the ranks.
        accelerator_temperature_celsius: Of the hottest accelerator.
        accelerator_clock_hertz: Of the slowest accelerator.
        accelerator_throttled: 1 where one is slowed down by heat or the power supply, else 0.
    """

    step: int
    time_s: float
    loss: float
    grad_norm: float
    step_time_s: float
    global_grad_norm: float = math.nan
    learning_rate: float = math.nan
    clip_ratio: float = math.nan
    loss_scale: float = math.nan
    skipped: float = math.nan
    tokens_per_second: float = math.nan
    rl_mean_abs: float = math.nan
    rl_ratio: float = math.nan
    rl_ess: float = math.nan
    accelerator_utilization: float = math.nan
    accelerator_memory_bytes: float = math.nan
    accelerator_power_watts: float = math.nan
    accelerator_temperature_celsius: float = math.nan
    accelerator_clock_hertz: float = math.nan
    accelerator_throttled: float = math.nan

    def as_plain(self) -> dict[str, float | str | None]:
        """Return the step ready for JSON, as `measured_as_plain` has each number."""
        return {field.name: measured_as_plain(getattr(self, field.name)) for field in dataclasses.fields(self)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MergeTable:
    """How the series of one rank enter the numbers of the whole step; all arrays run by series id.

    Attributes:
        header: The rank's header.
        rows: The row of the heat maps; -1: none.
        weights: With what weight its sum of squares counts in the gradient norm: 1 / scale² for a reduced gradient,
            else 0.
        in_global_norm: Whether it counts there.
        scalars: Which number of the step (loss, learning rate …) it is, as its place in `SCALARS`; -1: none.
        merged: Where the rows of a block go.
    """

    header: Header
    rows: Indices
    weights: Floats
    in_global_norm: Mask
    scalars: Indices
    merged: ByPattern[MergedRows] = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "merged", ByPattern(partial(MergedRows.of, self)))


class MergedRows(NamedTuple):
    """Which rows of a block go where, by the ids of its series and the rank's table.

    Attributes:
        sources: The rows that heat maps show.
        targets: Their rows in the heat maps.
        num_targets: So many rows the heat maps must have.
        are_distinct: Whether no two go to the same row.
        gradients: The rows of gradients, and the weights of their squares.
        counted: Those of them that count in the global norm, with their weights.
        all_count: Whether those are all gradients.
        scalars: By name of a number of the step, its rows.
    """

    sources: Rows
    targets: Rows
    num_targets: int
    are_distinct: bool
    gradients: tuple[Indices, Floats]
    counted: tuple[Indices, Floats]
    all_count: bool
    scalars: tuple[tuple[str, Indices], ...]

    @classmethod
    def of(cls, table: MergeTable, series: Indices) -> MergedRows:
        """Return where the rows of a block with these series go."""
        rows, weights, scalars = table.rows[series], table.weights[series], table.scalars[series]
        shown, gradients = np.flatnonzero(rows >= 0), np.flatnonzero(weights > 0)
        counted = gradients[table.in_global_norm[series][gradients]]
        return cls(
            sources=compact(shown),
            targets=compact(rows[shown]),
            num_targets=int(rows.max(initial=-1)) + 1,
            are_distinct=len(np.unique(rows[shown])) == len(shown),
            gradients=(gradients, weights[gradients]),
            counted=(counted, weights[counted]),
            all_count=len(counted) == len(gradients),
            scalars=tuple(
                (_NAMES[number], np.flatnonzero(scalars == number)) for number in np.unique(scalars[scalars >= 0])
            ),
        )


class RankStep(NamedTuple):
    """What one rank reports of a step as a whole; NaN, or no entry, for nothing.

    Attributes:
        time_s: When the step ended, Unix time.
        share: Its part of the squared global gradient norm.
        scalars: Loss, step time and the like, by name.
    """

    time_s: float
    share: float
    scalars: Mapping[str, float]


class _MergeRule(NamedTuple):
    """How a number is made of a rank's rows (micro steps, groups, calls), and of the numbers of the ranks."""

    rows: Callable[[RowMoments], Any]
    ranks: Callable[[list[float]], float]


def _mean_of_rows(rows: RowMoments) -> Any:
    return sum(row[_SUM] for row in rows) / sum(row[_COUNT] for row in rows)


def _largest_of_rows(rows: RowMoments) -> Any:
    return max(row[_MAX] for row in rows)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


SCALARS: Mapping[str, _MergeRule] = MappingProxyType(
    {
        LOSS_SERIES: _MergeRule(_mean_of_rows, _mean),
        STEP_TIME: _MergeRule(_mean_of_rows, max),
        WAIT: _MergeRule(lambda rows: sum(row[_SUM] for row in rows), max),
        GLOBAL_NORM_SERIES: _MergeRule(_mean_of_rows, max),
        LEARNING_RATE_SERIES: _MergeRule(_largest_of_rows, max),
        CLIP_RATIO_SERIES: _MergeRule(_mean_of_rows, min),
        LOSS_SCALE_SERIES: _MergeRule(_mean_of_rows, min),
        SKIPPED_SERIES: _MergeRule(_mean_of_rows, max),
        TOKENS_PER_SECOND_SERIES: _MergeRule(_mean_of_rows, sum),
        ROLLOUT_DIFFERENCE_SERIES: _MergeRule(_mean_of_rows, max),
        ROLLOUT_RATIO_SERIES: _MergeRule(_mean_of_rows, _mean),
        ROLLOUT_SAMPLES_SERIES: _MergeRule(_mean_of_rows, min),
        ACCELERATOR_UTILIZATION_SERIES: _MergeRule(_mean_of_rows, min),
        ACCELERATOR_MEMORY_SERIES: _MergeRule(_largest_of_rows, max),
        ACCELERATOR_POWER_SERIES: _MergeRule(_mean_of_rows, sum),
        ACCELERATOR_TEMPERATURE_SERIES: _MergeRule(_largest_of_rows, max),
        ACCELERATOR_CLOCK_SERIES: _MergeRule(_mean_of_rows, min),
        ACCELERATOR_THROTTLED_SERIES: _MergeRule(_mean_of_rows, max),
    }
)
"""What is merged to one number per rank, and per step; infinity wherever something was not finite."""

_NAMES = tuple(SCALARS)


class StepMoments(Protocol):
    """A step as heat maps take it."""

    @property
    def moments(self) -> Floats:
        """The moments by row of the heat maps, float64 [8, rows]."""


class OpenStep:
    """Merges what ranks report of one step, until all have reached it."""

    def __init__(self) -> None:
        self.moments = np.empty((len(STATISTICS), 0))
        self.ranks: dict[int, RankStep] = {}

    def add(self, table: MergeTable, block: StatBlock) -> None:
        """Merge the block (the rows of this step) of one rank, by the rank's table."""
        values = np.asarray(block.values)
        rows = table.merged.of(np.asarray(block.series))
        self._merge(rows, values[:, rows.sources])
        self.ranks[table.header.coordinates.rank] = _rank_step(rows, values, block.time_s)

    @property
    def quantities(self) -> set[str]:
        """The quantities that `by_rank` knows of any rank."""
        return {LAG}.union(*(rank.scalars for rank in self.ranks.values()))

    def by_rank(self, quantity: str, rows: Mapping[int, int]) -> Floats:
        """Return one quantity of every rank as an array, NaN where a rank has not reached the step.

        `rows` says which position each rank has in it. `lag` is in seconds behind the first rank, by their own clocks.
        """
        values = np.full(len(rows), np.nan)
        first_s = min(rank.time_s for rank in self.ranks.values())
        for rank, says in self.ranks.items():
            values[rows[rank]] = says.time_s - first_s if quantity == LAG else says.scalars.get(quantity, math.nan)
        return values

    def summary(self, step: int) -> StepSummary:
        """Return loss, gradient norm and the other numbers of the whole step, over the ranks that have reached it."""
        ranks = self.ranks.values()
        return summarise(
            step,
            time_s=max(rank.time_s for rank in ranks),
            shares=_present(rank.share for rank in ranks),
            told={
                name: _present(rank.scalars.get(name, math.nan) for rank in ranks)
                for name in self.quantities
                if name != LAG
            },
        )

    def _merge(self, rows: MergedRows, values: Floats) -> None:
        missing = rows.num_targets - self.moments.shape[1]
        if missing > 0:
            self.moments = np.concatenate([self.moments, np.repeat(NEUTRAL, missing, axis=1)], axis=1)
        into, at = self.moments, rows.targets
        if rows.are_distinct:
            into[_COUNT, at] += values[_COUNT]
            into[_MIN, at] = np.minimum(into[_MIN, at], values[_MIN])
            into[_MAX, at] = np.maximum(into[_MAX, at], values[_MAX])
            into[_SUM:, at] += values[_SUM:]
        else:
            indices = np.arange(into.shape[1])[at]
            for statistic, target in enumerate(into):
                _MERGE.get(statistic, np.add).at(target, indices, values[statistic])


def summarise(step: int, *, time_s: float, shares: list[float], told: Mapping[str, list[float]]) -> StepSummary:
    """Return the numbers of a step over its ranks.

    `shares` are the parts of the ranks in the squared gradient norm, `told` their other numbers by name; those that say
    nothing are left out of the lists.
    """
    merged = {name: _over_ranks(name, values) for name, values in told.items() if name in SCALARS}
    merged.pop(WAIT, None)
    # Where all counted copies are on other nodes, every rank here holds a replica of some of them.
    norm = math.sqrt(sum(shares)) if shares else max(told[GRAD_NORM], default=math.nan)
    return StepSummary(
        step=step,
        time_s=time_s,
        grad_norm=norm,
        step_time_s=merged.pop(STEP_TIME, math.nan),
        **{LOSS_SERIES: math.nan, **merged},
    )


def _over_ranks(name: str, values: list[float]) -> float:
    if math.inf in values:
        return math.inf
    return SCALARS[name].ranks(values) if values else math.nan


def merge_moments(one: Floats, other: Floats) -> Floats:
    """Return the moments of both together, [8, rows]; where one has fewer rows, the others' stay."""
    short, long = sorted((one, other), key=lambda moments: moments.shape[1])
    merged: Floats = long.copy()
    for statistic, target in enumerate(merged[:, : short.shape[1]]):
        _MERGE.get(statistic, np.add)(target, short[statistic], out=target)
    return merged


_MERGE: Mapping[int, np.ufunc] = MappingProxyType({_MIN: np.minimum, _MAX: np.maximum})  # all others are added


def series_table(header: Header, keys: Sequence[SeriesKey], row_of: Callable[[SeriesKey, int], int]) -> MergeTable:
    """Return how the series of a rank enter the numbers of the whole step.

    `row_of` gives the heat maps' row for a key and its position in the rank's table, or -1.
    """
    placements = [*header.placements[: len(keys)], *[None] * (len(keys) - len(header.placements))]
    is_first_copy = header.coordinates.dp == 0
    return MergeTable(
        header=header,
        rows=np.array([row_of(key, place) for place, key in enumerate(keys)], np.intp),
        weights=np.array([_weight(key, at) for key, at in zip(keys, placements, strict=True)], np.float64),
        in_global_norm=np.array([at.in_global_norm if at else is_first_copy for at in placements], np.bool_),
        scalars=np.array([scalar_of(key) for key in keys], np.intp),
    )


def heat(moments: Floats, statistic: str, *, is_size: Mask) -> Floats:
    """Return `statistic` (`rms`, `max` …) of each column of the moments [8, n], for a heat map, as [n].

    NaN without any element, +inf where one is not finite. Where `is_size` is false, mean and largest element stand for
    root mean square and largest magnitude.
    """
    count, finite = moments[_COUNT], moments[_COUNT] - moments[_NANS] - moments[_INFS]
    with np.errstate(divide="ignore", invalid="ignore"):
        if statistic == "rms":
            values = np.where(is_size, np.sqrt(moments[_SUM_SQ] / finite), moments[_SUM] / finite)
        elif statistic == "absmax":
            largest = np.where(is_size, np.maximum(-moments[_MIN], moments[_MAX]), moments[_MAX])
            values = np.where(finite > 0, largest, np.nan)
        else:
            values = moments[_ZEROS] / count
    return np.where(finite < count, np.inf, np.where(count > 0, values, np.nan))


def scalar_of(key: SeriesKey) -> int:
    """Return which number of the step a series is, as its place in `SCALARS`; -1: none."""
    name = None
    if key.kind is Kind.LOSS and key.name == LOSS_SERIES:
        name = LOSS_SERIES
    elif key.kind is Kind.COMM and key.slot == "wait_seconds":
        name = WAIT
    elif key.kind is Kind.STEP and key.name == STEP_TIME_SERIES:
        name = STEP_TIME
    elif key.kind is Kind.STEP and bool(key.slot) == (key.name == LEARNING_RATE_SERIES):
        name = key.name
    return _NAMES.index(name) if name in SCALARS else -1


def _weight(key: SeriesKey, placement: Placement | None) -> float:
    if key.kind is not Kind.GRAD_REDUCED:
        return 0.0
    return placement.scale**-2 if placement else 1.0


def _rank_step(rows: MergedRows, values: Floats, time_s: float) -> RankStep:
    found = {name: _scalar(values[:, own].T.tolist(), SCALARS[name]) for name, own in rows.scalars}
    whole = _sum_sq(values, *rows.gradients)
    found[GRAD_NORM] = math.sqrt(whole)
    share = whole if rows.all_count else _sum_sq(values, *rows.counted)
    return RankStep(time_s=time_s, share=share, scalars=found)


def _sum_sq(moments: Floats, rows: Indices, weights: Floats) -> float:
    """Return the weighted sum of squares; NaN of nothing, infinity with a non-finite element."""
    if not rows.size:
        return math.nan
    if np.count_nonzero(moments[_NANS:, rows]):
        return math.inf
    return float(moments[_SUM_SQ, rows] @ weights)


def _scalar(rows: RowMoments, merge: _MergeRule) -> float:
    """Return the rank's number; NaN of nothing, infinity with a non-finite element."""
    if any(row[_NANS] or row[_INFS] for row in rows):
        return math.inf
    return merge.rows(rows) if any(row[_COUNT] for row in rows) else math.nan


def _present(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]
