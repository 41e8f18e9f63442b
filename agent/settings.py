"""What the agent of one run on one node is told: `agent.json` in the spool, read strictly, then frozen.

Local rank 0 writes the file before it starts the agent. Both come from one installation, so a key that is unknown or
has the wrong type is a version mix or a slip of the hand, and is refused with its path instead of being passed over.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from trainermon.alerts.escalation import EscalationSettings
from trainermon.monitor.errors import ConfigError

SETTINGS_FILE = "agent.json"
MIB = 1 << 20

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetentionSettings:
    """How much of the run stays in full detail.

    Attributes:
        max_bytes: Bytes of segments on this node above which old ones are merged over steps.
        full_detail_hours: Age up to which segments are left as they are.
    """

    max_bytes: int = 50 * 1024 * MIB
    full_detail_hours: float = 24.0

    def __post_init__(self) -> None:
        _require(self.max_bytes >= 0, "retention.max_bytes", self.max_bytes, "0 or more")
        _require(self.full_detail_hours >= 0, "retention.full_detail_hours", self.full_detail_hours, "0 or more")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Everything the agent is told.

    Attributes:
        run_id: Name of the run.
        output: The run directory, `<output root>/<run_id>`, absolute; may be on a cluster file system.
        rules: File of alert rules, or None for the built-in ones.
        host: Address to listen on.
        port: Port to listen on; 0 lets the system choose.
        allowed_hosts: Further names under which the page may be asked for (the `Host` header), without port.
        linger_s: Seconds to wait for a restarted job after the last rank has gone.
        flush_s: Longest time in seconds between two commits.
        flush_bytes: Bytes of journal after which a commit is due earlier.
        escalation: What alerts may order.
        retention: How much stays in full detail.
        series_budget: Most series in `/metrics`, or None for the built-in rule.
    """

    run_id: str
    output: str
    rules: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    allowed_hosts: tuple[str, ...] = ()
    linger_s: float = 60.0
    flush_s: float = 30.0
    flush_bytes: int = 32 * MIB
    escalation: EscalationSettings = dataclasses.field(default_factory=EscalationSettings)
    retention: RetentionSettings = dataclasses.field(default_factory=RetentionSettings)
    series_budget: int | None = None

    def __post_init__(self) -> None:
        _require(bool(self.run_id), "run_id", self.run_id, "a name that is not empty")
        _require(Path(self.output).is_absolute(), "output", self.output, "an absolute path")
        _require(0 <= self.port <= 65535, "port", self.port, "0 to 65535")
        _require(self.linger_s >= 0, "linger_s", self.linger_s, "a number of seconds, 0 or more")
        _require(self.flush_s > 0, "flush_s", self.flush_s, "a number of seconds above 0")
        _require(self.flush_bytes > 0, "flush_bytes", self.flush_bytes, "1 or more")

    @property
    def run_dir(self) -> Path:
        """The run directory as a path."""
        return Path(self.output)


def load_settings(spool: Path) -> AgentSettings:
    """Return the settings in `spool`.

    Raises:
        ConfigError: The file is missing, is not JSON, or has an unknown key, a wrong type or an impossible value.
    """
    path = spool / SETTINGS_FILE
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the agent's settings {path} cannot be read: {error}; local rank 0 writes them") from error
    try:
        return _build(AgentSettings, plain, "")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _build(cls: type[T], plain: Any, path: str) -> T:
    _require(isinstance(plain, Mapping), path or "the file", plain, "an object")
    hints = typing.get_type_hints(cls)
    for key in plain:
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1)
            raise ConfigError(f"unknown key {path}{key}" + (f"; did you mean {path}{near[0]}?" if near else ""))
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]  # T is always a dataclass here
    for field in fields:
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if field.name not in plain and not optional:
            raise ConfigError(f"key {path}{field.name} is missing")
    return cls(**{key: _convert(hints[key], value, f"{path}{key}") for key, value in plain.items()})


def _convert(wanted: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(wanted):
        return _build(wanted, value, f"{path}.")  # type: ignore[arg-type]  # a class, not an instance
    if isinstance(wanted, types.UnionType):
        return None if value is None else _convert(typing.get_args(wanted)[0], value, path)
    if typing.get_origin(wanted) is tuple:
        good = isinstance(value, list) and all(isinstance(item, str) for item in value)
        _require(good, path, value, "a list of texts")
        return tuple(value)
    accepted = (int, float) if wanted is float else (wanted,)
    _require(
        isinstance(value, accepted) and not isinstance(value, bool), path, value, f"a value of type {wanted.__name__}"
    )
    return wanted(value)


def _require(condition: bool, path: str, found: Any, expected: str) -> None:  # noqa: FBT001 - an assertion's shape
    if not condition:
        raise ConfigError(f"{path}: found {found!r}, expected {expected}")
