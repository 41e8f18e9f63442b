"""What `/metrics` shows: the newest values of the ranks of one node, the alerts, and the agent itself.

The agent calls `update` for every block, and `render` for every scrape, both in its one loop: there is no thread and no
lock here. Series come and go with ranks: one that is removed, and every one after the end of the run, is absent from
the next scrape, so that Prometheus marks its series stale instead of repeating the last value.
"""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainermon.exporters.budget import SeriesBudget
from trainermon.exporters.openmetrics import (
    OPENMETRICS,
    TEXT,
    Histogram,
    Samples,
    prefers_openmetrics,
    render_families,
    sample_prefix,
)
from trainermon.exporters.rank_series import STEP_DURATION, RankSeries, Table
from trainermon.monitor.catalogue import METRICS, MetricType
from trainermon.monitor.values import Alert, AlertState, Placement, SeriesKey, Severity, StatBlock

if TYPE_CHECKING:
    from trainermon.monitor.journal import Header

MAX_RANK_HISTOGRAMS = 64
"""Largest world size in which each rank has a histogram of step durations of its own."""

_NODE_METRICS = [metric for metric in METRICS.values() if metric.labels == ("run",)]


class Exposition:
    """The metrics of one run on one node.

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
        self._ranks: dict[int, RankSeries] = {}
        self._histogram: Histogram | None = None
        self._firing: dict[tuple[str, str], int] = {}
        self._fired: dict[tuple[str, str], int] = {}
        self._firing_ids: frozenset[str] = frozenset()
        for rule, severity in (rules or {}).items():
            self._firing[rule, severity.value] = self._fired[rule, severity.value] = 0
        self._prefixes = {metric.name: sample_prefix(metric, {"run": run_id}) for metric in _NODE_METRICS}
        self._values = {m.name: 0.0 if m.type is MetricType.COUNTER else math.nan for m in _NODE_METRICS}

    def update(
        self,
        header: Header,
        keys: Sequence[SeriesKey],
        block: StatBlock,
        *,
        placements: Sequence[Placement | None] | None = None,
    ) -> None:
        """Take one step of one rank.

        Args:
            header: Of the journal that the block comes from.
            keys: The rank's whole series table.
            block: The rows.
            placements: Parallel to `keys`; without it those of the header. They decide what is shown in more detail.

        Cost: some copies of the rows (60 µs for 2 600 series); about 20 ms where the series table has grown.
        """
        coordinates = header.coordinates
        if coordinates.world_size > MAX_RANK_HISTOGRAMS and self._histogram is None:
            self._histogram = Histogram(STEP_DURATION, {"run": self._run_id})
        series = self._rank(coordinates.rank)
        budget = self._budget.of_rank(coordinates, node_series=self._num_node_series(), num_local=len(self._ranks))
        table = Table(header, keys, header.placements if placements is None else placements)
        series.register(table, budget=budget, shared=self._histogram)
        series.update(block)

    def remove_rank(self, rank: int) -> None:
        """Show nothing of a rank any more, until it is updated again."""
        self._ranks.pop(rank, None)

    def end_run(self) -> None:
        """Show nothing of any rank any more; the agent's own series stay until it exits."""
        self._ranks.clear()
        self._histogram = None

    def set_alerts(self, alerts: Sequence[Alert]) -> None:
        """Show the alerts of the node that are firing now; those not among the last ones are counted as new."""
        self._firing = dict.fromkeys(self._firing, 0)
        firing = [alert for alert in alerts if alert.state is AlertState.FIRING]
        for alert in firing:
            key = (alert.rule, alert.severity.value)
            self._firing[key] = self._firing.get(key, 0) + 1
            self._fired[key] = self._fired.get(key, 0) + (alert.id not in self._firing_ids)
        self._firing_ids = frozenset(alert.id for alert in firing)

    def set(self, name: str, value: float, *, rank: int | None = None) -> None:
        """Set a metric of the agent itself, or a counter of a rank to its total.

        Raises:
            ValueError: There is no such metric in the catalogue, or not one that is set from outside.
        """
        values = self._values if rank is None else self._rank(rank).counters
        if name not in values:
            scope = "the agent" if rank is None else "a rank"
            raise ValueError(f"{name!r} is no metric of {scope} that is set from outside; there are {sorted(values)}")
        values[name] = value

    def add(self, name: str, amount: float = 1.0, *, rank: int | None = None) -> None:
        """Add to a counter; errors as for `set`."""
        values = self._values if rank is None else self._rank(rank).counters
        self.set(name, values.get(name, 0.0) + amount, rank=rank)

    def render(self, accept: str | None = None) -> tuple[bytes, str]:
        """Return the exposition and its content type, in the format that the `Accept` header asks for."""
        begin = self._clock()
        openmetrics = prefers_openmetrics(accept)
        self._refresh()
        groups: dict[str, list[Samples | Histogram]] = {name: [] for name in METRICS}
        for name, group in self._collect():
            groups[name].append(_without_gaps(group))
        body = render_families(((METRICS[name], group) for name, group in groups.items()), openmetrics=openmetrics)
        self._values["trainermon_exposed_series"] = sum(len(group) for found in groups.values() for group in found)
        self._values["trainermon_collection_duration_seconds"] = self._clock() - begin
        return body, OPENMETRICS if openmetrics else TEXT

    def _rank(self, rank: int) -> RankSeries:
        if rank not in self._ranks:
            self._ranks[rank] = RankSeries(self._run_id, rank)
        return self._ranks[rank]

    def _num_node_series(self) -> int:
        return len(self._values) + 2 * len(self._firing) + (len(self._histogram) if self._histogram else 0)

    def _refresh(self) -> None:
        """Bring the agent's own values up to date."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        resident_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        self._values |= {
            "trainermon_ranks": sum(rank.registered for rank in self._ranks.values()),
            "trainermon_rolled_up_series": sum(rank.rolled_up for rank in self._ranks.values()),
            "trainermon_left_out_series": sum(rank.left_out for rank in self._ranks.values()),
            "trainermon_agent_cpu_seconds_total": usage.ru_utime + usage.ru_stime,
            "trainermon_agent_resident_memory_bytes": resident_pages * os.sysconf("SC_PAGE_SIZE"),
        }

    def _collect(self) -> Iterator[tuple[str, Samples | Histogram]]:
        for name, value in self._values.items():
            yield name, Samples((self._prefixes[name],), (value,))
        for name, counts in (("trainermon_alerts_firing", self._firing), ("trainermon_alerts_total", self._fired)):
            for (rule, severity), count in counts.items():
                labels = {"run": self._run_id, "rule": rule, "severity": severity}
                yield name, Samples((sample_prefix(METRICS[name], labels),), (count,))
        for rank in sorted(self._ranks):
            yield from self._ranks[rank].samples()
        if self._histogram is not None:
            yield STEP_DURATION.name, self._histogram


def _without_gaps(group: Samples | Histogram) -> Samples | Histogram:
    """Return the samples whose value is known: no sample is better than a NaN that stands for "no value"."""
    if isinstance(group, Histogram) or all(map(math.isfinite, group.values)):
        return group
    known = [
        (prefix, value) for prefix, value in zip(group.prefixes, group.values, strict=True) if math.isfinite(value)
    ]
    return Samples([prefix for prefix, _ in known], [value for _, value in known])
