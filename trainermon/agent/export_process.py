"""The process in which the exporters of a run follow its store: what they do costs the agent neither time nor memory.

    python -m trainermon.agent.export_process SPOOL NODE_DIR

It goes on until its standard input ends, sends what is committed by then, and ends too. What it has to say it writes to
its standard output as lines of JSON, `ExportReport`: how much each exporter has done, and what belongs in the log.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainermon.agent.settings import AgentSettings, load_settings
from trainermon.core.errors import ConfigError, StoreError
from trainermon.exporters.export import IN_PROCESS, ExportSettings, StoreExporter
from trainermon.exporters.store.feed import StoreFeed, store_exporter
from trainermon.msprobe.anomaly_files import AnomalyFiles

LOOK_S = 0.25
"""Pause between two looks for new segments, and between two reports."""
PATIENCE_S = 10.0
"""Once the agent has gone, an exporter that gets nothing done for so long is given up; the store keeps the rest."""

PROGRESS = (
    "trainermon_exported_steps_total",
    "trainermon_exported_points_total",
    "trainermon_export_rejected_points_total",
    "trainermon_export_dropped_steps_total",
    "trainermon_export_waiting_bytes",
)
"""Of these at least one changes as long as an exporter gets something done."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """A message from the export process to the agent.

    Attributes:
        counts: By exporter and metric, what was done so far.
        level: Level of a log record; 0: it is none.
        message: Text of the log record.
    """

    counts: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    level: int = 0
    message: str = ""


class ExporterThread:
    """Runs one exporter (csv, InfluxDB, TensorBoard) in a thread of its own; counts and logs its failures.

    The thread is a daemon: an exporter that hangs for ever must not keep the process from ending.

    Args:
        name: Of the exporter.
        make: Returns the exporter; tried again while another process writes the same files (`StoreError`).
    """

    def __init__(self, name: str, make: Callable[[], StoreExporter]) -> None:
        self.name = name
        self.is_ending = threading.Event()
        self.must_stop = threading.Event()
        self._make = make
        self._exporter: StoreExporter | None = None
        self._num_errors = 0
        self._busy_s = 0.0
        self._is_kept_waiting = False
        self.thread = threading.Thread(target=self._run, name=f"export-{name}", daemon=True)
        self.thread.start()

    def counts(self) -> dict[str, float]:
        """Return what the exporter has done so far, by name of metric."""
        counts = dict(self._exporter.metrics()) if self._exporter else {}
        counts["trainermon_export_errors_total"] = self._num_errors
        counts["trainermon_export_busy_seconds_total"] = self._busy_s
        return counts

    def _run(self) -> None:
        is_last, is_possible = False, True
        while is_possible and not is_last:
            is_last = self.is_ending.wait(LOOK_S)
            is_possible = self._guarded("send", self._send)
        if self._exporter is not None:
            self._guarded("close", self._exporter.close)

    def _send(self) -> None:
        if self._exporter is None:
            try:
                self._exporter = self._make()
            except StoreError as error:  # the process of an agent that was killed may be at its last segment
                if not self._is_kept_waiting:
                    _log.warning("export %s waits: %s", self.name, error)
                self._is_kept_waiting = True
                return
        self._exporter.send(self.must_stop)

    def _guarded(self, what: str, call: Callable[[], object]) -> bool:
        """Call; return whether there is a point in calling again."""
        began_s = time.monotonic()
        try:
            call()
        except ConfigError as error:
            self._num_errors += 1
            _log.error("%s", error)
            return False
        except Exception as error:  # noqa: BLE001  (the border: whatever an exporter does, the others go on)
            self._num_errors += 1
            if self._num_errors.bit_count() == 1:  # 1st, 2nd, 4th …
                unexpected = None if isinstance(error, StoreError | OSError) else error
                message = "export %s failed to %s (failure %d): %s"
                _log.error(message, self.name, what, self._num_errors, error, exc_info=unexpected)
        finally:
            self._busy_s += time.monotonic() - began_s
        return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all exporters of a run until standard input ends and everything is sent, or given up.

    Return the exit status.
    """
    parser = argparse.ArgumentParser(description="Follow the store of a run with its exporters.")
    parser.add_argument("spool", type=Path)
    parser.add_argument("node_dir", type=Path)
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, handlers=[_ReportHandler()])
    makers = makers_of(load_settings(given.spool), given.node_dir, given.spool.absolute().parent)
    followers = [ExporterThread(name, make) for name, make in makers.items()]
    agent_is_gone = threading.Event()
    threading.Thread(target=_wait_for_end, args=(agent_is_gone,), daemon=True).start()
    while not agent_is_gone.wait(LOOK_S):
        _report(followers)
    _finish(followers)
    _report(followers)
    os._exit(0)  # a thread that hangs would be waited for by what is registered for the end of the interpreter


def makers_of(
    settings: AgentSettings, node_dir: Path, spool_dir: Path | None = None
) -> dict[str, Callable[[], StoreExporter]]:
    """Return, by name, a function that makes each exporter that `settings` name.

    `node_dir` is the agent's folder in the run directory, `spool_dir` the one that holds its spool.
    """
    told = ExportSettings(
        **settings.outputs.output_fields(),
        run_dir=settings.run_dir,
        node_dir=node_dir,
        run_id=settings.run_id,
        spool_dir=spool_dir,
        budget=settings.budget,
    )
    found: dict[str, Callable[[], StoreExporter]] = {
        name: functools.partial(store_exporter, name, told)
        for name in settings.outputs.format
        if name not in IN_PROCESS
    }
    if settings.alert.dump and settings.alert.rules:
        make = functools.partial(AnomalyFiles, settings.alert.rules, settings.outputs.ops, settings.run_dir)
        found["anomalies"] = lambda: StoreFeed("anomalies", make(), make, told)
    return found


def _wait_for_end(agent_is_gone: threading.Event) -> None:
    sys.stdin.read()
    agent_is_gone.set()


def _finish(followers: Sequence[ExporterThread]) -> None:
    """Wait until everything is sent; an exporter that gets nothing done is given up after a while."""
    for follower in followers:
        follower.is_ending.set()
    seen: Mapping[str, Mapping[str, float]] = {}
    deadline = time.monotonic() + PATIENCE_S
    while any(follower.thread.is_alive() for follower in followers) and time.monotonic() < deadline:
        time.sleep(min(LOOK_S, 0.05))
        counts = {follower.name: _progress(follower.counts()) for follower in followers}
        if counts != seen:
            seen, deadline = counts, time.monotonic() + PATIENCE_S
    for follower in followers:
        follower.must_stop.set()
    for follower in followers:
        follower.thread.join(timeout=LOOK_S)


def _progress(counts: Mapping[str, float]) -> dict[str, float]:
    return {name: counts[name] for name in PROGRESS if name in counts}


def _report(followers: Sequence[ExporterThread]) -> None:
    _say(ExportReport(counts={follower.name: follower.counts() for follower in followers}))


def _say(report: ExportReport) -> None:
    with contextlib.suppress(OSError):  # whoever started this was killed; what is committed is exported all the same
        sys.stdout.write(json.dumps(dataclasses.asdict(report)) + "\n")
        sys.stdout.flush()


class _ReportHandler(logging.Handler):
    """Sends the log to the agent, which knows where it belongs."""

    def emit(self, record: logging.LogRecord) -> None:
        _say(ExportReport(level=record.levelno, message=self.format(record)))


if __name__ == "__main__":
    raise SystemExit(main())
