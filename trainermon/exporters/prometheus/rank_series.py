"""The series of one rank: chosen once per series table, within the rank's budget, then only given new numbers.

Per block, rows are copied by series id and non-finite elements are counted; merging modules and taking roots is left to
the scrape. What is not known or not finite becomes NaN here and no sample in the exposition: several stores drop NaN
silently, so non-finite elements have a counter of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainermon.core.metric import MetricType
from trainermon.core.metrics import METRICS
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
from trainermon.exporters.prometheus.rank_values import RankValues
from trainermon.exporters.prometheus.scalar_series import LOSS, ScalarSeries

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

_COUNT, _SUM = STATISTICS.index("count"), STATISTICS.index("sum")


class RankTable(NamedTuple):
    """A rank's series table.

    Attributes:
        header: The rank's journal header.
        keys: The series, by id.
        placements: How the tensor of each is placed; parallel to `keys`, or shorter.
    """

    header: Header
    keys: Sequence[SeriesKey]
    placements: Sequence[Placement | None]


class RankHistograms:
    """Counts, in histograms for Prometheus, how long a rank's steps took and how long it waited in collectives.

    Attributes:
        step: The rank's own histogram of steps, or the one that all ranks share; None before a table is known.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.step: BucketCounts | None = None
        self._labels = labels
        self._rank_label = label_text({"rank": labels["rank"]})
        self._node: NodeHistograms | None = None

    def register(self, node: NodeHistograms) -> int:
        """Create or find the histograms in `node`.

        Return how many series the rank's own one has, 0 if it shares one.
        """
        self._node = node
        self.step = node.step or self.step or BucketCounts(STEP_DURATION, self._labels)
        return len(self.step) if node.step is None else 0

    def observe(self, block: StatBlock, values: RankValues) -> None:
        """Count the step's duration in the rank's histogram, and its waits in collectives in the node's.

        Call it after `values` took the block. Large jobs share one histogram of durations.
        """
        told, rows = values.told(block), np.asarray(block.values)
        labels = f'{self._rank_label},step="{block.step}"'
        if self.step is not None and told.has_step_time:
            self.step.observe(BucketExemplar(labels, values.mean(values.index.step_time), block.time_s))
        for purpose, waits in told.waits:
            histogram = self._node.wait(purpose) if self._node is not None else None
            if histogram is not None:
                counted = waits[rows[_COUNT, waits] > 0]  # each row is one call
                for wait_s in (rows[_SUM, counted] / rows[_COUNT, counted]).tolist():
                    histogram.observe(BucketExemplar(labels, wait_s, block.time_s))


class RankSeries:
    """Keeps the Prometheus metrics of one rank.

    Attributes:
        told: The metrics in `TOLD`, set from outside.
        accelerator: By metric, what the driver says of the rank's accelerator; empty while that is not known.
        accelerator_labels: What it is: values of the labels of `trainermon_accelerator_info`.
        rolled_up: Number of the rank's series that are merged into a parent module.
        left_out: Number of series for which the budget has no room.
    """

    def __init__(self, run_id: str, rank: int) -> None:
        self.told = {n: 0.0 if METRICS[n].type is MetricType.COUNTER else math.nan for n in TOLD}
        self.accelerator: Mapping[str, float] = {}
        self.accelerator_labels: Mapping[str, str] = {}
        self.rolled_up = 0
        self.left_out = 0
        self._labels = {"run": run_id, "rank": str(rank)}
        self._version: tuple[object, ...] = ()
        self._values = RankValues()
        self._histograms = RankHistograms(self._labels)
        self._shows_histogram = False
        self._single: list[_SingleSeries] = []
        self._modules: ModuleSeries | None = None
        self._prefixes: list[str] = []

    @property
    def registered(self) -> bool:
        """Whether a series table of this rank is known."""
        return bool(self._version)

    def register(self, table: RankTable, *, budget: int, node: NodeHistograms) -> None:
        """Choose which series of a rank's table are shown; does nothing if it was registered with this budget before.

        Args:
            table: That of the rank's newest attempt; within an attempt it only grows.
            budget: The largest number of series of this rank.
            node: Where the steps and waiting times of all ranks are counted.
        """
        header, keys, placements = table
        accelerator = (*self.accelerator, *self.accelerator_labels.items())
        version = (header.attempt, header.coordinates.world_size, len(keys), budget, accelerator)
        if version == self._version:
            return
        self._values.register(keys, placements, is_same_attempt=version[:1] == self._version[:1])
        self._version = version
        candidates = list(self._candidates(header))
        self._single = candidates[:budget]
        self.left_out = len(candidates) - len(self._single)
        room = budget - len(self._single)
        own_histogram = self._histograms.register(node)
        self._shows_histogram = 0 < own_histogram <= room
        if self._shows_histogram:
            room -= own_histogram
        else:
            self.left_out += own_histogram
        self._modules = ModuleSeries.choose(keys, placements, room=room)
        self._prefixes = [sample_prefix(METRICS[m.metric], {**self._labels, **m.labels}) for m in self._modules.shown]
        self.rolled_up = self._modules.rolled_up
        self.left_out += self._modules.left_out

    def update(self, block: StatBlock) -> None:
        """Set the metrics to the rows of a block (one step); metrics of series that are not in it stay as they were."""
        self._values.update(block)
        self._histograms.observe(block, self._values)

    def samples(self) -> Iterator[tuple[str, MetricSamples | BucketCounts]]:
        """Yield (metric name, samples or bucket counts): NaN for what is unknown, infinity for what is not finite."""
        for single in self._single:
            yield single.metric, MetricSamples((single.prefix,), (single.value(),))
        if self._histograms.step is not None and self._shows_histogram:
            yield STEP_DURATION.name, self._histograms.step
        if self._modules is not None:
            for name, groups, values in self._modules.values(*self._values.rows):
                yield name, MetricSamples(self._prefixes[groups], values)

    def _candidates(self, header: Header) -> Iterator[_SingleSeries]:
        """Return the series that are not about a module, the most wanted first."""
        known = self._values
        index = known.index
        yield self._one("trainermon_step", lambda: known.step)
        yield self._one("trainermon_last_step_timestamp_seconds", lambda: known.time_s)
        for kind in index.kinds:
            if kind is Kind.CHECKSUM:
                continue  # has no elements of its own
            nonfinite = partial(known.nonfinite.__getitem__, kind)
            yield self._one("trainermon_nonfinite_elements_total", nonfinite, kind=kind)
        yield from map(self._scalar, index.losses)
        if len(index.gradients):
            yield self._one("trainermon_gradient_norm", partial(known.norm, index.gradients))
        if len(index.counted_gradients):
            yield self._one("trainermon_gradient_norm_part", partial(known.norm, index.counted_gradients))
        yield from map(self._scalar, index.step_values)
        places = {axis: str(getattr(header.coordinates, axis)) for axis in METRICS["trainermon_rank_info"].labels[2:]}
        yield self._one("trainermon_rank_info", lambda: 1.0, **places)
        for name in TOLD:
            yield self._one(name, partial(self.told.__getitem__, name))
        if self.accelerator:
            yield self._one("trainermon_accelerator_info", self._has_accelerator, **self.accelerator_labels)
        for name in self.accelerator:
            yield self._one(name, partial(self._of_accelerator, name))
        yield from map(self._scalar, index.collectives)

    def _has_accelerator(self) -> float:
        return 1.0 if self.accelerator else math.nan

    def _of_accelerator(self, name: str) -> float:
        return self.accelerator.get(name, math.nan)

    def _scalar(self, scalar: ScalarSeries) -> _SingleSeries:
        known = self._values
        total = partial(known.totals.__getitem__, scalar.identity)
        mean = partial(known.loss if scalar.metric == LOSS else known.mean, scalar.ids)
        return self._one(scalar.metric, total if scalar.adds_up else mean, **scalar.labels)

    def _one(self, metric: str, value: Callable[[], float], **labels: str) -> _SingleSeries:
        return _SingleSeries(metric, sample_prefix(METRICS[metric], {**self._labels, **labels}), value)


class _SingleSeries(NamedTuple):
    """A series of its own, and how to read its value."""

    metric: str
    prefix: str
    value: Callable[[], float]
