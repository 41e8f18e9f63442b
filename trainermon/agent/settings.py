"""What the agent of one run on one node is told: `agent.json` in the spool, read strictly, then frozen.

Local rank 0 writes the file before it starts the agent. Both come from one installation, so a key that is unknown or
has the wrong type is a version mix or a slip of the hand, and is refused with its path instead of being passed over.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainermon.agent.lifecycle.lock import SETTINGS_FILE
from trainermon.agent.web.access import AccessSettings
from trainermon.core.config import RunSettings
from trainermon.core.errors import ConfigError
from trainermon.core.strict import build, require
from trainermon.exporters.prometheus.budget import SeriesBudget

MIB = 1 << 20


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
        require(self.max_bytes >= 0, "retention.max_bytes", self.max_bytes, "0 or more")
        require(self.full_detail_hours >= 0, "retention.full_detail_hours", self.full_detail_hours, "0 or more")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings(RunSettings):
    """The settings of the agent of one run on one node: those of the run, and those of its surroundings.

    Attributes:
        allowed_hosts: Further names under which the page may be asked for (the `Host` header), without port.
        access: Who may read and order, and the certificate.
        flush_bytes: Bytes of journal after which a commit is due earlier.
        retention: How much stays in full detail.
        series_budget: Most series in `/metrics`, or None for the built-in rule.
    """

    allowed_hosts: tuple[str, ...] = ()
    access: AccessSettings = dataclasses.field(default_factory=AccessSettings)
    flush_bytes: int = 8 * MIB
    retention: RetentionSettings = dataclasses.field(default_factory=RetentionSettings)
    series_budget: int | None = None

    def __post_init__(self) -> None:
        require(bool(self.run_id), "run_id", self.run_id, "a name that is not empty")
        require(Path(self.output).is_absolute(), "output", self.output, "an absolute path")
        require(self.flush_bytes > 0, "flush_bytes", self.flush_bytes, "1 or more")

    @property
    def run_dir(self) -> Path:
        """The run directory as a path."""
        return Path(self.output)

    @property
    def budget(self) -> SeriesBudget:
        """The largest number of series of a rank in `/metrics`, and in other outputs that limit it."""
        return SeriesBudget() if self.series_budget is None else SeriesBudget(per_node=self.series_budget)


def load_settings(spool: Path) -> AgentSettings:
    """Read the agent's settings from the file `agent.json` in the spool.

    Raises:
        ConfigError: The file is missing, is not JSON, or has an unknown key, a wrong type or an impossible value.
    """
    path = spool / SETTINGS_FILE
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the agent's settings {path} cannot be read: {error}; local rank 0 writes them") from error
    try:
        require(isinstance(plain, Mapping), "the file", plain, "an object")
        return build(AgentSettings, _renewed(plain))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _renewed(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `plain` by the keys of today: the rank may be of version 0.1.0, which wrote some of them otherwise."""
    match plain:
        case {"host": host, "port": port, "linger_s": linger_s, "flush_s": flush_s, **others}:
            agent = {"host": host, "port": port, "linger_s": linger_s, "flush_s": flush_s}
            return _renewed({**others, "agent": agent})
        case {"anomalies": {"rules": [*rules], "dump": dump}, **others}:
            names = [{"rule_name": rule["rule_name"], "args": {"threshold": rule["threshold"]}} for rule in rules]
            return _renewed({**others, "alert": {"rules": names, "dump": dump}})
        case {"escalation": {"max_bytes": int(max_bytes), **limits}, **others}:
            return {**others, "escalation": {**limits, "max_dump_mb": max_bytes / MIB}}
    return plain
