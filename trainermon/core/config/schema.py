"""Which keys a configuration has, what each means, and what its value must be."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping
from types import MappingProxyType

from trainermon.core.config.outputs import OutputConfig, check_formats
from trainermon.core.errors import ConfigError
from trainermon.core.strict import require, shown
from trainermon.core.values import DumpTask, GradientLevel, Kind, SourceMode

OPS = (
    "norm",
    "min",
    "max",
    "mean",
    "zeros",
    "nans",
    "infs",
    "rms",
    "std",
    "count",
    "sum",
    "sum_sq",
    "id",
    "shape",
    "dtype",
)
"""Columns that a csv file may have; msprobe's, and what the eight moments give beside them."""
ANOMALY_RULES = ("AnomalyTurbulence", "AnomalyNan")
SA_ORDERS = ("s,b,h,d", "b,s,h,d")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """The node agent that local rank 0 starts.

    Attributes:
        start: Start an agent. With `false` the spool is written and somebody else (a node service) follows it.
        host: Address that the agent's page and `/metrics` listen on.
        port: Port of the page and `/metrics`; 0: one from 20000 to 29999 that is the same for all runs of an output
            folder, or any that is free where another run has it.
        linger_s: Seconds that the agent waits after the last rank has gone, for a restarted job.
        wait_s: Longest time in seconds that `close()` waits for the agent to have stored everything.
        flush_s: Longest time in seconds between two stored segments.
        accelerators_s: Seconds between two readings of utilisation, memory, power and temperature of the ranks'
            accelerators, as their driver tells the agent; 0: none.
    """

    start: bool = True
    host: str = "127.0.0.1"
    port: int = 0
    linger_s: float = 60.0
    wait_s: float = 10.0
    flush_s: float = 30.0
    accelerators_s: float = 2.0

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, "agent.port", self.port, "0 to 65535")
        for key in ("linger_s", "wait_s", "accelerators_s"):
            require(getattr(self, key) >= 0, f"agent.{key}", getattr(self, key), "a number of seconds, 0 or more")
        require(self.flush_s > 0, "agent.flush_s", self.flush_s, "a number of seconds above 0")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """The replay of a step whose gradients are not finite, with the dump on.

    Attributes:
        enabled: Keep what a replay needs on steps on which gradients are collected, and replay on the first bad one.
        memory_mb: Most memory in MiB for what is kept per step (buffers, RNG state, gradient of the model's output).
        joint: Where the forward communicates, have all ranks replay together. Model code that raises on one rank in the
            replay, but did not in the step, leaves the other ranks waiting for it: false rules that out.
        task: `statistics` or `tensor`: what the replay writes.
        max_replays: Most replays in one run.
        max_dump_mb: Most MiB that one replay may write on this rank.
        classify: Run a bad step once more, operation by operation: which made the first non-finite value, and why.
        keep_mb: Most MiB, parameters and batch included, for which a bad step is kept on disk, so that
            `trainermon replay` can run it again; 0: never.
    """

    enabled: bool = True
    memory_mb: float = 1024.0
    joint: bool = True
    task: DumpTask = DumpTask.STATISTICS
    max_replays: int = 3
    max_dump_mb: float = 4096.0
    classify: bool = True
    keep_mb: float = 512.0

    def __post_init__(self) -> None:
        for key in ("memory_mb", "max_replays", "max_dump_mb", "keep_mb"):
            require(getattr(self, key) >= 0, f"replay.{key}", getattr(self, key), "0 or more")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EscalationConfig:
    """What an alert that is not fatal may make the ranks do.

    Attributes:
        enabled: Let alerts order dumps.
        task: `statistics` or `tensor`: what such a dump writes.
        num_steps: Steps that one alert dumps.
        margin_steps: How far ahead of the newest known step the dump begins.
        max_per_hour: Most escalations in an hour.
        max_dump_mb: Most MiB that escalations may write in the whole run on this node.
    """

    enabled: bool = True
    task: DumpTask = DumpTask.STATISTICS
    num_steps: int = 1
    margin_steps: int = 2
    max_per_hour: int = 3
    max_dump_mb: float = 4096.0

    def __post_init__(self) -> None:
        for key in ("num_steps", "margin_steps"):
            require(getattr(self, key) >= 1, f"escalation.{key}", getattr(self, key), "1 or more")
        for key in ("max_per_hour", "max_dump_mb"):
            require(getattr(self, key) >= 0, f"escalation.{key}", getattr(self, key), "0 or more")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HangConfig:
    """When a rank that gives no sign of life is taken for hung, and how it may be looked into then.

    Attributes:
        enabled: Watch for ranks that hang, and open this rank to its agent for that.
        setup_s: Seconds that the time up to the end of the first step may take, which compiles and connects.
        step_s: Seconds that a step may take at least.
        checkpoint_s: Seconds that a checkpoint may take at least.
        evaluation_s: Seconds that an evaluation may take at least.
        factor: Limit for a phase whose silences are usually longer: this many times the longest usual one.
        max_s: Seconds beyond which the limit is not raised by `factor`.
        recorder: Let the agent ask this rank's flight recorder, through a private socket in the spool.
        calls: Let this rank note which collective it is in, in memory that the agent can read.
        stacks: Let the agent make this rank write its stacks by a signal (SIGRTMIN+5), and write them on a fatal error.
        py_spy: Let the agent use py-spy, where it is installed and allowed.
    """

    enabled: bool = True
    setup_s: float = 1800.0
    step_s: float = 120.0
    checkpoint_s: float = 1800.0
    evaluation_s: float = 900.0
    factor: float = 5.0
    max_s: float = 3600.0
    recorder: bool = True
    calls: bool = True
    stacks: bool = True
    py_spy: bool = True

    def __post_init__(self) -> None:
        for key in ("setup_s", "step_s", "checkpoint_s", "evaluation_s", "max_s"):
            require(getattr(self, key) > 0, f"hang.{key}", getattr(self, key), "a number of seconds above 0")
        require(self.factor >= 1, "hang.factor", self.factor, "1 or more")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CollectivesConfig:
    """The operands of collectives: which calls', and when they are collected.

    Attributes:
        enable: Collect the operands of every collective after it has completed, one row per call.
        cc_codeline: Only calls whose stack, as text, has one of these patterns in it; empty means all.
        cc_pre_hook: Collect the operands before the call too.
        cc_log_only: Collect no values: write to the log which collectives are called from where, once per place.
    """

    enable: bool = False
    cc_codeline: tuple[str, ...] = ()
    cc_pre_hook: bool = False
    cc_log_only: bool = False

    def __post_init__(self) -> None:
        for index, pattern in enumerate(self.cc_codeline):
            _require_pattern(pattern, f"cc_distribution.cc_codeline[{index}]")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class L2Targets:
    """Modules whose features are collected, by full name or `*` pattern; null: of none.

    Attributes:
        attention_hook: Attention cores, called with query and key: entropy and largest probability.
        linear_hook: Modules with a matrix as weight: stable rank and spectral norm; an empty list means all of them.
        moe_router_weight_hook: Routers: similarity of the experts' weight vectors.
        moe_router_logit_hook: Routers: entropy of each token's choice of experts.
    """

    attention_hook: tuple[str, ...] | None = None
    linear_hook: tuple[str, ...] | None = None
    moe_router_weight_hook: tuple[str, ...] | None = None
    moe_router_logit_hook: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyArguments:
    """Arguments of an anomaly rule.

    Attributes:
        threshold: `AnomalyTurbulence`: how far, relative to the mean so far, a value may move. `AnomalyNan`: largest
            magnitude that counts as a number.
    """

    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.threshold is not None:
            require(self.threshold >= 0, "alert.rules[].args.threshold", self.threshold, "0 or more")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyRuleConfig:
    """A rule of msprobe's monitor.

    Attributes:
        rule_name: `AnomalyTurbulence` or `AnomalyNan`.
        args: Its arguments.
    """

    rule_name: str
    args: AnomalyArguments = AnomalyArguments()

    def __post_init__(self) -> None:
        expected = " or ".join(map(repr, ANOMALY_RULES))
        require(self.rule_name in ANOMALY_RULES, "alert.rules[].rule_name", self.rule_name, expected)
        if self.rule_name == "AnomalyTurbulence":
            require(self.args.threshold is not None, "alert.rules[].args.threshold", None, "a number of 0 or more")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AlertConfig:
    """Rules of msprobe's monitor, beside the alert rules of `rules`.

    Attributes:
        rules: The rules; of several that hold for a value, the first counts.
        dump: Write every anomaly to `anomaly_detected/rank<r>/anomaly.json` too.
    """

    rules: tuple[AnomalyRuleConfig, ...] = ()
    dump: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GradientSignsConfig:
    """Files of the reduced gradients' signs, by which `trainermon gradients compare` holds two runs together.

    Attributes:
        level: `L1` signs, `L2` their distribution over `bounds` too; without it nothing is written.
        params: Parameters, as names, name prefixes or `*` patterns; empty means all.
        bounds: Elements are counted in `(-inf, b0]`, `(b0, b1]` … `(bn, inf)`; rising.
        step_interval: Interval, in steps, between steps that are written; on collected steps only.
        max_steps: How many steps are written in all: a step takes a quarter of a byte an element.
    """

    level: GradientLevel | None = None
    params: tuple[str, ...] = ()
    bounds: tuple[float, ...] = (-1.0, 0.0, 1.0)
    step_interval: int = 1
    max_steps: int = 1000

    def __post_init__(self) -> None:
        has_signs = self.level in (None, GradientLevel.L1, GradientLevel.L2)
        require(has_signs, "gradient_signs.level", self.level, "L1 or L2, which have signs")
        rises = all(low < high for low, high in itertools.pairwise(self.bounds))
        require(rises, "gradient_signs.bounds", list(self.bounds), "numbers that rise")
        require(self.step_interval >= 1, "gradient_signs.step_interval", self.step_interval, "1 or more")
        require(self.max_steps >= 0, "gradient_signs.max_steps", self.max_steps, "0 or more")


HISTOGRAM_KINDS: Mapping[str, str] = MappingProxyType(
    {
        Kind.GRAD_UNREDUCED: "wg_distribution",
        Kind.GRAD_REDUCED: "wg_distribution",
        Kind.PARAM_ORIGIN: "param_distribution",
        Kind.PARAM_UPDATED: "param_distribution",
        Kind.EXP_AVG: "mv_distribution",
        Kind.ACTV: "xy_distribution",
        Kind.ACTV_GRAD: "xy_distribution",
    }
)
"""Kinds of tensors that may have histograms (their elements lie within the bins), and the key that collects each."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HistogramsConfig:
    """Histograms of tensors that are collected: counts of their elements by sign and power of two.

    Attributes:
        kinds: Of which: `grad_unreduced`, `grad_reduced`, `param_origin`, `param_updated`, `exp_avg`, `actv`,
            `actv_grad`; without any, none is taken.
        targets: Modules and parameters, written as the other `targets`; empty means all that are collected.
        step_interval: Interval, in steps, between steps that have histograms: the first collected one in each.
    """

    kinds: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    step_interval: int = 100

    def __post_init__(self) -> None:
        for place, kind in enumerate(self.kinds):
            expected = f"one of {', '.join(HISTOGRAM_KINDS)}"
            require(kind in HISTOGRAM_KINDS, f"histograms.kinds[{place}]", kind, expected)
        require(self.step_interval >= 1, "histograms.step_interval", self.step_interval, "1 or more")
        for place, target in enumerate(self.targets):
            _require_target(target, f"histograms.targets[{place}]")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig(OutputConfig):
    """Everything a user can ask for.

    Attributes:
        framework: Adapter to use, by name, instead of the one that recognises the model.
        targets: Modules and parameters to collect, as names, name prefixes, `*` patterns, or regular expressions after
            `~`, which are looked for anywhere in a name; empty means all. `1:` before one chooses virtual pipeline
            stage 1 only.
        exclude: Modules and parameters to leave out of these, written likewise.
        start_step: First step that is collected.
        step_interval: Interval, in steps, between collected steps.
        checksum_interval: Interval, in steps, between checksums of the parameters that several ranks hold copies of,
            which the agent compares, between reads of the model's buffers, and of what is computed again in the
            backward; on collected steps only. 0: never.
        collect_times: How many steps are collected in all.
        module_ranks: Global ranks that collect; empty means all.
        wg_distribution: Weight gradients, before reduction and after it but before clipping.
        monitor_mbs_grad: Weight gradients of each micro step too.
        param_distribution: Parameters before and after the optimizer step.
        mv_distribution: Adam's moments after the optimizer step, filed under that step.
        ur_distribution: Adam's update `m_hat / (sqrt(v_hat) + eps)` and its ratio `m_hat / sqrt(v_hat)`, by formula.
        mg_direction: Share of elements whose gradient and first moment have the same sign.
        gradient_signs: Files of the reduced gradients' signs.
        histograms: Histograms of gradients, parameters and activations.
        xy_distribution: Inputs and outputs of modules, and the gradients of both.
        all_xy: Every module, whatever `targets` says (parameters still follow `targets`).
        forward_only: With `xy_distribution`: no gradients of inputs and outputs.
        backward_only: With `xy_distribution`: only the gradients of inputs and outputs.
        cc_distribution: The operands of collectives.
        recording_l2_features: Take the features of `l2_targets`.
        l2_targets: Modules whose features are collected.
        sa_order: Order of the dimensions of query and key: sequence, batch, head, depth.
        print_struct: Write what goes into and comes out of every module, once, to
            `module_struct/rank<r>/module_struct.json` in the run directory.
        stack_info: Write where every module is called from, once, to `module_struct/rank<r>/stack_info.csv`.
        dynamic_on: Look for an edited configuration file at every step and apply it from the next one on.
        output_dir: Folder that holds one folder per run, a cluster file system is fine; without it TRAINERMON_OUTPUT,
            MONITOR_OUTPUT_DIR or `trainermon_output`.
        run_id: Name of the run; without it TRAINERMON_RUN_ID, the scheduler's job id, or one made by rank 0.
        tags: Words by which `trainermon serve` finds the run again; they are kept in `run.json`.
        spool_dir: Node-local folder for journals and unsent dumps, instead of TRAINERMON_SPOOL or the usual one: in
            /dev/shm where that has 8 GiB, else in /var/tmp.
        spool_mb: Most MiB of journal that this rank keeps on the node; in /dev/shm at most its share of a sixteenth.
        rules: File of alert rules instead of the built-in ones.
        alert: Rules of msprobe's monitor, beside those.
        agent: The node agent.
        replay: The replay of a step whose gradients are not finite.
        escalation: What other alerts may order.
        dump_source: What dumps keep of the source code that ran: the `functions` that stacks name, their whole `files`,
            or `off`: nothing.
        hang: When a rank is taken for hung, and how it may be looked into.
        environment: Keep the settings that change numbers or speed in `ranks/rank*.json`: variables of the allow-list,
            switches of torch, versions of packages that compute, the script's arguments without secrets, and
            settings of the optimizer. Nothing else of the environment is ever kept.
    """

    framework: str | None = None
    targets: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    start_step: int = 0
    step_interval: int = 1
    checksum_interval: int = 20
    collect_times: int = 100_000_000
    module_ranks: tuple[int, ...] = ()
    wg_distribution: bool = True
    monitor_mbs_grad: bool = False
    param_distribution: bool = False
    mv_distribution: bool = False
    ur_distribution: bool = False
    mg_direction: bool = False
    gradient_signs: GradientSignsConfig = GradientSignsConfig()
    histograms: HistogramsConfig = HistogramsConfig()
    xy_distribution: bool = False
    all_xy: bool = False
    forward_only: bool = False
    backward_only: bool = False
    cc_distribution: CollectivesConfig = CollectivesConfig()
    recording_l2_features: bool = False
    l2_targets: L2Targets = L2Targets()
    sa_order: str = "s,b,h,d"
    print_struct: bool = False
    stack_info: bool = False
    dynamic_on: bool = False
    output_dir: str | None = None
    run_id: str | None = None
    tags: tuple[str, ...] = ()
    spool_dir: str | None = None
    spool_mb: float = 512.0
    rules: str | None = None
    alert: AlertConfig = AlertConfig()
    agent: AgentConfig = AgentConfig()
    replay: ReplayConfig = ReplayConfig()
    escalation: EscalationConfig = EscalationConfig()
    dump_source: SourceMode = SourceMode.FUNCTIONS
    hang: HangConfig = HangConfig()
    environment: bool = True

    def __post_init__(self) -> None:
        require(self.start_step >= 0, "start_step", self.start_step, "0 or more")
        require(self.step_interval >= 1, "step_interval", self.step_interval, "1 or more")
        require(self.checksum_interval >= 0, "checksum_interval", self.checksum_interval, "0 or more")
        require(self.collect_times >= 0, "collect_times", self.collect_times, "0 or more")
        require(self.spool_mb >= 1, "spool_mb", self.spool_mb, "1 or more")
        require(min(self.module_ranks, default=0) >= 0, "module_ranks", self.module_ranks, "ranks of 0 or more")
        require(self.sa_order in SA_ORDERS, "sa_order", self.sa_order, " or ".join(map(repr, SA_ORDERS)))
        require(1 <= self.ndigits <= 20, "ndigits", self.ndigits, "1 to 20")
        require(
            1 <= self.step_count_per_record <= 1_000_000,
            "step_count_per_record",
            self.step_count_per_record,
            "1 to 1000000",
        )
        require(len(self.append_output) in (0, 2), "append_output", self.append_output, "nothing or two timestamps")
        for key in ("targets", "exclude"):
            for index, target in enumerate(getattr(self, key)):
                _require_target(target, f"{key}[{index}]")
        for index, kind in enumerate(self.histograms.kinds):
            key = HISTOGRAM_KINDS[kind]
            require(
                getattr(self, key), f"histograms.kinds[{index}]", kind, f"a kind that is collected: set {key} to true"
            )
        for index, op in enumerate(self.ops):
            require(op in OPS, f"ops[{index}]", op, "one of " + ", ".join(OPS))
        check_formats(self.format)
        if "influxdb" in self.format and not self.influxdb.url:
            raise ConfigError("format names influxdb, but influxdb.url is not set: where are the points to go?")
        if "pushgateway" in self.format and not self.pushgateway.url:
            raise ConfigError("format names pushgateway, but pushgateway.url is not set: where is the Pushgateway?")


def _require_target(target: str, path: str) -> None:
    pattern = re.sub(r"^\d+:", "", target)
    if pattern.startswith("~"):
        _require_pattern(pattern[1:], path)


def _require_pattern(pattern: str, path: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{path}: found {shown(pattern)}, expected a regular expression: {error}") from None
