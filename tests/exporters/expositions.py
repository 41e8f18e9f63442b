"""What an exposition says, read by the vendor's parsers; and keys of values that stand for themselves."""

from __future__ import annotations

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.exporters.runs import RECORDED
from trainermon.core.metric import MetricType
from trainermon.core.metrics import ACCELERATORS
from trainermon.core.values import Kind, SeriesKey
from trainermon.exporters.prometheus.exposition import Exposition
from trainermon.exporters.prometheus.openmetrics import OPENMETRICS


def read(exposition: Exposition, *, accept: str = "application/openmetrics-text"):
    """Return every sample's value by name and labels, run left out, as the vendor's parser reads it."""
    body, content_type = exposition.render(accept)
    parse = parse_openmetrics if content_type == OPENMETRICS else parse_text
    samples = [sample for family in parse(body.decode()) for sample in family.samples]
    assert {sample.labels["run"] for sample in samples} == {"run"}
    values = {(s.name, *(f"{k}={v}" for k, v in s.labels.items() if k != "run")): s.value for s in samples}
    assert len(values) == len(samples)
    return values


def step(name: str, slot: str = "", micro_step: int | None = None) -> SeriesKey:
    return SeriesKey(Kind.STEP, name, slot, micro_step=micro_step)


def comm(name: str, slot: str, call: int = 0) -> SeriesKey:
    return SeriesKey(Kind.COMM, name, slot, call)


MEASURED = {
    step("global_grad_norm"): ("trainermon_global_gradient_norm", 3.5),
    step("clip_ratio"): ("trainermon_clip_ratio", 0.25),
    step("loss_scale"): ("trainermon_loss_scale", 65536.0),
    step("skipped"): ("trainermon_skipped_steps_total", 1.0),
    step("learning_rate", "0"): ("trainermon_learning_rate", 3e-4),
    step("tokens_per_second"): ("trainermon_tokens_per_second", 1e5),
}
"""Numbers of the step: metric and value by series."""

GROUP = ("count", "sequence", "in_flight", "bytes", "unseen", "unfinished")
ALONE = (
    RECORDED,
    *MEASURED,
    step("tokens"),
    step("rl_ratio"),
    *(comm("dp", slot) for slot in GROUP),
    comm("dp.all_reduce", "wait_seconds"),
    SeriesKey(Kind.FEATURE, "h.0.attn", "attention_max_logit"),
)
"""A series for every metric that is not of a module's tensors."""

OF_ACCELERATOR = [metric.name for metric in ACCELERATORS if metric.type is not MetricType.INFO]
"""What the driver says of a rank's accelerator."""
