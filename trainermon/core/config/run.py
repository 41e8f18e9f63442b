"""What the ranks of a run tell the agent of their node."""

from __future__ import annotations

import dataclasses

from trainermon.core.config.outputs import OutputConfig
from trainermon.core.config.schema import AgentConfig, AlertConfig, EscalationConfig, HangConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What a run is, and what its configuration asks of the agent. Every path is absolute.

    Attributes:
        run_id: Name of the run.
        output: The run directory, `<output root>/<run_id>`; may be on a cluster file system.
        rules: File of alert rules, or None for the built-in ones.
        agent: Where it listens, and for how long it waits.
        escalation: What alerts may order.
        outputs: In which further forms the run is written.
        alert: Rules of msprobe's monitor that are evaluated too.
        hang: When a rank is taken for hung, and how it may be looked into.
        watches_all_parameters: No parameter is left out by `targets`, so norms of gradients can be compared.
        world_size: Ranks of the job.
        config_file: File whose edits are brought to the ranks, or None.
        config_mtime_ns: Its time of modification when the ranks read it.
    """

    run_id: str
    output: str
    rules: str | None = None
    agent: AgentConfig = dataclasses.field(default_factory=AgentConfig)
    escalation: EscalationConfig = dataclasses.field(default_factory=EscalationConfig)
    outputs: OutputConfig = dataclasses.field(default_factory=OutputConfig)
    alert: AlertConfig = dataclasses.field(default_factory=AlertConfig)
    hang: HangConfig = dataclasses.field(default_factory=HangConfig)
    watches_all_parameters: bool = True
    world_size: int = 1
    config_file: str | None = None
    config_mtime_ns: int = 0
