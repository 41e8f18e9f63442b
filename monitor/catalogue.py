"""Every name that trainermon shows to the outside: metrics, kinds, statistics, and the well-known series.

One list, so that the exporter, the rules, the dashboards and the reference in docs/ cannot drift apart. The exporter
refuses a metric that is not listed here. Names are public API: one is added freely, changed or removed with an entry in
the changelog.

Conventions (Prometheus naming practices, OpenMetrics 1.0): one prefix, base units as suffix, `_total` on counters only,
`_info` with the value 1, moments in time instead of ages, no ready-made rates but those that a rank measures itself.
The step, a value, is never a label. `run` and `rank` say which series; everything else about a rank stands once in
`trainermon_run_info`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from types import MappingProxyType

from trainermon.monitor.values import Kind

LOSS_SERIES = "loss"
"""Name of the `Kind.LOSS` series, the training loss that the script records."""

STEP_TIME_SERIES = "duration_seconds"
"""Name of the `Kind.STEP` series of the wall time of a step in seconds."""

GLOBAL_NORM_SERIES = "global_grad_norm"
"""`Kind.STEP`: L2 norm of all gradients over the job before clipping, as the framework itself returned it."""

CLIP_RATIO_SERIES = "clip_ratio"
"""`Kind.STEP`: what clipping multiplied the gradients by, 0 to 1."""

LOSS_SCALE_SERIES = "loss_scale"
"""`Kind.STEP`: what the loss was multiplied by."""

SKIPPED_SERIES = "skipped"
"""`Kind.STEP`: 1 if the framework skipped the optimizer step, else 0."""

TOKENS_SERIES = "tokens"
"""`Kind.STEP`: tokens of this rank's share of the step, as the script records them."""

TOKENS_PER_SECOND_SERIES = "tokens_per_second"
"""`Kind.STEP`: the recorded tokens of this rank over the duration of the step."""

LEARNING_RATE_SERIES = "learning_rate"
"""`Kind.STEP`: learning rate of a parameter group; the slot is the group's number."""


class MetricType(str, enum.Enum):
    """Type of a metric, in the words of OpenMetrics."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    INFO = "info"

    def __str__(self) -> str:
        return self.value


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


KINDS: Mapping[Kind, str] = MappingProxyType(
    {
        Kind.LOSS: "The training loss that the script records; one element per micro step.",
        Kind.GRAD_UNREDUCED: "Gradients of parameters before they are reduced over ranks.",
        Kind.GRAD_REDUCED: "Gradients of parameters at entry of the optimizer step: reduced, scaled, not yet clipped.",
        Kind.PARAM_ORIGIN: "Parameters before the optimizer step.",
        Kind.PARAM_UPDATED: "Parameters after the optimizer step.",
        Kind.EXP_AVG: "Adam's first moment after the optimizer step.",
        Kind.EXP_AVG_SQ: "Adam's second moment after the optimizer step.",
        Kind.STATE: "Other state that the optimizer keeps per element, by its own name, after the optimizer step.",
        Kind.UPDATE: "Adam's update by formula, before it is multiplied by the learning rate.",
        Kind.RATIO: "Adam's first moment over the root of its second one, both bias-corrected, element by element.",
        Kind.MG_DIRECTION: "Share of elements whose gradient and first moment have the same sign, 0 to 1.",
        Kind.ACTV: "Inputs and outputs of modules in the training forward.",
        Kind.ACTV_GRAD: "Gradients of inputs and outputs of modules.",
        Kind.COMM: "Collectives: how many, how far, what is in flight; when asked, their operands and waiting times.",
        Kind.FEATURE: "Model-specific features, such as attention logits or the load of experts.",
        Kind.STEP: "Numbers of the step: duration, norm, clipping, loss scale, learning rate, what the script records.",
    }
)

STATISTICS: Mapping[str, str] = MappingProxyType(
    {
        "count": "Number of elements, finite or not.",
        "min": "Smallest finite element; +Inf if there is none.",
        "max": "Largest finite element; -Inf if there is none.",
        "sum": "Sum of the finite elements.",
        "sum_sq": "Sum of the squares of the finite elements.",
        "zeros": "Number of zeros, of either sign.",
        "nans": "Number of NaN elements.",
        "infs": "Number of infinite elements, of either sign.",
        "finite": "Number of finite elements: count - nans - infs.",
        "nonfinite": "Number of non-finite elements: nans + infs.",
        "mean": "Mean of the finite elements: sum / finite.",
        "norm": "L2 norm of the finite elements: sqrt(sum_sq).",
        "rms": "Root mean square of the finite elements: sqrt(sum_sq / finite).",
        "std": "Population standard deviation of the finite elements: sqrt(sum_sq / finite - mean²).",
        "zero_ratio": "Share of zeros among all elements, 0 to 1: zeros / count.",
    }
)
"""The eight moments in their stored order, then what is derived from them when it is read."""

_RANK = ("run", "rank")
_MODULE = ("run", "rank", "module")
_PER_RANK = "1 per rank"
_PER_MODULE = "1 per rank and module, rolled up to the series budget"


_PER_GROUP = "1 per rank and process group, of at most 8 groups"
_PER_WATCHED_GROUP = f"{_PER_GROUP}; with `cc_distribution`"


def _module_metric(name: str, kind: Kind, what: str, *labels: str) -> Metric:
    text = f"Root mean square of the finite elements of {what}, last collected step."
    return Metric(name=name, type=MetricType.GAUGE, help=text, labels=(*_MODULE, *labels), cost=_PER_MODULE, kind=kind)


def _step_metric(name: str, text: str) -> Metric:
    return Metric(name=name, type=MetricType.GAUGE, help=f"{text}, newest step.", labels=_RANK, cost=_PER_RANK)


_LIST = (
    Metric(
        name="trainermon_run_info",
        type=MetricType.INFO,
        help="Where a rank stands in the job; join on run and rank.",
        labels=(*_RANK, "attempt", "world_size", "dp", "tp", "pp", "cp", "ep", "version"),
        cost=_PER_RANK,
    ),
    Metric(
        name="trainermon_step",
        type=MetricType.GAUGE,
        help="Newest step that the rank has reported; falls when a job resumes from a checkpoint.",
        labels=_RANK,
        cost=_PER_RANK,
    ),
    Metric(
        name="trainermon_last_step_timestamp_seconds",
        type=MetricType.GAUGE,
        help="Unix time at the end of the newest reported step, by the rank's clock.",
        unit="seconds",
        labels=_RANK,
        cost=_PER_RANK,
    ),
    Metric(
        name="trainermon_step_duration_seconds",
        type=MetricType.HISTOGRAM,
        help="Wall time of a step; without the rank label, over all ranks of the node, in jobs of more than 64 ranks.",
        unit="seconds",
        labels=_RANK,
        cost="14 per rank, or 14 per node in jobs of more than 64 ranks",
        buckets=(0.01, 0.03, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    ),
    Metric(
        name="trainermon_loss",
        type=MetricType.GAUGE,
        help="Mean over micro steps of the training loss, newest step; absent while it is not finite.",
        labels=_RANK,
        cost=_PER_RANK,
    ),
    _step_metric(
        "trainermon_global_gradient_norm",
        "L2 norm of all gradients over the job before clipping, unscaled, as the framework returned it",
    ),
    _step_metric("trainermon_clip_ratio", "What clipping multiplied the gradients by, 0 to 1"),
    _step_metric("trainermon_loss_scale", "What the loss was multiplied by"),
    Metric(
        name="trainermon_skipped_steps_total",
        type=MetricType.COUNTER,
        help="Collected steps that the framework skipped, so that they changed nothing, since the agent started.",
        labels=_RANK,
        cost=_PER_RANK,
    ),
    Metric(
        name="trainermon_learning_rate",
        type=MetricType.GAUGE,
        help="Learning rate of a parameter group of the optimizer, by its number, newest collected step.",
        labels=(*_RANK, "group"),
        cost="1 per rank and parameter group, at most 8",
    ),
    Metric(
        name="trainermon_tokens_total",
        type=MetricType.COUNTER,
        help="Tokens of the rank's share of the steps, as the training script records them, since the agent started.",
        labels=_RANK,
        cost=_PER_RANK,
    ),
    _step_metric(
        "trainermon_tokens_per_second",
        "Tokens of the rank's share of the step over the step's duration; over longer times, rate of the counter",
    ),
    Metric(
        name="trainermon_recorded_value",
        type=MetricType.GAUGE,
        help="Mean over micro steps of a value that the training script records beside the loss, newest step.",
        labels=(*_RANK, "name"),
        cost="1 per rank and recorded value, at most 8",
    ),
    Metric(
        name="trainermon_gradient_norm",
        type=MetricType.GAUGE,
        help="L2 norm over all finite elements of the reduced gradients that the rank holds, before clipping.",
        labels=_RANK,
        cost=_PER_RANK,
    ),
    Metric(
        name="trainermon_gradient_norm_part",
        type=MetricType.GAUGE,
        help="The same over the elements that count on this rank and on no other: the job's norm is "
        "sqrt(sum by (run) (x^2)).",
        labels=_RANK,
        cost=_PER_RANK,
    ),
    Metric(
        name="trainermon_nonfinite_elements_total",
        type=MetricType.COUNTER,
        help="NaN and infinite elements seen in all tensors of a kind since the agent started.",
        unit="elements",
        labels=(*_RANK, "kind"),
        cost="1 per rank and collected kind",
    ),
    _module_metric(
        "trainermon_unreduced_gradient_rms", Kind.GRAD_UNREDUCED, "gradients of a module before they are reduced"
    ),
    _module_metric("trainermon_gradient_rms", Kind.GRAD_REDUCED, "reduced, unclipped gradients of a module"),
    _module_metric("trainermon_parameter_rms", Kind.PARAM_ORIGIN, "parameters of a module before the optimizer step"),
    _module_metric(
        "trainermon_updated_parameter_rms", Kind.PARAM_UPDATED, "parameters of a module after the optimizer step"
    ),
    _module_metric("trainermon_first_moment_rms", Kind.EXP_AVG, "Adam's first moment of a module"),
    _module_metric("trainermon_second_moment_rms", Kind.EXP_AVG_SQ, "Adam's second moment of a module"),
    _module_metric("trainermon_optimizer_state_rms", Kind.STATE, "other optimizer state of a module", "state"),
    _module_metric("trainermon_update_rms", Kind.UPDATE, "Adam's update of a module, without the learning rate"),
    _module_metric("trainermon_update_ratio_rms", Kind.RATIO, "first over root of second moment of a module"),
    Metric(
        name="trainermon_gradient_direction",
        type=MetricType.GAUGE,
        help="Share of a module's elements whose gradient and first moment have the same sign, 0 to 1, last collected "
        "step.",
        labels=_MODULE,
        cost=_PER_MODULE,
        kind=Kind.MG_DIRECTION,
    ),
    _module_metric("trainermon_activation_rms", Kind.ACTV, "outputs of a module"),
    _module_metric("trainermon_activation_gradient_rms", Kind.ACTV_GRAD, "gradients of the outputs of a module"),
    Metric(
        name="trainermon_feature_mean",
        type=MetricType.GAUGE,
        help="Mean of the finite elements of a model-specific feature of a module, last collected step.",
        labels=(*_MODULE, "feature"),
        cost=_PER_MODULE,
        kind=Kind.FEATURE,
    ),
    Metric(
        name="trainermon_feature_max",
        type=MetricType.GAUGE,
        help="Largest finite element of a feature of which that is what counts: attention_max_logit, expert_load, "
        "fp8_amax; last collected step.",
        labels=(*_MODULE, "feature"),
        cost=_PER_MODULE,
    ),
    _module_metric(
        "trainermon_collective_operand_rms",
        Kind.COMM,
        "what the calls of a collective read (side pre) or wrote (side post); the module is purpose and operation",
        "side",
    ),
    Metric(
        name="trainermon_collectives_total",
        type=MetricType.COUNTER,
        help="Collectives that the rank has begun in a process group, as its backend numbers them; the rank with the "
        "smallest number has not entered the others' last one.",
        labels=(*_RANK, "purpose"),
        cost=_PER_GROUP,
    ),
    Metric(
        name="trainermon_collectives_in_flight",
        type=MetricType.GAUGE,
        help="Collectives of a process group that are not known complete at the end of the last collected step.",
        labels=(*_RANK, "purpose"),
        cost=_PER_GROUP,
    ),
    Metric(
        name="trainermon_collective_wait_seconds_total",
        type=MetricType.COUNTER,
        help="Time that the host waited for watched collectives of a process group, on collected steps since the agent "
        "started.",
        unit="seconds",
        labels=(*_RANK, "purpose"),
        cost=_PER_WATCHED_GROUP,
    ),
    Metric(
        name="trainermon_collective_bytes_total",
        type=MetricType.COUNTER,
        help="Size of watched collectives of a process group, on collected steps since the agent started.",
        unit="bytes",
        labels=(*_RANK, "purpose"),
        cost=_PER_WATCHED_GROUP,
    ),
    Metric(
        name="trainermon_unseen_collectives_total",
        type=MetricType.COUNTER,
        help="Collectives of a process group that were begun, but not by calls that are watched, on collected steps "
        "since the agent started.",
        labels=(*_RANK, "purpose"),
        cost=_PER_WATCHED_GROUP,
    ),
    Metric(
        name="trainermon_unfinished_collectives_total",
        type=MetricType.COUNTER,
        help="Watched collectives of a process group that nobody had waited for by the end of their step, on collected "
        "steps since the agent started.",
        labels=(*_RANK, "purpose"),
        cost=_PER_WATCHED_GROUP,
    ),
    Metric(
        name="trainermon_alerts_firing",
        type=MetricType.GAUGE,
        help="Alerts of a rule that are firing now, over the ranks of the node.",
        labels=("run", "rule", "severity"),
        cost="1 per node and rule",
    ),
    Metric(
        name="trainermon_alerts_total",
        type=MetricType.COUNTER,
        help="Alerts of a rule that began to fire since the agent started.",
        labels=("run", "rule", "severity"),
        cost="1 per node and rule",
    ),
    Metric(
        name="trainermon_dumps_total",
        type=MetricType.COUNTER,
        help="Dumps and replays that the ranks of the node finished, successful or not.",
    ),
    Metric(
        name="trainermon_dump_failures_total",
        type=MetricType.COUNTER,
        help="Dumps and replays that were late, refused, over quota or failed.",
    ),
    Metric(name="trainermon_ranks", type=MetricType.GAUGE, help="Ranks of the node that have series here."),
    Metric(
        name="trainermon_exposed_series",
        type=MetricType.GAUGE,
        help="Series in this exposition.",
        unit="series",
    ),
    Metric(
        name="trainermon_rolled_up_series",
        type=MetricType.GAUGE,
        help="Series of ranks that are shown merged into a parent module to stay within the series budget.",
        unit="series",
    ),
    Metric(
        name="trainermon_left_out_series",
        type=MetricType.GAUGE,
        help="Series of ranks that are not shown at all because the series budget is used up.",
        unit="series",
    ),
    Metric(
        name="trainermon_skipped_records_total",
        type=MetricType.COUNTER,
        help="Records that the rank did not write because the journal was too slow or full.",
        unit="records",
        labels=_RANK,
        cost=_PER_RANK,
    ),
    Metric(
        name="trainermon_lost_files_total",
        type=MetricType.COUNTER,
        help="Journal files that were removed by the spool's budget before the agent had read them.",
        unit="files",
        labels=_RANK,
        cost=_PER_RANK,
    ),
    Metric(
        name="trainermon_journal_lag_seconds",
        type=MetricType.GAUGE,
        help="Time from the end of a step to its evaluation by the rules, newest record.",
        unit="seconds",
    ),
    Metric(
        name="trainermon_commits_total",
        type=MetricType.COUNTER,
        help="Segments committed to the store.",
    ),
    Metric(
        name="trainermon_last_commit_timestamp_seconds",
        type=MetricType.GAUGE,
        help="Unix time of the newest committed segment.",
        unit="seconds",
    ),
    Metric(
        name="trainermon_errors_total",
        type=MetricType.COUNTER,
        help="Faults inside the agent that were caught, logged and survived.",
    ),
    Metric(
        name="trainermon_refused_configurations_total",
        type=MetricType.COUNTER,
        help="Edits of the configuration file that were refused because they were not valid.",
    ),
    Metric(
        name="trainermon_collection_duration_seconds",
        type=MetricType.GAUGE,
        help="Time that collecting and rendering the previous exposition took.",
        unit="seconds",
    ),
    Metric(
        name="trainermon_agent_cpu_seconds_total",
        type=MetricType.COUNTER,
        help="User and system CPU time of the agent.",
        unit="seconds",
    ),
    Metric(
        name="trainermon_agent_resident_memory_bytes",
        type=MetricType.GAUGE,
        help="Resident memory of the agent.",
        unit="bytes",
    ),
)

METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _LIST})
"""Every metric by name, in the order of the exposition."""

MODULE_METRICS: Mapping[Kind, Metric] = MappingProxyType(
    {metric.kind: metric for metric in _LIST if metric.kind is not None}
)
"""The metric that shows a kind per module. Losses and measures of the step have metrics of their own."""
