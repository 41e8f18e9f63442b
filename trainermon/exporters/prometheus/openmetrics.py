"""Text of an exposition in both formats that Prometheus reads, and the choice between the two.

Source: Prometheus text format 0.0.4 (prometheus/docs, instrumenting/exposition_formats) and OpenMetrics 1.0.0
(prometheus/docs, specs/om/open_metrics_spec). Label text is made once, when a series is registered; rendering only
joins it with numbers: a quarter to a seventh of the cost of prometheus_client (benchmarks/bench_metrics.py).

What this module does not decide: which series there are, and their values.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from trainermon.core.metric import Metric, MetricType
from trainermon.core.metrics import METRICS

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@dataclasses.dataclass(frozen=True, slots=True)
class MetricSamples:
    """Samples of one metric: the text in front of each value, made by `sample_prefix`, and the values."""

    prefixes: Sequence[str]
    values: Sequence[float]

    def __len__(self) -> int:
        """Return the number of series."""
        return len(self.prefixes)


class BucketExemplar(NamedTuple):
    """One observation that stands for its bucket: label text, value, Unix time in seconds."""

    labels: str
    value: float
    time_s: float


class BucketCounts:
    """A Prometheus histogram of one series: cumulative buckets, each with its newest observation (exemplar).

    Args:
        metric: The metric, with the limits of its buckets.
        labels: Its labels.
    """

    def __init__(self, metric: Metric, labels: Mapping[str, str]) -> None:
        self._bounds = metric.buckets
        self._counts = [0] * (len(metric.buckets) + 1)
        self._exemplars: list[BucketExemplar | None] = [None] * len(self._counts)
        self._sum = 0.0
        texts = [format_number(bound) for bound in (*metric.buckets, math.inf)]
        self._buckets = [sample_prefix(metric, {**labels, "le": text}, suffix="_bucket") for text in texts]
        self._count_prefix = sample_prefix(metric, labels, suffix="_count")
        self._sum_prefix = sample_prefix(metric, labels, suffix="_sum")

    def __len__(self) -> int:
        """Return the number of series: buckets, count and sum."""
        return len(self._counts) + 2

    def observe(self, exemplar: BucketExemplar) -> None:
        """Count the value of `exemplar` in its bucket; one that is negative or not finite is ignored.

        A negative one (a clock was set back) or NaN would spoil the sum for ever.
        """
        if not 0 <= exemplar.value < math.inf:
            return
        bucket = bisect.bisect_left(self._bounds, exemplar.value)
        self._counts[bucket] += 1
        self._sum += exemplar.value
        self._exemplars[bucket] = exemplar

    def lines(self, *, openmetrics: bool) -> Iterable[str]:
        """Return the lines of buckets, sum and count in Prometheus' text format; exemplars only with `openmetrics`."""
        cumulative = list(itertools.accumulate(self._counts))
        for prefix, count, exemplar in zip(self._buckets, cumulative, self._exemplars, strict=True):
            yield f"{prefix}{count}{_exemplar_text(exemplar) if openmetrics else ''}"
        yield f"{self._count_prefix}{cumulative[-1]}"
        yield f"{self._sum_prefix}{format_number(self._sum)}"


def sample_prefix(metric: Metric, labels: Mapping[str, str], *, suffix: str = "") -> str:
    """Return the text in front of a value in `/metrics`: name, labels in the order given, one space.

    `suffix` is added to the name, as `_total`.

    Raises:
        ValueError: The metric or one of the labels is not in the catalogue.
    """
    if METRICS.get(metric.name) is not metric:
        raise ValueError(f"metric {metric.name!r} is not in trainermon/core/metrics.py; add it there")
    unknown = [name for name in labels if name not in metric.labels and name != "le"]
    if unknown:
        raise ValueError(f"{metric.name} has labels {metric.labels} in trainermon/core/metrics.py, found {unknown}")
    return f"{metric.name}{suffix}{{{label_text(labels)}}} "


def label_text(labels: Mapping[str, str]) -> str:
    """Return labels as they stand in `/metrics`: `name="value",…`, with the values escaped."""
    return ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())


def format_number(value: float) -> str:
    """Return a number for `/metrics`: the shortest text that reads back as the same float64."""
    if math.isfinite(value):
        return repr(float(value))  # float(): an integer too, and numpy 2 prints its scalars as 'np.float64(1.5)'
    return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")


def render_families(
    families: Iterable[tuple[Metric, Sequence[MetricSamples | BucketCounts]]], *, openmetrics: bool
) -> bytes:
    """Return the text of `/metrics`, in UTF-8, for metrics with their samples; metrics without a sample are left out.

    Each metric may come at most once. `openmetrics` chooses that format over Prometheus' own.
    """
    parts: list[str] = []
    for metric, groups in families:
        if any(map(len, groups)):
            parts.append(_header(metric, openmetrics=openmetrics))
            for group in groups:
                parts.extend(_lines(group, openmetrics=openmetrics))
    if openmetrics:
        parts.append("# EOF")
    # A lone surrogate, which may stand in a path, has no UTF-8 form: one '?' instead of a lost scrape.
    return "\n".join([*parts, ""]).encode("utf-8", "replace")


def prefers_openmetrics(accept: str | None) -> bool:
    """Return whether a client that sent this `Accept` header is to get OpenMetrics 1.0.0 instead of text 0.0.4.

    It has to ask for OpenMetrics by name, in version 1.0.0 or any, and at least as eagerly as for text: a browser's
    `*/*` gets text. A client that accepts neither gets text too, which is more use than an error.
    """
    quality = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    versions = {"application/openmetrics-text": "1.0.0", "text/plain": "0.0.4"}
    for media_range in (accept or "").lower().split(","):
        name, *rest = (part.strip() for part in media_range.split(";"))
        parameters = dict(part.partition("=")[::2] for part in rest)
        if name in quality and parameters.get("version", versions[name]).strip('"') == versions[name]:
            quality[name] = max(quality[name], _quality(parameters.get("q", "1")))
    wanted = quality["application/openmetrics-text"]
    return wanted > 0 and wanted >= quality["text/plain"]


def _lines(group: MetricSamples | BucketCounts, *, openmetrics: bool) -> Iterable[str]:
    if isinstance(group, BucketCounts):
        return group.lines(openmetrics=openmetrics)
    to_text = repr if all(map(math.isfinite, group.values)) else format_number  # half the time for what is usual
    return map(operator.add, group.prefixes, map(to_text, map(float, group.values)))


def _header(metric: Metric, *, openmetrics: bool) -> str:
    text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
    if not openmetrics:
        kind = MetricType.GAUGE if metric.type is MetricType.INFO else metric.type
        return f"# HELP {metric.name} {text}\n# TYPE {metric.name} {kind}"
    text = text.replace('"', r"\"")
    unit = f"\n# UNIT {metric.family} {metric.unit}" if metric.unit else ""
    return f"# HELP {metric.family} {text}\n# TYPE {metric.family} {metric.type}{unit}"


def _exemplar_text(exemplar: BucketExemplar | None) -> str:
    if exemplar is None:
        return ""
    return f" # {{{exemplar.labels}}} {format_number(exemplar.value)} {exemplar.time_s:.3f}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _quality(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0.0 <= value <= 1.0 else 0.0
