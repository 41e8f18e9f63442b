"""What a user asks of the monitor: read from JSON or YAML, checked completely, then frozen.

Key names are those of msprobe's monitor where it has the quantity. A key that is unknown, of the wrong type, out of
range or at odds with another is an error that names the key's path, what was found, what was expected and the nearest
right name: the user's wish is met or refused, never silently replaced.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainermon.monitor.errors import ConfigError
from trainermon.monitor.strict import build, require

# Keys of msprobe's monitor that choose an output form. All eight moments are always kept, so they change nothing here.
WITHOUT_EFFECT = (
    "append_output",
    "eps",
    "format",
    "ndigits",
    "ops",
    "squash_name",
    "step_count_per_record",
)
# Features of msprobe's monitor that this version does not have: asking for one is refused, `false` is accepted.
NOT_AVAILABLE = (
    "alert",
    "cc_distribution",
    "l2_targets",
    "mg_direction",
    "print_struct",
    "recording_l2_features",
    "sa_order",
    "stack_info",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """The node agent that local rank 0 starts.

    Attributes:
        start: Start an agent. With `false` the spool is written and somebody else (a node service) follows it.
        host: Address that the agent's page and `/metrics` listen on.
        port: Port of the page and `/metrics`; 0 lets the system choose one.
        linger_s: Seconds that the agent waits after the last rank has gone, for a restarted job.
        wait_s: Longest time in seconds that `close()` waits for the agent to have stored everything.
        flush_s: Longest time in seconds between two stored segments.
    """

    start: bool = True
    host: str = "127.0.0.1"
    port: int = 0
    linger_s: float = 60.0
    wait_s: float = 10.0
    flush_s: float = 30.0

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, "agent.port", self.port, "0 to 65535")
        for key in ("linger_s", "wait_s", "flush_s"):
            require(getattr(self, key) >= 0, f"agent.{key}", getattr(self, key), "a number of seconds, 0 or more")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """The replay of a step whose gradients are not finite, with the dump on.

    Attributes:
        enabled: Keep what a replay needs on steps on which gradients are collected, and replay on the first bad one.
        memory_mb: Most memory in MiB for what is kept per step (buffers, RNG state, gradient of the model's output).
        task: `statistics` or `tensor`: what the replay writes.
        max_replays: Most replays in one run.
        max_dump_mb: Most MiB that one replay may write on this rank.
    """

    enabled: bool = True
    memory_mb: float = 1024.0
    task: str = "statistics"
    max_replays: int = 3
    max_dump_mb: float = 4096.0

    def __post_init__(self) -> None:
        require(self.task in ("statistics", "tensor"), "replay.task", self.task, "'statistics' or 'tensor'")
        for key in ("memory_mb", "max_replays", "max_dump_mb"):
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
    task: str = "statistics"
    num_steps: int = 1
    margin_steps: int = 2
    max_per_hour: int = 3
    max_dump_mb: float = 4096.0

    def __post_init__(self) -> None:
        require(self.task in ("statistics", "tensor"), "escalation.task", self.task, "'statistics' or 'tensor'")
        for key in ("num_steps", "margin_steps"):
            require(getattr(self, key) >= 1, f"escalation.{key}", getattr(self, key), "1 or more")
        for key in ("max_per_hour", "max_dump_mb"):
            require(getattr(self, key) >= 0, f"escalation.{key}", getattr(self, key), "0 or more")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig:
    """Everything a user can ask for.

    Attributes:
        targets: Modules and parameters to collect, as names, name prefixes or `*` patterns; empty means all.
        start_step: First step that is collected.
        step_interval: Every how many steps are collected.
        collect_times: How many steps are collected in all.
        module_ranks: Global ranks that collect; empty means all.
        wg_distribution: Weight gradients, before reduction and after it but before clipping.
        monitor_mbs_grad: Weight gradients of each micro step too.
        param_distribution: Parameters before and after the optimizer step.
        mv_distribution: Adam's moments after the optimizer step, filed under that step.
        ur_distribution: Adam's update `m_hat / (sqrt(v_hat) + eps)`, by formula.
        xy_distribution: Inputs and outputs of modules, and the gradients of both.
        all_xy: Every module, whatever `targets` says (parameters still follow `targets`).
        forward_only: With `xy_distribution`: no gradients of inputs and outputs.
        backward_only: With `xy_distribution`: only the gradients of inputs and outputs.
        dynamic_on: Look for an edited configuration file at every step and apply it from the next one on.
        output_dir: Folder that holds one folder per run, a cluster file system is fine; without it TRAINERMON_OUTPUT,
            MONITOR_OUTPUT_DIR or `trainermon_output`.
        run_id: Name of the run; without it TRAINERMON_RUN_ID, the scheduler's job id, or one made by rank 0.
        spool_dir: Node-local folder for journals, instead of TRAINERMON_SPOOL or /var/tmp/trainermon-<uid>.
        spool_mb: Most MiB of journal that this rank keeps on the node.
        rules: File of alert rules instead of the built-in ones.
        agent: The node agent.
        replay: The replay of a step whose gradients are not finite.
        escalation: What other alerts may order.
    """

    targets: tuple[str, ...] = ()
    start_step: int = 0
    step_interval: int = 1
    collect_times: int = 100_000_000
    module_ranks: tuple[int, ...] = ()
    wg_distribution: bool = True
    monitor_mbs_grad: bool = False
    param_distribution: bool = False
    mv_distribution: bool = False
    ur_distribution: bool = False
    xy_distribution: bool = False
    all_xy: bool = False
    forward_only: bool = False
    backward_only: bool = False
    dynamic_on: bool = False
    output_dir: str | None = None
    run_id: str | None = None
    spool_dir: str | None = None
    spool_mb: float = 512.0
    rules: str | None = None
    agent: AgentConfig = AgentConfig()
    replay: ReplayConfig = ReplayConfig()
    escalation: EscalationConfig = EscalationConfig()

    def __post_init__(self) -> None:
        require(self.start_step >= 0, "start_step", self.start_step, "0 or more")
        require(self.step_interval >= 1, "step_interval", self.step_interval, "1 or more")
        require(self.collect_times >= 0, "collect_times", self.collect_times, "0 or more")
        require(self.spool_mb >= 1, "spool_mb", self.spool_mb, "1 or more")
        require(min(self.module_ranks, default=0) >= 0, "module_ranks", self.module_ranks, "ranks of 0 or more")
        self._refuse_impossible_pairs()

    def _refuse_impossible_pairs(self) -> None:
        if self.forward_only and self.backward_only:
            raise ConfigError("forward_only and backward_only are both true: together they leave nothing; set one")
        for key in ("all_xy", "forward_only", "backward_only"):
            if getattr(self, key) and not self.xy_distribution:
                raise ConfigError(f"{key} is true but xy_distribution is false: set xy_distribution or remove {key}")
        if self.monitor_mbs_grad and not self.wg_distribution:
            raise ConfigError("monitor_mbs_grad is true but wg_distribution is false: set wg_distribution")


def load_config(source: str | Path | Mapping[str, Any] | None) -> tuple[MonitorConfig, tuple[str, ...]]:
    """Return the configuration of `source` and the keys that were accepted but change nothing.

    Args:
        source: Path of a `.json`, `.yaml` or `.yml` file, a mapping of the same keys, or None for the defaults.

    Raises:
        ConfigError: The file cannot be read or parsed, or a key is unknown, wrong or at odds with another.
    """
    if source is None:
        return MonitorConfig(), ()
    if isinstance(source, Mapping):
        return parse_config(source)
    path = Path(source)
    try:
        return parse_config(_read_mapping(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_config(raw: Mapping[str, Any]) -> tuple[MonitorConfig, tuple[str, ...]]:
    """Return the configuration of a mapping and its keys without effect; see `load_config`."""
    wanted = dict(raw)
    for key in NOT_AVAILABLE:
        value = wanted.pop(key, None)
        if _asks_for_something(value):
            raise ConfigError(f"{key}: found {value!r}, but this version does not have it; remove the key")
    ignored = tuple(key for key in WITHOUT_EFFECT if wanted.pop(key, None) is not None)
    if isinstance(wanted.get("targets"), Mapping):
        wanted["targets"] = list(wanted["targets"])  # msprobe's form: name -> selectors
    config = build(MonitorConfig, wanted, "")
    return config, ignored


def _asks_for_something(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value.get("enable", any(value.values())))
    return bool(value)


def _read_mapping(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read ({error}); give the path of a JSON or YAML file") from error
    try:
        if path.suffix in (".yaml", ".yml"):
            import yaml  # only users of YAML need the package in the training process

            value = yaml.safe_load(text)
        else:
            value = json.loads(text)
    except ImportError as error:
        raise ConfigError("YAML needs the package pyyaml; install it or write the file as JSON") from error
    except ValueError as error:
        raise ConfigError(f"is not valid JSON: {error}") from error
    except Exception as error:  # yaml's error tree is known only where yaml is installed
        raise ConfigError(f"is not valid YAML: {error}") from error
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"found a {type(value).__name__} at the top, expected a mapping of keys to values")
    return value
