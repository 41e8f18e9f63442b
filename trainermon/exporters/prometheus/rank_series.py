"""The series of one rank: chosen once per series table, within the rank's budget, then only given new numbers.

Per block, rows are copied by series id and non-finite elements are counted; merging modules and taking roots is left to
the scrape. What is not known or not finite becomes NaN here and no sample in the exposition: several stores drop NaN
silently, so non-finite elements have a counter of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainermon.core.catalogue import STEP_TIME_SERIES
from trainermon.core.metrics import METRICS, MetricType
from trainermon.core.values import STATISTICS, Kind, Placement, SeriesKey, StatBlock
from trainermon.exporters.prometheus.module_series import ModuleSeries
from trainermon.exporters.prometheus.node_series import STEP_DURATION, NodeHistograms
from trainermon.exporters.prometheus.openmetrics import (
    BucketCounts,
    BucketExemplar,
    MetricSamples,
    label_text,
    sample_prefix,
)
from trainermon.exporters.prometheus.scalar_series import LOSS, WAITED, ScalarSeries, collectives, losses, step_values

if TYPE_CHECKING:
    from trainermon.core.journal import Header

# What others tell of a rank, the most wanted first: gauges, absent until told, and counters, which begin at 0.
TOLD = (
    "trainermon_last_heartbeat_timestamp_seconds",
    "trainermon_rank_hung",
    "trainermon_rank_straggling",
    "trainermon_skipped_records_total",
    "trainermon_lost_files_total",
    "trainermon_checksum_mismatches_total",
    "trainermon_rank_slowness_ratio",
)

Array = npt.NDArray[Any]

_COUNT, _MAX, _SUM, _SUM_SQ, _NANS, _INFS = (
    STATISTICS.index(name) for name in ("count", "max", "sum", "sum_sq", "nans", "infs")
)


class RankTable(NamedTuple):
    """A rank's series table: its header, keys, and placements parallel to the keys or shorter."""

    header: Header
    keys: Sequence[SeriesKey]
    placements: Sequence[Placement | None]


class RankSeries:
    """Everything that is shown of one rank.

    Attributes:
        told: The metrics in `TOLD`, set from outside.
        rolled_up: Number of the rank's series that are merged into a parent module.
        left_out: Number of series for which the budget has no room.
    """

    def __init__(self, run_id: str, rank: int) -> None:
        self.told = {n: 0.0 if METRICS[n].type is MetricType.COUNTER else math.nan for n in TOLD}
        self.rolled_up = 0
        self.left_out = 0
        self._labels = {"run": run_id, "rank": str(rank)}
        self._version: tuple[int, ...] = ()
        self._nonfinite: dict[Kind, float] = {}
        self._step = self._time_s = math.nan
        self._rows: Array = np.zeros((4, 0))  # finite elements, their sum, sum of squares, and the largest
        self._bad: Array = np.zeros(0)  # elements that are not finite
        self._totals: dict[tuple[str, str], float] = {}
        self._index = _SeriesIndex.of((), ())
        self._node: NodeHistograms | None = None
        self._histogram: BucketCounts | None = None
        self._shows_histogram = False
        self._single: list[_SingleSeries] = []
        self._modules: ModuleSeries | None = None
        self._prefixes: list[str] = []

    @property
    def registered(self) -> bool:
        """Whether a series table of this rank is known."""
        return bool(self._version)

    def register(self, table: RankTable, *, budget: int, node: NodeHistograms) -> None:
        """Choose the series of a table; does nothing if it was registered with this budget before.

        Args:
            table: Of the rank's newest attempt; within an attempt it only grows.
            budget: Most series of this rank.
            node: Where the steps and waiting times of all ranks are counted.
        """
        header, keys, placements = table
        version = (header.attempt, header.coordinates.world_size, len(keys), budget)
        if version == self._version:
            return
        rows, bad = np.zeros((4, len(keys))), np.zeros(len(keys))
        if version[:1] == self._version[:1]:
            rows[:, : self._rows.shape[1]] = self._rows
            bad[: len(self._bad)] = self._bad
        self._version, self._rows, self._bad, self._index = version, rows, bad, _SeriesIndex.of(keys, placements)
        for kind in self._index.kinds:
            self._nonfinite.setdefault(kind, 0.0)
        for scalar in self._index.scalars:
            self._totals.setdefault(scalar.identity, 0.0)
        candidates = list(self._candidates(header))
        self._single = candidates[:budget]
        self.left_out = len(candidates) - len(self._single)
        room = budget - len(self._single)
        self._node = node
        self._histogram = node.step or self._histogram or BucketCounts(STEP_DURATION, self._labels)
        self._shows_histogram = node.step is None and room >= len(self._histogram)
        if self._shows_histogram:
            room -= len(self._histogram)
        elif node.step is None:
            self.left_out += len(self._histogram)
        self._modules = ModuleSeries.choose(keys, placements, room=room)
        self._prefixes = [sample_prefix(METRICS[m.metric], {**self._labels, **m.labels}) for m in self._modules.shown]
        self.rolled_up = self._modules.rolled_up
        self.left_out += self._modules.left_out

    def update(self, block: StatBlock) -> None:
        """Take the rows of a block; rows of series that are not in it stay as they were."""
        series, values = np.asarray(block.series), np.asarray(block.values)
        bad = values[_NANS] + values[_INFS]
        self._forget_and_add(series, values[_SUM])
        self._rows[:, series] = values[_COUNT] - bad, values[_SUM], values[_SUM_SQ], values[_MAX]
        self._bad[series] = bad
        if bad.any():
            kinds = self._index.kinds
            totals = np.bincount(self._index.kind_of[series], weights=bad, minlength=len(kinds))
            for kind, total in zip(kinds, totals.tolist(), strict=True):
                self._nonfinite[kind] += total
        self._step, self._time_s = block.step, block.time_s
        self._observe(block, series, values)

    def samples(self) -> Iterator[tuple[str, MetricSamples | BucketCounts]]:
        """Return what is known now, by metric name; what is not known or not finite as NaN or infinity."""
        for single in self._single:
            yield single.metric, MetricSamples((single.prefix,), (single.value(),))
        if self._histogram is not None and self._shows_histogram:
            yield STEP_DURATION.name, self._histogram
        if self._modules is not None:
            for name, groups, values in self._modules.values(*self._rows):
                yield name, MetricSamples(self._prefixes[groups], values)

    def _forget_and_add(self, series: Array, sums: Array) -> None:
        """Forget all parts of the scalars that the step tells anew: it may have fewer micro steps; add to totals."""
        numbers = self._index.scalar_of[series]
        told = np.flatnonzero(numbers >= 0)
        added = np.bincount(numbers[told], weights=sums[told], minlength=len(self._index.scalars))
        for number in np.unique(numbers[told]).tolist():
            scalar = self._index.scalars[number]
            if scalar.adds_up:
                self._totals[scalar.identity] += float(added[number])
            elif len(scalar.ids) > 1:
                self._rows[:, scalar.ids] = 0.0

    def _observe(self, block: StatBlock, series: Array, values: Array) -> None:
        """Count the duration of the step and the waiting times of its collectives."""
        labels = label_text({"rank": self._labels["rank"], "step": str(block.step)})
        step_time = self._index.step_time
        if self._histogram is not None and np.isin(step_time, series).any():
            self._histogram.observe(BucketExemplar(labels, self._mean(step_time), block.time_s))
        for purpose, is_wait in self._index.waits.items():
            histogram = self._node.wait(purpose) if self._node is not None else None
            if histogram is not None:
                rows = is_wait[series] & (values[_COUNT] > 0)  # each row is one call
                for wait_s in (values[_SUM, rows] / values[_COUNT, rows]).tolist():
                    histogram.observe(BucketExemplar(labels, wait_s, block.time_s))

    def _candidates(self, header: Header) -> Iterator[_SingleSeries]:
        """Return the series that are not about a module, the most wanted first."""
        yield self._one("trainermon_step", lambda: self._step)
        yield self._one("trainermon_last_step_timestamp_seconds", lambda: self._time_s)
        for kind in self._index.kinds:
            if kind is Kind.CHECKSUM:
                continue  # has no elements of its own
            yield self._one(
                "trainermon_nonfinite_elements_total", partial(self._nonfinite.__getitem__, kind), kind=kind
            )
        yield from map(self._scalar, self._index.losses)
        if len(self._index.gradients):
            yield self._one("trainermon_gradient_norm", partial(self._norm, self._index.gradients))
        if len(self._index.counted_gradients):
            yield self._one("trainermon_gradient_norm_part", partial(self._norm, self._index.counted_gradients))
        yield from map(self._scalar, self._index.step_values)
        places = {axis: str(getattr(header.coordinates, axis)) for axis in METRICS["trainermon_rank_info"].labels[2:]}
        yield self._one("trainermon_rank_info", lambda: 1.0, **places)
        for name in TOLD:
            yield self._one(name, partial(self.told.__getitem__, name))
        yield from map(self._scalar, self._index.collectives)

    def _scalar(self, scalar: ScalarSeries) -> _SingleSeries:
        total = partial(self._totals.__getitem__, scalar.identity)
        mean = partial(self._loss if scalar.metric == LOSS else self._mean, scalar.ids)
        return self._one(scalar.metric, total if scalar.adds_up else mean, **scalar.labels)

    def _one(self, metric: str, value: Callable[[], float], **labels: str) -> _SingleSeries:
        return _SingleSeries(metric, sample_prefix(METRICS[metric], {**self._labels, **labels}), value)

    def _mean(self, ids: Array) -> float:
        finite = float(self._rows[0, ids].sum())
        return float(self._rows[1, ids].sum()) / finite if finite else math.nan

    def _loss(self, ids: Array) -> float:
        """Return the mean; infinity if any part of it was not finite, which is told as NaN."""
        return math.inf if self._bad[ids].any() else self._mean(ids)

    def _norm(self, ids: Array) -> float:
        is_known = self._rows[0, ids].any() and not self._bad[ids].any()
        return math.sqrt(float(self._rows[2, ids].sum())) if is_known else math.nan


class _SingleSeries(NamedTuple):
    """A series of its own, and how to read its value."""

    metric: str
    prefix: str
    value: Callable[[], float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _SeriesIndex:
    """Where things stand: series ids, and for each id the places of its kind in `kinds` and in `scalars`, or -1.

    `waits` says by purpose of a process group for each id whether it is a waiting time.
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
    def of(cls, keys: Sequence[SeriesKey], placements: Sequence[Placement | None]) -> _SeriesIndex:
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


def _ids(values: Iterable[int]) -> Array:
    return np.fromiter(values, dtype=np.intp)
