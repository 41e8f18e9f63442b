"""Runs the exporters that the run asked for, each in a thread of its own.

An exporter that raises, hangs or is too slow costs its own output and nothing else: what it fails at is counted and
logged, what waits for it is bounded. Before a commit the store waits a moment for those that are handed the steps, so
that a killed agent usually finds in the journals whatever they had not written yet. Those that follow the store are
never waited for, except for a moment at the end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainermon.agent.anomalies import AnomalyFiles
from trainermon.agent.pipeline import Consumer
from trainermon.agent.settings import AgentSettings
from trainermon.exporters.budget import SeriesBudget
from trainermon.exporters.export import IN_PROCESS, Exporter, ExportSettings, StoreExporter, make_exporter
from trainermon.monitor.errors import TrainermonError
from trainermon.monitor.journal import Header
from trainermon.monitor.values import SeriesKey, StatBlock

MAX_WAITING_BYTES = 64 << 20
DRAIN_LIMIT_S = 5.0
CLOSE_LIMIT_S = 2.0
STORE_CLOSE_LIMIT_S = 10.0  # a few segments over the network, once the ranks have gone
LOOK_S = 1.0
"""Pause between two looks for new segments."""

_log = logging.getLogger(__name__)


class Exports(Consumer):
    """All exporters of an agent.

    Args:
        exporters: By name; each is made and used in its own thread from now on.
    """

    def __init__(self, exporters: Mapping[str, Exporter | StoreExporter]) -> None:
        self.workers = tuple(
            _Worker(name, exporter) for name, exporter in exporters.items() if isinstance(exporter, Exporter)
        )
        self.followers = tuple(
            _Follower(name, exporter) for name, exporter in exporters.items() if isinstance(exporter, StoreExporter)
        )
        self._is_late = False

    @property
    def num_errors(self) -> int:
        """Calls of exporters that have failed."""
        return sum(each.num_errors for each in (*self.workers, *self.followers))

    @property
    def num_dropped(self) -> int:
        """Blocks that were not handed to an exporter, because too much waited for it."""
        return sum(worker.num_dropped for worker in self.workers)

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return what each exporter has done, by its name, by names of metrics with the labels run and exporter."""
        return {each.name: each.metrics() for each in (*self.workers, *self.followers)}

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
        """End the threads once they have written what is queued; one that hangs is left behind after `limit_s`.

        Those that follow the store send what was committed; they get some seconds more, as that is over a network.
        """
        deadline = time.monotonic() + limit_s
        for worker in self.workers:
            worker.end(deadline)
        for follower in self.followers:
            follower.end(deadline + STORE_CLOSE_LIMIT_S)


class _Calls:
    """One exporter and its thread, which calls it: what fails is counted and logged, and what works is timed.

    The thread is a daemon: an exporter that hangs for ever must not keep the process from ending.
    """

    def __init__(self, name: str, exporter: Exporter | StoreExporter) -> None:
        self.name = name
        self.num_errors = 0
        self._exporter = exporter
        self._busy_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"export-{name}", daemon=True)

    def metrics(self) -> dict[str, float]:
        """Return what was done so far."""
        return {
            "trainermon_export_errors_total": self.num_errors,
            "trainermon_export_busy_seconds_total": self._busy_s,
        }

    def _run(self) -> None:
        raise NotImplementedError

    def _call(self, method: str, *arguments: object) -> None:
        began_s = time.monotonic()
        try:
            getattr(self._exporter, method)(*arguments)
        except Exception:  # noqa: BLE001  (the border: whatever an exporter does, the agent and the others go on)
            self.num_errors += 1
            if self.num_errors.bit_count() == 1:  # 1st, 2nd, 4th …
                _log.exception("export %s failed to %s (failure %d)", self.name, method, self.num_errors)
        self._busy_s += time.monotonic() - began_s


class _Worker(_Calls):
    """An exporter that is handed the steps."""

    def __init__(self, name: str, exporter: Exporter) -> None:
        super().__init__(name, exporter)
        self.num_dropped = 0
        self._waiting: deque[tuple[Header, StatBlock]] = deque()
        self._waiting_bytes = self._num_put = self._num_done = 0
        self._is_ending = False
        self._changed = threading.Condition()
        self._thread.start()

    def metrics(self) -> dict[str, float]:
        """Return what was done so far."""
        return super().metrics() | {
            "trainermon_exported_steps_total": self._num_done,
            "trainermon_export_dropped_steps_total": self.num_dropped,
        }

    def put(self, header: Header, block: StatBlock) -> None:
        """Queue a block, unless too much waits already."""
        with self._changed:
            if self._waiting_bytes > MAX_WAITING_BYTES:
                self.num_dropped += 1
                if self.num_dropped.bit_count() == 1:
                    _log.warning("export %s is too slow: %d steps were left out", self.name, self.num_dropped)
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
            _log.warning("export %s hangs and is left behind", self.name)

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


class _Follower(_Calls):
    """An exporter that follows the store."""

    def __init__(self, name: str, exporter: StoreExporter) -> None:
        super().__init__(name, exporter)
        self._follows = exporter
        self._is_ending = threading.Event()
        self._must_stop = threading.Event()
        self._thread.start()

    def metrics(self) -> dict[str, float]:
        """Return what was done so far."""
        return super().metrics() | dict(self._follows.metrics())

    def end(self, deadline: float) -> None:
        """Let the thread end once it has sent what is committed, or after `deadline`."""
        self._is_ending.set()
        self._thread.join(timeout=max(0.0, deadline - time.monotonic()))
        self._must_stop.set()
        self._thread.join(timeout=LOOK_S)
        if self._thread.is_alive():
            _log.warning("export %s has not sent everything; what is missing stays in the store", self.name)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_ending.wait(LOOK_S)
            self._call("send", self._must_stop)
        self._call("close")


def make_exports(settings: AgentSettings, node_dir: Path) -> Exports:
    """Return the exporters that `settings` names; one that cannot be made is left out, and the log says why."""
    outputs = settings.outputs
    told = ExportSettings(
        run_dir=settings.run_dir,
        ops=outputs.ops,
        ndigits=outputs.ndigits,
        step_count_per_record=outputs.step_count_per_record,
        append_output=outputs.append_output,
        run_id=settings.run_id,
        node_dir=node_dir,
        budget=series_budget(settings),
        influxdb=outputs.influxdb,
    )
    exporters: dict[str, Exporter | StoreExporter] = {}
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


def series_budget(settings: AgentSettings) -> SeriesBudget:
    """Return how many series a rank may have in `/metrics` and in whatever else has a limited number."""
    return SeriesBudget() if settings.series_budget is None else SeriesBudget(per_node=settings.series_budget)


def _size(block: StatBlock) -> int:
    return memoryview(block.values).nbytes + memoryview(block.series).nbytes
