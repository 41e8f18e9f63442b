"""Keeps the process of the exporters running, and knows what it says of itself.

Nothing that an exporter does, and nothing that it waits for, reaches the agent: `trainermon.agent.export_process`
follows the store beside it. What is not exported when the run is over stays in the store, for `trainermon export`.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from trainermon.agent.export_process import ExportReport, makers_of
from trainermon.agent.settings import AgentSettings

MODULE = "trainermon.agent.export_process"
RETRY_S = 5.0
CLOSE_LIMIT_S = 300.0  # as long as it gets something done; it gives up by itself
WAITING = "trainermon_export_waiting_bytes"

_log = logging.getLogger(__name__)


class ExportProcess:
    """Runs all exporters of an agent in a process of their own, and starts it again when it dies.

    No exporters, no process.

    Args:
        spool: Where the agent's settings are.
        settings: The same settings, read.
        node_dir: The agent's own folder in the run directory.
    """

    def __init__(self, spool: Path, settings: AgentSettings, node_dir: Path) -> None:
        self._command = [sys.executable, "-m", MODULE, str(spool), str(node_dir)]
        self._run = settings.run_id
        self._counts: Mapping[str, Mapping[str, float]] = {}
        self._num_deaths = 0
        self._is_closing = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._keep_running, name="exports", daemon=True)
        if makers_of(settings, node_dir):
            self._thread.start()

    @property
    def num_errors(self) -> int:
        """How many calls of exporters have failed, and how often their process has died."""
        return self._num_deaths + self._sum("trainermon_export_errors_total")

    @property
    def num_dropped(self) -> int:
        """Number of steps of single ranks that exporters failed at and left out, since their process started."""
        return self._sum("trainermon_export_dropped_steps_total")

    def metrics(self) -> Mapping[str, Mapping[str, float]]:
        """Return what each exporter had done a second ago: by name of exporter, then by name of metric."""
        return self._counts

    def close(self, limit_s: float = CLOSE_LIMIT_S) -> None:
        """Wait until everything committed is exported or given up, and log what is missing."""
        if not self._thread.is_alive():
            return
        with self._lock:
            self._is_closing.set()
            process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()
        self._thread.join(timeout=limit_s)
        if self._thread.is_alive() and process is not None:
            process.kill()
            self._thread.join(timeout=RETRY_S)
        for name, counts in self._counts.items():
            if counts.get(WAITING):
                message = "export %s: %.1f MB of the store are not written; `trainermon export %s` writes them"
                _log.warning(message, name, counts[WAITING] / 1e6, self._run)

    def _sum(self, metric: str) -> int:
        return int(sum(counts.get(metric, 0) for counts in self._counts.values()))

    def _keep_running(self) -> None:
        while not self._is_closing.is_set():
            try:
                status = self._run_once()
            except OSError as error:
                status = str(error)
            if not self._is_closing.is_set():
                self._num_deaths += 1
                _log.error("the process of the exporters ended (%s); it is started again", status)
                self._is_closing.wait(RETRY_S)

    def _run_once(self) -> str:
        """Run the process until it ends, and return how."""
        with self._lock:
            if self._is_closing.is_set():
                return "not started"
            pipe = subprocess.PIPE
            process = self._process = subprocess.Popen(  # noqa: S603  (our own module)
                self._command, stdin=pipe, stdout=pipe, text=True
            )
        assert process.stdout is not None
        with process:
            for line in process.stdout:
                self._hear(line)
        return f"status {process.returncode}"

    def _hear(self, line: str) -> None:
        try:
            report = ExportReport(**json.loads(line))
        except (ValueError, TypeError):  # what a library printed
            _log.info("exporters: %s", line.rstrip())
            return
        if report.message:
            _log.log(report.level, "%s", report.message)
        else:
            self._counts = report.counts
