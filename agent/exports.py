"""Hands every block to the exporters that the run asked for, each in a thread of its own.

An exporter that raises, hangs or is too slow costs its own output and nothing else: what it fails at is counted and
logged, what waits for it is bounded. Before a commit the store waits a moment for the exporters, so that a killed agent
usually finds in the journals whatever they had not written yet.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

from trainermon.agent.anomalies import AnomalyFiles
from trainermon.agent.pipeline import Consumer
from trainermon.agent.settings import AgentSettings
from trainermon.exporters.export import IN_PROCESS, Exporter, ExportSettings, make_exporter
from trainermon.monitor.errors import TrainermonError
from trainermon.monitor.journal import Header
from trainermon.monitor.values import SeriesKey, StatBlock

MAX_WAITING_BYTES = 64 << 20
DRAIN_LIMIT_S = 5.0
CLOSE_LIMIT_S = 2.0

_log = logging.getLogger(__name__)


class Exports(Consumer):
    """All exporters of an agent.

    Args:
        exporters: By name; each is made and used in its own thread from now on.
    """

    def __init__(self, exporters: Mapping[str, Exporter]) -> None:
        self.workers = tuple(_Worker(name, exporter) for name, exporter in exporters.items())
        self._is_late = False

    @property
    def num_errors(self) -> int:
        """Calls of exporters that have failed."""
        return sum(worker.num_errors for worker in self.workers)

    @property
    def num_dropped(self) -> int:
        """Blocks that were not handed to an exporter, because too much waited for it."""
        return sum(worker.num_dropped for worker in self.workers)

    def on_block(self, header: Header, keys: Sequence[SeriesKey], block: StatBlock) -> None:
        """Queue the block for every exporter."""
        del keys
        for worker in self.workers:
            worker.put(header, block)

    def drain(self, limit_s: float = DRAIN_LIMIT_S) -> bool:
        """Wait until everything queued is written and flushed; return whether it is. Any thread may call it.

        After it was in vain once, it waits no more until the exporters have caught up.
        """
        deadline = time.monotonic() + (0.0 if self._is_late else limit_s)
        drained = all(worker.drain(deadline) for worker in self.workers)
        if not drained and not self._is_late:
            _log.warning("exporters do not keep up; the store does not wait for them")
        self._is_late = not drained
        return drained

    def close(self, limit_s: float = CLOSE_LIMIT_S) -> None:
        """End the threads once they have written what is queued; one that hangs is left behind after `limit_s`."""
        deadline = time.monotonic() + limit_s
        for worker in self.workers:
            worker.end(deadline)


class _Worker:
    """One exporter and its thread.

    The thread is a daemon: an exporter that hangs for ever must not keep the process from ending.
    """

    def __init__(self, name: str, exporter: Exporter) -> None:
        self.num_errors = self.num_dropped = 0
        self._name = name
        self._exporter = exporter
        self._waiting: deque[tuple[Header, StatBlock]] = deque()
        self._waiting_bytes = self._num_put = self._num_done = 0
        self._is_ending = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"export-{name}", daemon=True)
        self._thread.start()

    def put(self, header: Header, block: StatBlock) -> None:
        """Queue a block, unless too much waits already."""
        with self._changed:
            if self._waiting_bytes > MAX_WAITING_BYTES:
                self.num_dropped += 1
                if self.num_dropped.bit_count() == 1:
                    _log.warning("export %s is too slow: %d steps were left out", self._name, self.num_dropped)
                return
            self._waiting.append((header, block))
            self._waiting_bytes += _size(block)
            self._num_put += 1
            self._changed.notify_all()

    def drain(self, deadline: float) -> bool:
        """Wait until everything that was queued by now is written and flushed; return whether that is so."""
        with self._changed:
            target = self._num_put
            return self._changed.wait_for(
                lambda: self._num_done >= target, timeout=max(0.0, deadline - time.monotonic())
            )

    def end(self, deadline: float) -> None:
        """Let the thread end once it has written what is queued, and wait for it."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        self._thread.join(timeout=max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            _log.warning("export %s hangs and is left behind", self._name)

    def _run(self) -> None:
        while taken := self._take():
            for header, block in taken:
                self._call("write", header, block)
            self._call("flush")
            with self._changed:
                self._num_done += len(taken)
                self._changed.notify_all()
        self._call("close")

    def _take(self) -> list[tuple[Header, StatBlock]]:
        """Wait for blocks and return all of them; none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_ending)
            taken = list(self._waiting)
            self._waiting.clear()
            self._waiting_bytes = 0
            return taken

    def _call(self, method: str, *arguments: object) -> None:
        try:
            getattr(self._exporter, method)(*arguments)
        except Exception:  # noqa: BLE001  (the border: whatever an exporter does, the agent and the others go on)
            self.num_errors += 1
            if self.num_errors.bit_count() == 1:  # 1st, 2nd, 4th …
                _log.exception("export %s failed to %s (failure %d)", self._name, method, self.num_errors)


def make_exports(settings: AgentSettings) -> Exports:
    """Return the exporters that `settings` names; one that cannot be made is left out, and the log says why."""
    outputs = settings.outputs
    told = ExportSettings(
        run_dir=settings.run_dir,
        ops=outputs.ops,
        ndigits=outputs.ndigits,
        step_count_per_record=outputs.step_count_per_record,
        append_output=outputs.append_output,
    )
    exporters: dict[str, Exporter] = {}
    if settings.anomalies.dump and settings.anomalies.rules:
        exporters["anomalies"] = AnomalyFiles(settings.anomalies, settings.run_dir)
    for name in outputs.format:
        if name in IN_PROCESS or name in exporters:
            continue
        try:
            exporters[name] = make_exporter(name, told)
        except TrainermonError as error:
            _log.error("%s", error)
        except Exception:  # noqa: BLE001  (the border, as above)
            _log.exception("format %r cannot be written", name)
    return Exports(exporters)


def _size(block: StatBlock) -> int:
    return memoryview(block.values).nbytes + memoryview(block.series).nbytes
