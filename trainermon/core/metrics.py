"""Every metric that trainermon exposes: name, type, unit, labels, help, cost. Exposition and reference come from here.

One list, so that exporters, rules, dashboards and docs/reference/metrics.md cannot drift apart. The exporter refuses a
metric that is not listed here. Names are public API: one is added freely, changed or removed with an entry in the
changelog.

Conventions (Prometheus naming practices, OpenMetrics 1.0): one prefix, base units as suffix, `_total` on counters only,
`_info` with the value 1, moments in time instead of ages, attempts and failures as two counters, no ready-made rates
but those that a rank measures itself. The step, a value, is never a label. `run` and `rank` say which series; what else
there is to say about a rank stands once in `trainermon_rank_info`, about the run in `trainermon_run_info`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from trainermon.core.metric import Metric, MetricType
from trainermon.core.values import Kind

_NODE = ("run",)
_RANK = ("run", "rank")
_MODULE = ("run", "rank", "module")
_GROUP = ("run", "rank", "purpose")
_RULE = ("run", "rule", "severity")
_EXPORTER = ("run", "exporter")
_COST = MappingProxyType(
    {
        _NODE: "1 per node",
        _RANK: "1 per rank",
        _MODULE: "1 per rank and module, rolled up to the series budget",
        _GROUP: "1 per rank and process group, of at most 8 groups",
        _RULE: "1 per node and rule",
        _EXPORTER: "1 per node and exporter",
    }
)
_WATCHED = f"{_COST[_GROUP]}; with `cc_distribution`"
_DURABLE = "1 per node and exporter that follows the store: `influxdb`"
_SINCE = "since the agent started"


def _gauge(name: str, text: str, labels: tuple[str, ...] = _NODE, *, unit: str = "", cost: str = "") -> Metric:
    return Metric(name=name, type=MetricType.GAUGE, help=text, unit=unit, labels=labels, cost=cost or _COST[labels[:3]])


def _counter(name: str, text: str, labels: tuple[str, ...] = _NODE, *, unit: str = "", cost: str = "") -> Metric:
    return Metric(
        name=name, type=MetricType.COUNTER, help=text, unit=unit, labels=labels, cost=cost or _COST[labels[:3]]
    )


def _of_module(name: str, kind: Kind, text: str, *labels: str) -> Metric:
    every = (*_MODULE, *labels)
    return Metric(name=name, type=MetricType.GAUGE, help=text, labels=every, cost=_COST[_MODULE], kind=kind)


def _rms(name: str, kind: Kind, what: str, *labels: str) -> Metric:
    return _of_module(name, kind, f"Root mean square of the finite elements of {what}, last collected step.", *labels)


_RUN = (
    Metric(
        name="trainermon_run_info",
        type=MetricType.INFO,
        help="The newest attempt of the run, the sizes of its groups and the version of trainermon; join on run.",
        labels=("run", "attempt", *(f"{axis}_size" for axis in ("dp", "tp", "pp", "cp", "ep")), "version"),
    ),
    Metric(
        name="trainermon_rank_info",
        type=MetricType.INFO,
        help="Where a rank stands in the job; join on run and rank.",
        labels=(*_RANK, "dp", "tp", "pp", "cp", "ep"),
        cost=_COST[_RANK],
    ),
    _gauge("trainermon_world_size", "Ranks that the job has on all nodes."),
    _gauge("trainermon_ranks", "Ranks of the node that have series here."),
    _gauge(
        "trainermon_ranks_in_phase",
        "Living ranks of the node that were in a phase of training when they last said so.",
        ("run", "phase"),
        cost="1 per node and phase",
    ),
    _counter(
        "trainermon_lost_ranks_total", f"Ranks that ended without closing their journal: crashed or killed, {_SINCE}."
    ),
    _counter(
        "trainermon_detached_ranks_total",
        f"Ranks whose monitor met a fault and took itself out of training, which goes on, {_SINCE}.",
    ),
)

_STEP = (
    _gauge(
        "trainermon_step", "Newest step that the rank has reported; falls when a job resumes from a checkpoint.", _RANK
    ),
    _gauge(
        "trainermon_last_step_timestamp_seconds",
        "Unix time at the end of the newest reported step, by the rank's clock.",
        _RANK,
        unit="seconds",
    ),
    _gauge(
        "trainermon_last_heartbeat_timestamp_seconds",
        "Unix time at which the rank's heartbeat was last seen to change, by the agent's clock; its age is time() - x.",
        _RANK,
        unit="seconds",
    ),
    _gauge(
        "trainermon_rank_hung",
        "Whether the rank stands still and does not only wait for others: 1 or 0; where nobody can be blamed, "
        "1 for all that stand still.",
        _RANK,
    ),
    _gauge("trainermon_rank_straggling", "Whether the agent holds that the others wait for the rank: 1 or 0.", _RANK),
    _gauge(
        "trainermon_rank_slowness_ratio",
        "Time that the rank works per step, waiting for others left out, over the median of its peers; 1 is usual.",
        _RANK,
        unit="ratio",
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
    _gauge(
        "trainermon_loss",
        "Mean over micro steps of the training loss, newest step; NaN while it is not finite.",
        _RANK,
    ),
    _gauge(
        "trainermon_global_gradient_norm",
        "L2 norm of all gradients over the job before clipping, unscaled, as the framework returned it, newest step.",
        _RANK,
    ),
    _gauge(
        "trainermon_clip_ratio",
        "What clipping multiplied the gradients by, 0 to 1, newest step.",
        _RANK,
        unit="ratio",
    ),
    _gauge("trainermon_loss_scale", "What the loss was multiplied by, newest step.", _RANK),
    _counter(
        "trainermon_skipped_steps_total",
        f"Collected steps that the framework skipped, so that they changed nothing, {_SINCE}.",
        _RANK,
    ),
    _gauge(
        "trainermon_learning_rate",
        "Learning rate of a parameter group of the optimizer, by its number, newest collected step.",
        (*_RANK, "group"),
        cost="1 per rank and parameter group, at most 8",
    ),
    _counter(
        "trainermon_tokens_total",
        f"Tokens of the rank's share of the steps, as the training script records them, {_SINCE}.",
        _RANK,
    ),
    _gauge(
        "trainermon_tokens_per_second",
        "Tokens of the rank's share of the step over the step's duration; over longer times, rate of the counter, "
        "newest step.",
        _RANK,
    ),
    _gauge(
        "trainermon_recorded_value",
        "Mean over micro steps of a value that the training script records beside the loss, newest step.",
        (*_RANK, "name"),
        cost="1 per rank and recorded value, at most 8",
    ),
    _gauge(
        "trainermon_rollout_value",
        "Mean over micro steps of a number on the step's rollouts that trainermon.rl records, newest step.",
        (*_RANK, "name"),
        cost="1 per rank and number, at most 22, in reinforcement learning",
    ),
    _gauge(
        "trainermon_gradient_norm",
        "L2 norm of the reduced gradients that the rank holds, before clipping; no sample while one is not finite.",
        _RANK,
    ),
    _gauge(
        "trainermon_gradient_norm_part",
        "The same over the elements that count on this rank and on no other: the job's norm is "
        "sqrt(sum by (run) (x^2)).",
        _RANK,
    ),
    _counter(
        "trainermon_nonfinite_elements_total",
        f"NaN and infinite elements seen in all tensors of a kind {_SINCE}.",
        (*_RANK, "kind"),
        unit="elements",
        cost="1 per rank and collected kind",
    ),
)

_ACCELERATOR_COST = "1 per rank whose accelerator the agent can read"


def _of_accelerator(name: str, text: str, unit: str = "") -> Metric:
    return _gauge(f"trainermon_accelerator_{name}", text, _RANK, unit=unit, cost=_ACCELERATOR_COST)


ACCELERATORS = (
    Metric(
        name="trainermon_accelerator_info",
        type=MetricType.INFO,
        help="Which accelerator the rank trains on, by the driver's name of it; join on run and rank, or on uuid.",
        labels=(*_RANK, "uuid", "model"),
        cost=_ACCELERATOR_COST,
    ),
    _of_accelerator(
        "utilization_ratio",
        "Share of the driver's last sampling period in which the rank's accelerator computed at all, 0 to 1.",
        "ratio",
    ),
    _of_accelerator("memory_used_bytes", "Memory in use on the rank's accelerator, by all processes.", "bytes"),
    _of_accelerator("memory_size_bytes", "Memory that the rank's accelerator has.", "bytes"),
    _of_accelerator("power_watts", "What the rank's accelerator draws.", "watts"),
    _of_accelerator("temperature_celsius", "Temperature of the chip of the rank's accelerator.", "celsius"),
    _of_accelerator("clock_hertz", "Clock of the cores of the rank's accelerator.", "hertz"),
    _of_accelerator(
        "throttled",
        "Whether heat or the power supply slows the rank's accelerator down: 1 or 0; its power limit does not count.",
    ),
    _of_accelerator(
        "uncorrected_errors",
        "Errors in the memory of the rank's accelerator that could not be corrected, since its driver was loaded.",
    ),
    _of_accelerator(
        "xid", "Number of the newest error (NVIDIA's Xid) that the driver reported since the agent began to look."
    ),
)
"""What the driver says of a rank's accelerator; there while the agent can read it."""

_MODULES = (
    _rms("trainermon_unreduced_gradient_rms", Kind.GRAD_UNREDUCED, "gradients of a module before they are reduced"),
    _rms("trainermon_gradient_rms", Kind.GRAD_REDUCED, "reduced, unclipped gradients of a module"),
    _rms("trainermon_parameter_rms", Kind.PARAM_ORIGIN, "parameters of a module before the optimizer step"),
    _rms(
        "trainermon_used_parameter_rms", Kind.PARAM_USED, "own parameters of a module, where the optimizer steps others"
    ),
    _rms("trainermon_updated_parameter_rms", Kind.PARAM_UPDATED, "parameters of a module after the optimizer step"),
    _rms("trainermon_first_moment_rms", Kind.EXP_AVG, "Adam's first moment of a module"),
    _rms("trainermon_second_moment_rms", Kind.EXP_AVG_SQ, "Adam's second moment of a module"),
    _rms("trainermon_optimizer_state_rms", Kind.STATE, "other optimizer state of a module", "state"),
    _rms("trainermon_update_rms", Kind.UPDATE, "Adam's update of a module, without the learning rate"),
    _rms("trainermon_update_ratio_rms", Kind.RATIO, "first over root of second moment of a module"),
    _of_module(
        "trainermon_gradient_direction",
        Kind.MG_DIRECTION,
        "Share of a module's elements whose gradient and first moment have the same sign, 0 to 1, last collected step.",
    ),
    _rms("trainermon_activation_rms", Kind.ACTV, "outputs of a module"),
    _rms("trainermon_activation_gradient_rms", Kind.ACTV_GRAD, "gradients of the outputs of a module"),
    _rms("trainermon_recomputed_activation_rms", Kind.ACTV_RECOMPUTED, "outputs of a module that is computed again"),
    _rms("trainermon_buffer_rms", Kind.BUFFER, "buffers of a module that are saved with it"),
    _of_module(
        "trainermon_feature_mean",
        Kind.FEATURE,
        "Mean of the finite elements of a model-specific feature of a module, last collected step.",
        "feature",
    ),
    _gauge(
        "trainermon_feature_max",
        "Largest finite element of the features for which the maximum matters: attention_max_logit, expert_load, "
        "fp8_amax; last collected step.",
        (*_MODULE, "feature"),
    ),
    _rms(
        "trainermon_collective_operand_rms",
        Kind.COMM,
        "what the calls of a collective read (side pre) or wrote (side post); the module is purpose and operation",
        "side",
    ),
)

_COLLECTIVES = (
    _counter(
        "trainermon_collectives_total",
        "Collectives that the rank has begun in a process group, as its backend numbers them; the rank with the "
        "smallest number has not entered the others' last one.",
        _GROUP,
    ),
    _gauge(
        "trainermon_collectives_in_flight",
        "Collectives of a process group that are not known complete at the end of the last collected step.",
        _GROUP,
    ),
    Metric(
        name="trainermon_collective_wait_duration_seconds",
        type=MetricType.HISTOGRAM,
        help="Time that the host waited for one watched collective of a process group, over all ranks of the node.",
        unit="seconds",
        labels=("run", "purpose"),
        cost="14 per node and process group, of at most 8 groups; with `cc_distribution`",
        buckets=(1e-4, 3e-4, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    ),
    _counter(
        "trainermon_collective_wait_seconds_total",
        "Time that the host waited for watched collectives of a process group, on collected steps since the agent "
        "started.",
        _GROUP,
        unit="seconds",
        cost=_WATCHED,
    ),
    _counter(
        "trainermon_collective_bytes_total",
        f"Size of watched collectives of a process group, on collected steps {_SINCE}.",
        _GROUP,
        unit="bytes",
        cost=_WATCHED,
    ),
    _counter(
        "trainermon_unseen_collectives_total",
        "Collectives of a process group that were begun, but not by calls that are watched, on collected steps "
        f"{_SINCE}.",
        _GROUP,
        cost=_WATCHED,
    ),
    _counter(
        "trainermon_unfinished_collectives_total",
        "Watched collectives of a process group that nobody had waited for by the end of their step, on collected "
        f"steps {_SINCE}.",
        _GROUP,
        cost=_WATCHED,
    ),
)

_VERDICTS = (
    _counter(
        "trainermon_checksum_comparisons_total",
        f"Steps on which the checksums of replicas of parameters were compared, {_SINCE}.",
    ),
    _counter(
        "trainermon_checksum_mismatches_total",
        f"Parameters of the rank whose checksum was not that of its replicas, {_SINCE}.",
        _RANK,
    ),
    _counter(
        "trainermon_integrity_checks_total",
        f"Steps on which it was checked whether what the ranks report adds up, {_SINCE}.",
    ),
    _counter(
        "trainermon_integrity_mismatches_total",
        f"Steps on which what the ranks report did not add up: the monitor itself is wrong there, {_SINCE}.",
    ),
    _gauge("trainermon_alerts_firing", "Alerts of a rule that are firing now, over the ranks of the node.", _RULE),
    _counter("trainermon_alerts_total", "Alerts of a rule that have begun to fire in the run.", _RULE),
    _gauge(
        "trainermon_alert_first_step",
        "Step on which the alert of a rule on a rank began; there while it fires and for a minute after. Of a rule "
        "that looks at tensors, `series` is what was worst first.",
        (*_RANK, "rule", "severity", "series"),
        cost="1 per alert that is firing, at most 100 per node",
    ),
    _counter("trainermon_escalations_total", f"Alerts that were followed by an order to dump, {_SINCE}."),
    _counter(
        "trainermon_suppressed_escalations_total",
        f"Alerts whose rule orders a dump that quota or rate limit kept from happening, {_SINCE}.",
    ),
    _counter("trainermon_dumps_total", "Dumps and replays that the ranks of the node finished, successful or not."),
    _counter("trainermon_dump_failures_total", "Dumps and replays that were late, refused, over quota or failed."),
)

_AGENT = (
    _gauge("trainermon_exposed_series", "Series in this exposition.", unit="series"),
    _gauge(
        "trainermon_rolled_up_series",
        "Series of ranks that are shown merged into a parent module to stay within the series budget.",
        unit="series",
    ),
    _gauge(
        "trainermon_left_out_series",
        "Series of ranks that are not shown at all because the series budget is used up.",
        unit="series",
    ),
    _counter(
        "trainermon_skipped_records_total",
        "Records that the rank did not write because the journal was too slow or full.",
        _RANK,
        unit="records",
    ),
    _counter(
        "trainermon_lost_files_total",
        "Journal files that were removed by the spool's budget before the agent had read them.",
        _RANK,
        unit="files",
    ),
    _gauge(
        "trainermon_journal_lag_seconds",
        "Time from the end of a step to its evaluation by the rules, newest record.",
        unit="seconds",
    ),
    _counter("trainermon_commits_total", "Segments committed to the store."),
    _gauge("trainermon_last_commit_timestamp_seconds", "Unix time of the newest committed segment.", unit="seconds"),
    _counter("trainermon_refused_rows_total", f"Rows that could not be stored and were put in quarantine, {_SINCE}."),
    _gauge("trainermon_damaged_segments", "Segments of this node that were found damaged and set aside."),
    _counter("trainermon_errors_total", "Faults inside the agent that were caught, logged and survived."),
    _counter(
        "trainermon_refused_configurations_total",
        "Edits of the configuration file that were refused because they were not valid.",
    ),
    _gauge(
        "trainermon_collection_duration_seconds",
        "Time that collecting and rendering the previous exposition took.",
        unit="seconds",
    ),
    _counter("trainermon_agent_cpu_seconds_total", "User and system CPU time of the agent.", unit="seconds"),
    _gauge("trainermon_agent_resident_memory_bytes", "Resident memory of the agent.", unit="bytes"),
)

_EXPORTERS = (
    _counter("trainermon_exported_steps_total", f"Steps of ranks that an exporter has taken, {_SINCE}.", _EXPORTER),
    _counter(
        "trainermon_export_dropped_steps_total",
        f"Steps of ranks that an exporter failed at and left out, {_SINCE}.",
        _EXPORTER,
    ),
    _counter("trainermon_export_errors_total", f"Calls of an exporter that failed, {_SINCE}.", _EXPORTER),
    _counter(
        "trainermon_export_busy_seconds_total",
        f"Time that an exporter has worked or waited for its server, {_SINCE}.",
        _EXPORTER,
        unit="seconds",
    ),
    _counter(
        "trainermon_exported_points_total", f"Points that the server has taken, {_SINCE}.", _EXPORTER, cost=_DURABLE
    ),
    _counter(
        "trainermon_export_rejected_points_total",
        f"Points that the server has refused for good; they are in the dead-letter file, {_SINCE}.",
        _EXPORTER,
        cost=_DURABLE,
    ),
    _counter(
        "trainermon_export_nonfinite_values_total",
        f"Values that were not sent because they are not finite, which the server cannot hold, {_SINCE}.",
        _EXPORTER,
        cost=_DURABLE,
    ),
    _counter("trainermon_export_retries_total", f"Requests that were sent again, {_SINCE}.", _EXPORTER, cost=_DURABLE),
    _gauge(
        "trainermon_export_waiting_bytes",
        "Size of the committed segments that the server does not have yet.",
        _EXPORTER,
        unit="bytes",
        cost=_DURABLE,
    ),
    _gauge(
        "trainermon_export_last_success_timestamp_seconds",
        "Unix time of the last request that the server has accepted.",
        _EXPORTER,
        unit="seconds",
        cost=_DURABLE,
    ),
)

_LIST = (*_RUN, *_STEP, *ACCELERATORS, *_MODULES, *_COLLECTIVES, *_VERDICTS, *_AGENT, *_EXPORTERS)

METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _LIST})
"""Every metric by name, in the order of the exposition."""

MODULE_METRICS: Mapping[Kind, Metric] = MappingProxyType(
    {metric.kind: metric for metric in _LIST if metric.kind is not None}
)
"""The metric that shows a kind per module. Losses and measures of the step have metrics of their own."""

BUILD_INFO = Metric(
    name="trainermon_build_info",
    type=MetricType.INFO,
    help="The version of trainermon and of Python that this process runs.",
    labels=("version", "python_version"),
    cost="1 per process",
)


def _process(name: str, text: str, unit: str = "") -> Metric:
    kind = MetricType.COUNTER if name.endswith("_total") else MetricType.GAUGE
    return Metric(name=f"process_{name}", type=kind, help=text, unit=unit, labels=(), cost="1 per process")


PROCESS_METRICS = (
    _process("cpu_seconds_total", "User and system CPU time of this process.", "seconds"),
    _process("virtual_memory_bytes", "Virtual memory of this process.", "bytes"),
    _process("resident_memory_bytes", "Resident memory of this process.", "bytes"),
    _process("start_time_seconds", "Unix time at which this process began.", "seconds"),
    _process("open_fds", "Open file descriptors of this process."),
    _process("max_fds", "Most file descriptors that this process may have open."),
)
"""What agent and controller tell of their own process, under the names that dashboards for any program look for."""
