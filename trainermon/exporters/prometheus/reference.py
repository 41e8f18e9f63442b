"""The text of docs/reference/metrics.md, from the catalogue; `make sync` writes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from trainermon.core.catalogue import KINDS, STATISTICS
from trainermon.core.metric import Metric
from trainermon.core.metrics import BUILD_INFO, METRICS, PROCESS_METRICS
from trainermon.core.values import STATISTICS as MOMENTS
from trainermon.exporters.prometheus.budget import SeriesBudget

_HEAD = """\
# Metrics, kinds and statistics

<!-- Generated from trainermon/core/metrics.py by `make sync`. Do not edit. -->

Every agent serves these metrics under `/metrics`, in the Prometheus text format 0.0.4 or in OpenMetrics 1.0.0, as the
scraper asks for. Histograms have exemplars with the step in OpenMetrics.

* The step is a value, never a label. `run` and `rank` are labels of what belongs to a rank; where the rank stands in
  the job is given once by `trainermon_rank_info`, for joins:
  `trainermon_loss * on (run, rank) group_left (dp, tp, pp) trainermon_rank_info`.
* A value that is not known or not finite has no sample. Non-finite elements are counted in
  `trainermon_nonfinite_elements_total`; alert on that, never on a comparison with NaN.
* Numbers of the step are those of the newest one, of several micro steps the mean. Of learning rates, recorded values
  and process groups the first 8 are shown.
* Root mean squares, not norms, are given per module: they compare across modules of different size, and
  `sqrt(avg by (run, module) (x^2))` over ranks is right for replicas and for equal shards.
* Values are as they were in the tensor: gradients are scaled as they are when the optimizer step begins.
* A rank that has gone, and every rank after the end of the run, has no series any more.
"""

_BUDGET = """\
## Series budget

A rank has at most {per_rank} series, or {per_job:,} / world size, or {per_node:,} / ranks on the node, whichever is
less, its share of the node's own series included. So a node stays within {per_node:,} and a job within {per_job:,}
series. Only what the nodes have without any rank cannot be cut (about 80 series each), which counts from some 1,200
nodes on.

What does not fit is merged or left out when series are registered, by names and sizes only, never by values:

* parameters, gradients and optimizer state are merged into modules (`h.3.attn.q.weight` → `h.3.attn` → `h.3`), moment
  by moment, so that a merged root mean square is that of all its elements. All modules are shown down to the same
  depth; what is left of the budget shows the largest ones in more detail. A list of layers that is too long becomes
  ranges (`h.0-3`). The modules shown never overlap;
* of activations and features the outermost modules are shown, each for itself;
* optimizer states of different names, and different features, never merge; which experts have the most and the least
  load is only in the store;
* in jobs of more than 64 ranks the ranks of a node share one histogram.

`trainermon_rolled_up_series` and `trainermon_left_out_series` say how much that was. The store keeps full detail.
"""


_PROCESS = """\
## The process itself

The agent and the controller tell of their own process what every server program tells, without the label `run`, so that
ready-made dashboards and rules for processes find them.
"""


def render_reference() -> str:
    """Return the page `docs/reference/metrics.md`, generated from the catalogue of metrics, kinds and statistics."""
    parts = [
        _HEAD,
        "## Metrics\n",
        *_metrics(),
        _PROCESS,
        *_process_metrics(),
        _budget(),
        "## Kinds\n",
        *_rows(("Kind", "What it is"), _kinds()),
    ]
    parts += ["## Statistics\n", "The first eight are stored and merge exactly; the others are derived when read.\n"]
    parts += _rows(("Statistic", "What it is", "Stored"), _statistics())
    return "\n".join(parts)


def _metrics() -> Iterator[str]:
    for metric in METRICS.values():
        yield f"### `{metric.name}`\n\n{metric.help}\n"
        yield from _rows(("Type", "Unit", "Labels", "Series"), [_properties(metric)])
        if metric.buckets:
            yield f"Buckets: {', '.join(f'{bound:g}' for bound in metric.buckets)}, +Inf.\n"


def _process_metrics() -> Iterator[str]:
    rows = [
        (
            f"`{metric.name}`",
            metric.type.value,
            ", ".join(f"`{label}`" for label in metric.labels) or "none",
            metric.help,
        )
        for metric in (BUILD_INFO, *PROCESS_METRICS)
    ]
    return _rows(("Metric", "Type", "Labels", "What it is"), rows)


def _properties(metric: Metric) -> tuple[str, ...]:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return metric.type.value, metric.unit or "none", labels, metric.cost


def _budget() -> str:
    budget = SeriesBudget()
    return _BUDGET.format(per_rank=budget.per_rank, per_node=budget.per_node, per_job=budget.per_job)


def _kinds() -> Iterator[tuple[str, str]]:
    return ((f"`{kind}`", text) for kind, text in KINDS.items())


def _statistics() -> Iterator[tuple[str, str, str]]:
    return ((f"`{name}`", text, "yes" if name in MOMENTS else "no") for name, text in STATISTICS.items())


def _rows(head: Sequence[str], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""
