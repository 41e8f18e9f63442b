"""Where the agent of one run and node works."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from trainermon.agent.lifecycle.process import LOG_FILE
from trainermon.exporters.export import SEGMENTS_FOLDER


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlace:
    """The folders that the agent of one run and node uses.

    Attributes:
        run_id: Of the run.
        spool: Where the ranks of this node write.
        run_dir: Where the run is kept.
        node_dir: This node's own folder in it.
    """

    run_id: str
    spool: Path
    run_dir: Path
    node_dir: Path

    @property
    def node(self) -> str:
        """Name of this node in the run directory."""
        return self.node_dir.name

    @property
    def segments(self) -> Path:
        """Folder of this node's segments."""
        return self.node_dir / SEGMENTS_FOLDER

    @property
    def log(self) -> Path:
        """Path of the agent's log."""
        return self.node_dir / LOG_FILE
