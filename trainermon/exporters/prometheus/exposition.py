"""What `/metrics` shows: the newest values of the ranks of one node, the alerts, and the agent itself.

The agent calls `update` for every block, and `render` for every scrape, both in its one loop: there is no thread and no
lock here. Series come and go with ranks: one that is removed, and every one after the end of the run, is absent from
the next scrape, so that Prometheus marks its series stale instead of repeating the last value.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from trainermon.core.metric import Metric
from trainermon.core.metrics import METRICS
from trainermon.core.values import Alert, Placement, SeriesKey, Severity, StatBlock
from trainermon.exporters.prometheus.budget import SeriesBudget
from trainermon.exporters.prometheus.node_series import NodeSeries
from trainermon.exporters.prometheus.openmetrics import (
    OPENMETRICS,
    TEXT,
    BucketCounts,
    MetricSamples,
    prefers_openmetrics,
    render_families,
)
from trainermon.exporters.prometheus.rank_series import RankSeries, RankTable
from trainermon.exporters.prometheus.scalar_series import LOSS

if TYPE_CHECKING:
    from trainermon.core.journal import Header


class Exposition:
    """Holds the metrics of one run on one node, and renders the text that Prometheus scrapes from `/metrics`.

    Args:
        run_id: Value of the label `run`.
        rules: Severity of every known rule by name; they stand at 0 from the start.
        budget: Limits on the number of series.
        clock: Monotonic seconds, for the duration of a collection.
    """

    def __init__(
        self,
        run_id: str,
        *,
        rules: Mapping[str, Severity] | None = None,
        budget: SeriesBudget | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._run_id = run_id
        self._budget = budget or SeriesBudget()
        self._clock = clock
        self._node = NodeSeries(run_id, rules or {})
        self._ranks: dict[int, RankSeries] = {}

    def update(
        self,
        header: Header,
        keys: Sequence[SeriesKey],
        block: StatBlock,
        *,
        placements: Sequence[Placement | None] | None = None,
    ) -> None:
        """Update the metrics of a rank by one step.

        Args:
            header: Of the journal that the block comes from.
            keys: The rank's whole series table.
            block: The rows.
            placements: Parallel to `keys`; without it those of the header. They decide what is shown in more detail.

        Cost: some copies of the rows (60 µs for 2 600 series); about 20 ms where the series table has grown.
        """
        coordinates = header.coordinates
        self._node.see(header)
        series = self._rank(coordinates.rank)
        table = RankTable(header, keys, header.placements if placements is None else placements)
        budget = self._budget.of_rank(coordinates, node_series=len(self._node), num_local=len(self._ranks))
        series.register(table, budget=budget, node=self._node.histograms)
        series.update(block)

    def remove_rank(self, rank: int) -> None:
        """Remove the metrics of a rank, until it is updated again."""
        self._ranks.pop(rank, None)

    def end_run(self) -> None:
        """Remove the metrics of all ranks; the agent's own series stay until it exits."""
        self._ranks.clear()
        self._node.end_run()

    def set_alerts(self, alerts: Collection[Alert], *, now_s: float, muted: Collection[str] = ()) -> None:
        """Replace the run's alerts on this node; `now_s` is Unix time, `muted` are ids, see `AlertSeries.set`."""
        self._node.alerts.set(alerts, now_s=now_s, muted=muted)

    def set(self, name: str, value: float, /, *, rank: int | None = None, **label: str) -> None:
        """Set a metric of the agent, or one of a rank that does not come from its blocks; NaN: not known.

        Args:
            name: The metric.
            value: A gauge's value, or a counter's total.
            rank: Whose, for a metric with the label `rank`.
            **label: The metric's other label, if it has one, such as `exporter="csv"`.

        Raises:
            ValueError: There is no such metric in the catalogue, or not one that is set from outside.
        """
        values, key = self._place(name, rank, label)
        values[key] = value

    def add(self, name: str, amount: float = 1.0, /, *, rank: int | None = None, **label: str) -> None:
        """Add to a counter; arguments and errors as for `set`."""
        values, key = self._place(name, rank, label)
        values[key] = values.get(key, 0.0) + amount

    def set_accelerator(self, rank: int, values: Mapping[str, float], **labels: str) -> None:
        """Set what the driver says of the accelerator of `rank`, by metric; NaN: not known. {}: nothing any more.

        `labels` say which one it is (`uuid`, `model`). A rank has these metrics from its next block on.
        """
        series = self._rank(rank)
        series.accelerator = {name: value for name, value in values.items() if math.isfinite(value)}
        series.accelerator_labels = labels

    def render(
        self, accept: str | None = None, others: Iterable[tuple[Metric, Sequence[MetricSamples]]] = ()
    ) -> tuple[bytes, str]:
        """Return the text of `/metrics` and its content type, in the format that the `Accept` header asks for.

        `others` are metrics that do not belong to the run, such as those of the process.
        """
        begin = self._clock()
        openmetrics = prefers_openmetrics(accept)
        values = self._node.values
        values["trainermon_ranks"] = sum(rank.registered for rank in self._ranks.values())
        values["trainermon_rolled_up_series"] = sum(rank.rolled_up for rank in self._ranks.values())
        values["trainermon_left_out_series"] = sum(rank.left_out for rank in self._ranks.values())
        self._node.refresh()
        groups: dict[str, list[MetricSamples | BucketCounts]] = {name: [] for name in METRICS}
        for name, group in self._collect():
            groups[name].append(_without_gaps(name, group))
        families = ((METRICS[name], group) for name, group in groups.items())
        body = render_families(itertools.chain(families, others), openmetrics=openmetrics)
        values["trainermon_exposed_series"] = sum(len(group) for found in groups.values() for group in found)
        values["trainermon_collection_duration_seconds"] = self._clock() - begin
        return body, OPENMETRICS if openmetrics else TEXT

    def _rank(self, rank: int) -> RankSeries:
        if rank not in self._ranks:
            self._ranks[rank] = RankSeries(self._run_id, rank)
        return self._ranks[rank]

    def _place(self, name: str, rank: int | None, label: Mapping[str, str]) -> tuple[dict[str, float], str]:
        if rank is None:
            return self._node.group(name, label)
        values = self._rank(rank).told
        if name not in values or label:
            found = {name, *label}
            raise ValueError(
                f"{name!r} is no metric of a rank that is set from outside; found {sorted(found)}, "
                f"expected one of {sorted(values)}"
            )
        return values, name

    def _collect(self) -> Iterator[tuple[str, MetricSamples | BucketCounts]]:
        yield from self._node.samples()
        for rank in sorted(self._ranks):
            yield from self._ranks[rank].samples()


def _without_gaps(name: str, group: MetricSamples | BucketCounts) -> MetricSamples | BucketCounts:
    """Return the samples whose value is known: no sample is better than a NaN that stands for "no value".

    A loss that is not finite is known: NaN says so, where a gap would look like a rank that tells nothing.
    """
    if isinstance(group, BucketCounts) or all(map(math.isfinite, group.values)):
        return group
    told = {math.inf: math.nan} if name == LOSS else {}
    known = [
        (prefix, told.get(value, value))
        for prefix, value in zip(group.prefixes, group.values, strict=True)
        if math.isfinite(value) or value in told
    ]
    return MetricSamples([prefix for prefix, _ in known], [value for _, value in known])
