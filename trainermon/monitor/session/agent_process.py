"""The node's agent, as its first rank sees it: started at the beginning, waited for at the end."""

from __future__ import annotations

import json
import logging
import math
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainermon.core import launcher
from trainermon.core.config import AgentConfig, MonitorConfig, is_waiting
from trainermon.core.topology import RunIdentity
from trainermon.core.values import STATISTICS, Coordinates
from trainermon.monitor.session.rank_spool import RankSpool
from trainermon.monitor.session.run_files import write_agent_settings

logger = logging.getLogger("trainermon")

PAGE_WAIT_S = 3.0
PAGE_STEPS = 10
PAGE_LIMIT_S = 60.0
"""After so many steps and seconds, whichever is later, the log says where the page will be; no more until the end."""
POLL_S = 0.02
ALERTS_S = 5.0
"""So often rank 0 looks between two steps whether alerts have fired."""
JOURNAL_BYTES_PER_ROW = 8 * len(STATISTICS) + 4
STORED_BYTES_PER_ROW = 20


class AgentProcess:
    """Starts, from a rank, the node's agent, which reads this rank's files; at the end waits for it a bounded time.

    Args:
        run: The run.
        coordinates: The rank's position in the job.
        files: The rank's journal and control page.

    Attributes:
        is_page_awaited: Whether the address of the page is still looked for between steps.
        is_behind: Whether the agent had not stored everything when it was no longer waited for.
    """

    def __init__(self, run: RunIdentity, coordinates: Coordinates, files: RankSpool) -> None:
        self._run = run
        self._coordinates = coordinates
        self._files = files
        self.is_page_awaited = self.is_behind = False
        self._is_page_told = False
        self._next_look_s = math.inf
        self._alerts_told: set[tuple[Any, ...]] = set()
        self._started_at = time.monotonic()

    def start(self, config: MonitorConfig, rows: int, *, kernel: str, edits: Path | None) -> None:
        """Write the agent's settings, start it if `config` says so, and log the address of its page.

        Args:
            config: The run's configuration.
            rows: About how many rows a step has.
            kernel: What computes the statistics.
            edits: The configuration file that the agent watches for edits; None: none.
        """
        write_agent_settings(self._files.directory, self._run, config, self._coordinates, edits=edits)
        if config.rules:
            launcher.check_rules(Path(config.rules))
        logger.info("run %s (attempt %d) in %s", self._run.run_id, self._run.attempt, self._run.directory)
        logger.info(
            "collects about %d rows a step%s: %.1f kB journal, %.1f kB stored (kernel: %s)",
            rows,
            _not_estimated(config),
            rows * JOURNAL_BYTES_PER_ROW / 1e3,
            rows * STORED_BYTES_PER_ROW / 1e3,
            kernel,
        )
        if is_waiting(config):
            logger.info("DYNAMIC_MONITOR is set: nothing is collected until the configuration says dynamic_on: true")
        if not config.agent.start:
            return
        launcher.start_agent(self._files.directory)
        self._started_at = time.monotonic()
        if self._coordinates.rank == 0:
            self._next_look_s = self._started_at + ALERTS_S
        if not self._tells_page(PAGE_WAIT_S):
            self.is_page_awaited = True
            logger.info("the agent is not up after %.0f s; the address of its page follows", PAGE_WAIT_S)

    def tell_page(self, num_steps: int) -> None:
        """Log the address of the page if the agent has one by now, `num_steps` after the start.

        If not, and that is `PAGE_STEPS` and `PAGE_LIMIT_S` ago, log where to look for it. Reads a small file on this
        node. `is_page_awaited` says whether there is still something to tell.
        """
        is_last = num_steps >= PAGE_STEPS and time.monotonic() >= self._started_at + PAGE_LIMIT_S
        is_told = self._tells_page(0.0)
        self.is_page_awaited = not (is_told or is_last)
        if is_last and not is_told:
            log = self._run.directory / "nodes" / "*" / "agent.log"
            logger.warning("the agent has no page yet; %s says why, and later where it is: grep page", log)

    @property
    def is_look_due(self) -> bool:
        """Whether it is time for `tell_alerts`."""
        return time.monotonic() >= self._next_look_s

    def tell_alerts(self) -> None:
        """Log the alerts that have fired on this node in this attempt, each once. Reads a small file on this node."""
        self._next_look_s = time.monotonic() + ALERTS_S
        self._log_alerts(self._wait_for_status(bool, 0.0) or {})

    def _log_alerts(self, status: Mapping[str, Any]) -> None:
        for attempt, *key, severity, message in status.get("alerts", ()):
            if attempt != self._run.attempt or tuple(key) in self._alerts_told:
                continue
            self._alerts_told.add(tuple(key))
            why = f"why: trainermon diagnose {shlex.quote(str(self._run.directory))}"
            page = f"page {status['url']}; " if status.get("url") else ""
            logger.log(logging.INFO if severity == "info" else logging.WARNING, "%s (%s%s)", message, page, why)

    def wait(self, config: AgentConfig) -> None:
        """Wait until the agent has stored everything that this rank wrote, as long as `config` allows.

        `is_behind` says whether that was in vain. Logs the address of the page if that has not been told. The journal
        may be closed by then.
        """
        written = self._files.journal.cursor
        rank = str(self._coordinates.rank)
        flushed = self._wait_for_status(
            lambda status: (
                tuple(status.get("flushed", {}).get(rank, (0, 0))) >= (written.file, written.offset)
                and self._files.outbox.is_empty()
            ),
            config.wait_s,
        )
        self.is_behind = flushed is None
        if self.is_behind:
            logger.warning(
                "the agent has not stored everything within %.0f s; it goes on by itself, see %s",
                config.wait_s,
                self._run.directory,
            )
        if not self._is_page_told:
            self._tells_page(0.0)
        if self._next_look_s < math.inf:
            self._log_alerts(flushed or self._wait_for_status(bool, 0.0) or {})

    def empty_outbox(self, config: AgentConfig) -> None:
        """Move the dumps that no agent has delivered to the run directory.

        A process of its own does it, which a slow file system cannot hold up.
        """
        if self._files.outbox.is_empty() or (config.start and self._coordinates.local_rank):
            return
        if not launcher.deliver(self._files.directory, self._run.directory, config.wait_s):
            logger.warning(
                "not all dumps are in %s after %.0f s; the rest is in %s, from where the next agent takes it",
                self._run.directory,
                config.wait_s,
                self._files.directory,
            )

    def _tells_page(self, limit_s: float) -> bool:
        """Log the address of the page if the agent has one within `limit_s`; return whether it has."""
        status = self._wait_for_status(lambda status: bool(status.get("url")), limit_s)
        if status:
            logger.info("page %s  metrics %s/metrics", *[status["url"].rstrip("/")] * 2)
            self._is_page_told = True
        return self._is_page_told

    def _wait_for_status(self, wanted: Callable[[dict[str, Any]], bool], limit_s: float) -> dict[str, Any] | None:
        path = self._files.directory / launcher.STATUS_FILE
        deadline = time.monotonic() + limit_s
        while True:
            try:
                status: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
                if wanted(status):
                    return status
            except (OSError, ValueError):
                if not self._files.directory.exists():  # the agent has stored everything and removed the spool
                    return {}
            if time.monotonic() >= deadline:
                return None
            time.sleep(POLL_S)


def _not_estimated(config: MonitorConfig) -> str:
    more = {"collectives": config.cc_distribution.enable, "features": config.recording_l2_features}
    wanted = [name for name, is_wanted in more.items() if is_wanted]
    return f", those of {' and '.join(wanted)} not counted" if wanted else ""
