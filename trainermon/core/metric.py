"""What is said of a metric family: name, type, unit, labels, help, cost. Which there are says `core/metrics.py`."""

from __future__ import annotations

import dataclasses

from trainermon.core.values import Kind, TextEnum


class MetricType(TextEnum):
    """Type of a metric, in the words of OpenMetrics."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    INFO = "info"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric family.

    Attributes:
        name: The name to query, with `_total` and `_info`; a histogram without `_bucket`, `_sum`, `_count`.
        type: What it is.
        unit: Base unit, the last word of the family's name; empty for a bare number.
        labels: Label names in the order of the exposition.
        help: What the value is: of what, taken when, and what becomes of non-finite elements.
        cost: How many series there are.
        kind: The kind that it shows per module, if that is what it does.
        buckets: Upper bounds of a histogram's buckets, ascending, without +Inf.
    """

    name: str
    type: MetricType
    help: str
    unit: str = ""
    labels: tuple[str, ...] = ("run",)
    cost: str = "1 per node"
    kind: Kind | None = None
    buckets: tuple[float, ...] = ()

    @property
    def family(self) -> str:
        """The name of the OpenMetrics family: without the suffix that its type adds."""
        suffix = {MetricType.COUNTER: "_total", MetricType.INFO: "_info"}.get(self.type, "")
        return self.name.removesuffix(suffix)
