"""Series that a node has whatever its ranks show: of the run, the agent itself, alerts, and of all ranks together."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trainermon.core.metric import MetricType
from trainermon.core.metrics import METRICS
from trainermon.core.values import Severity
from trainermon.exporters.prometheus.alert_series import AlertSeries
from trainermon.exporters.prometheus.openmetrics import BucketCounts, MetricSamples, sample_prefix
from trainermon.exporters.prometheus.scalar_series import MOST

if TYPE_CHECKING:
    from trainermon.core.journal import Header

MAX_RANK_HISTOGRAMS = 64
"""Largest world size in which each rank has a histogram of step durations of its own."""

INFO = METRICS["trainermon_run_info"]
STEP_DURATION = METRICS["trainermon_step_duration_seconds"]
WAIT_DURATION = METRICS["trainermon_collective_wait_duration_seconds"]

_ALONE = [m for m in METRICS.values() if m.labels == ("run",)]
# One series per value of a second label, such as the exporter's name; each is there once it was set.
_BY_LABEL = frozenset(
    m.name for m in METRICS.values() if len(m.labels) == 2 and m.labels[1] != "rank" and m is not WAIT_DURATION
)


class NodeHistograms:
    """The Prometheus histograms that count all ranks of the node together.

    Attributes:
        step: Durations of steps, in jobs with too many ranks for one each; else None.
    """

    def __init__(self, run_id: str) -> None:
        self.step: BucketCounts | None = None
        self._run_id = run_id
        self._waits: dict[str, BucketCounts] = {}

    def __len__(self) -> int:
        """Return the number of series."""
        return sum(len(histogram) for _, histogram in self.all())

    def share_steps(self) -> None:
        """Use one histogram of step durations for all ranks from now on."""
        if self.step is None:
            self.step = BucketCounts(STEP_DURATION, {"run": self._run_id})

    def wait(self, purpose: str) -> BucketCounts | None:
        """Return the histogram of waiting times in process groups of this purpose; None if there are too many."""
        if purpose not in self._waits and len(self._waits) < MOST:
            self._waits[purpose] = BucketCounts(WAIT_DURATION, {"run": self._run_id, "purpose": purpose})
        return self._waits.get(purpose)

    def all(self) -> Iterator[tuple[str, BucketCounts]]:
        """Return every histogram by metric name."""
        if self.step is not None:
            yield STEP_DURATION.name, self.step
        for histogram in self._waits.values():
            yield WAIT_DURATION.name, histogram

    def reset(self) -> None:
        """Remove the histograms."""
        self.step = None
        self._waits.clear()


class NodeSeries:
    """Keeps the metrics of a run and its agent that belong to no single rank, with those of alerts and histograms.

    Args:
        run_id: Value of the label `run`.
        rules: Severity of every known rule by name; they stand at 0 from the start.

    Attributes:
        values: By metric, the series that have no label but `run`; NaN where a gauge is not known.
        alerts: Metrics of alerts.
        histograms: Over all ranks.
    """

    def __init__(self, run_id: str, rules: Mapping[str, Severity]) -> None:
        self.values = {
            m.name: 0.0 if m.type is MetricType.COUNTER else math.nan for m in _ALONE if m.type is not MetricType.INFO
        }
        self.alerts = AlertSeries(run_id, rules)
        self.histograms = NodeHistograms(run_id)
        self._run_id = run_id
        self._prefixes = {m.name: sample_prefix(m, {"run": run_id}) for m in _ALONE}
        self._labelled: dict[str, dict[str, float]] = {name: {} for name in sorted(_BY_LABEL)}
        self._info = ""
        self._attempt = -1

    def __len__(self) -> int:
        """Return the most series that there are now; a gauge that is not known counts too."""
        labelled = sum(map(len, self._labelled.values()))
        return len(self.values) + labelled + len(self.alerts) + len(self.histograms) + 1  # the last: run_info

    def group(self, name: str, label: Mapping[str, str]) -> tuple[dict[str, float], str]:
        """Return the mapping that holds the metric `name`'s value with this label, and its key in there.

        Raises:
            ValueError: It is no metric of the agent that is set from outside, or has other labels.
        """
        if not label and name in self.values:
            return self.values, name
        if name in self._labelled and tuple(label) == METRICS[name].labels[1:]:
            return self._labelled[name], next(iter(label.values()))
        known = {**dict.fromkeys(self.values, ()), **{metric: METRICS[metric].labels[1:] for metric in self._labelled}}
        if name in known:
            raise ValueError(f"{name} is set with the labels {known[name]}, found {tuple(label)}")
        raise ValueError(f"{name!r} is no metric of the agent that is set from outside; there are {sorted(known)}")

    def see(self, header: Header) -> None:
        """Record what a rank's header says about the job."""
        coordinates = header.coordinates
        self.values["trainermon_world_size"] = coordinates.world_size
        if coordinates.world_size > MAX_RANK_HISTOGRAMS:
            self.histograms.share_steps()
        if header.attempt > self._attempt:
            self._attempt = header.attempt
            sizes = {name: str(getattr(coordinates, name)) for name in INFO.labels if name.endswith("_size")}
            labels = {"run": self._run_id, "attempt": str(header.attempt), **sizes, "version": header.version}
            self._info = sample_prefix(INFO, labels)

    def refresh(self) -> None:
        """Update the metrics of the agent's own process, as its memory."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        resident_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        self.values |= {
            "trainermon_agent_cpu_seconds_total": usage.ru_utime + usage.ru_stime,
            "trainermon_agent_resident_memory_bytes": resident_pages * os.sysconf("SC_PAGE_SIZE"),
        }

    def samples(self) -> Iterator[tuple[str, MetricSamples | BucketCounts]]:
        """Yield (metric name, samples or bucket counts): NaN for what is unknown, infinity for what is not finite."""
        for name, value in self.values.items():
            yield name, MetricSamples((self._prefixes[name],), (value,))
        if self._info:
            yield INFO.name, MetricSamples((self._info,), (1.0,))
        for name, values in self._labelled.items():
            label = METRICS[name].labels[1]
            for text, value in values.items():
                yield name, MetricSamples((sample_prefix(METRICS[name], {"run": self._run_id, label: text}),), (value,))
        yield from self.alerts.samples()
        yield from self.histograms.all()

    def end_run(self) -> None:
        """Remove the metrics that describe ranks; the agent's own stay."""
        self.histograms.reset()
