"""What the agent of one run on one node is told: `agent.json` in the spool, read strictly, then frozen.

Local rank 0 writes the file before it starts the agent. Both come from one installation, so a key that is unknown or
has the wrong type is a version mix or a slip of the hand, and is refused with its path instead of being passed over.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from trainermon.agent.lifecycle.lock import SETTINGS_FILE
from trainermon.agent.web.access import AccessSettings
from trainermon.alerts.escalation import EscalationSettings
from trainermon.core.config import HangConfig
from trainermon.core.errors import ConfigError
from trainermon.core.strict import build, require
from trainermon.exporters.export import OutputSettings
from trainermon.exporters.prometheus.budget import SeriesBudget
from trainermon.msprobe.anomalies import AnomalySettings

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
class AgentSettings:
    """The settings of the agent of one run on one node.

    Attributes:
        run_id: Name of the run.
        output: The run directory, `<output root>/<run_id>`, absolute; may be on a cluster file system.
        rules: File of alert rules, or None for the built-in ones.
        host: Address to listen on.
        port: Port to listen on; 0 lets the system choose.
        allowed_hosts: Further names under which the page may be asked for (the `Host` header), without port.
        access: Who may read and order, and the certificate.
        linger_s: Seconds to wait for a restarted job after the last rank has gone.
        flush_s: Longest time in seconds between two commits.
        flush_bytes: Bytes of journal after which a commit is due earlier.
        escalation: What alerts may order.
        retention: How much stays in full detail.
        outputs: In which further forms the run is written.
        anomalies: Rules of msprobe's monitor that are evaluated too.
        hang: When a rank is taken for hung, and how it may be looked into.
        series_budget: Most series in `/metrics`, or None for the built-in rule.
        watches_all_parameters: No parameter is left out by `targets`, so norms of gradients can be compared.
        world_size: Ranks of the job.
        config_file: File whose edits are brought to the ranks, or None.
        config_mtime_ns: Its time of modification when the ranks read it.
    """

    run_id: str
    output: str
    rules: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    allowed_hosts: tuple[str, ...] = ()
    access: AccessSettings = dataclasses.field(default_factory=AccessSettings)
    linger_s: float = 60.0
    flush_s: float = 30.0
    flush_bytes: int = 8 * MIB
    escalation: EscalationSettings = dataclasses.field(default_factory=EscalationSettings)
    retention: RetentionSettings = dataclasses.field(default_factory=RetentionSettings)
    outputs: OutputSettings = dataclasses.field(default_factory=OutputSettings)
    anomalies: AnomalySettings = dataclasses.field(default_factory=AnomalySettings)
    hang: HangConfig = dataclasses.field(default_factory=HangConfig)
    series_budget: int | None = None
    watches_all_parameters: bool = True
    world_size: int = 1
    config_file: str | None = None
    config_mtime_ns: int = 0

    def __post_init__(self) -> None:
        require(bool(self.run_id), "run_id", self.run_id, "a name that is not empty")
        require(Path(self.output).is_absolute(), "output", self.output, "an absolute path")
        require(0 <= self.port <= 65535, "port", self.port, "0 to 65535")
        require(self.linger_s >= 0, "linger_s", self.linger_s, "a number of seconds, 0 or more")
        require(self.flush_s > 0, "flush_s", self.flush_s, "a number of seconds above 0")
        require(self.flush_bytes > 0, "flush_bytes", self.flush_bytes, "1 or more")

    @property
    def run_dir(self) -> Path:
        """The run directory as a path."""
        return Path(self.output)

    @property
    def budget(self) -> SeriesBudget:
        """How many series a rank may have in `/metrics` and in whatever else has a limited number."""
        return SeriesBudget() if self.series_budget is None else SeriesBudget(per_node=self.series_budget)


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
        require(isinstance(plain, Mapping), "the file", plain, "an object")
        return build(AgentSettings, plain)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
