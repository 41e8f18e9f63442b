"""What exists between `set_monitor` and `close`: spool, journal, page, step loop, and the agent that follows them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

import trainermon
from trainermon.core import launcher
from trainermon.core.config import MonitorConfig, is_followed, is_waiting
from trainermon.core.control import ControlPage, Phase
from trainermon.core.events import DetachedEvent, FailedEvent
from trainermon.core.journal import Header, JournalWriter
from trainermon.core.outbox import Outbox
from trainermon.core.spool import RankLock, memory_share_bytes, open_spool
from trainermon.core.topology import RunIdentity
from trainermon.core.values import STATISTICS, Coordinates, Kind
from trainermon.hooks.guard import FaultGuard
from trainermon.monitor.session.api_format import metrics_of
from trainermon.monitor.session.checks import check_against_model
from trainermon.monitor.session.dump_origin import DumpOrigin
from trainermon.monitor.session.dumps import RankDumps
from trainermon.monitor.session.reconfigure import LiveReconfiguration
from trainermon.monitor.session.run_files import MIB, write_agent_settings, write_run_files
from trainermon.monitor.session.step_loop import RankParts, StepLoop
from trainermon.monitor.session.structure import FOLDER as STRUCTURE_FOLDER
from trainermon.monitor.session.witness import RankWitness
from trainermon.monitor.taps.training import Training
from trainermon.statistics.kernel import kernel_name

logger = logging.getLogger("trainermon")

STATUS_FILE = "agent.status.json"
PAGE_WAIT_S = 3.0
POLL_S = 0.02
JOURNAL_BYTES_PER_ROW = 8 * len(STATISTICS) + 4
STORED_BYTES_PER_ROW = 20
MAX_TRACEBACK = 16_384

_PHASES: Mapping[str, Phase] = MappingProxyType(
    {"setup": Phase.SETUP, "checkpoint": Phase.CHECKPOINT, "evaluation": Phase.EVALUATION}
)


_READABLE = (torch.strided, torch.sparse_coo)

_living: weakref.WeakSet[AttachedTraining] = weakref.WeakSet()


def _fall_silent_in_child() -> None:
    for attached in list(_living):
        attached.fall_silent()


os.register_at_fork(after_in_child=_fall_silent_in_child)


class AttachedTraining:
    """One watched training on one rank. Errors are raised up to the end of `start`, never after."""

    def __init__(
        self,
        run: RunIdentity,
        coordinates: Coordinates,
        config: MonitorConfig,
        training: Training,
        groups: Mapping[str, Any] | None = None,
    ) -> None:
        self.run = run
        self._pid = os.getpid()
        self._coordinates = coordinates
        self._config = config
        self._training = training
        self._groups = groups or {}
        self._spool = open_spool(run.run_id, Path(config.spool_dir) if config.spool_dir else None)
        self._lock = RankLock(self._spool, coordinates.rank)
        self._page = ControlPage(self._spool, coordinates.rank)
        budget = min(int(config.spool_mb * MIB), memory_share_bytes(self._spool, coordinates.local_world_size))
        self._journal = JournalWriter(self._spool, self._header(), budget_bytes=budget)
        self._outbox = Outbox(self._spool, run.directory, coordinates.rank)
        origin = DumpOrigin(run, coordinates, training, self._outbox)
        self._dumps = RankDumps(origin, journal=self._journal, page=self._page)
        self._guard = FaultGuard(self._let_go)
        self._witness = RankWitness(self._spool, coordinates.rank, config.hang, self._groups)
        self._loop: StepLoop | None = None
        self._reconfiguration = LiveReconfiguration(self._page, self._journal, self._reconfigure)

    def start(self, *, num_micro_steps: int, step: int, config_source: object, notes: Sequence[str] = ()) -> None:
        """Attach the hooks, write what others need to know, and start the agent on local rank 0.

        `notes` is what there is to say of keys of the configuration that have no effect, and of the model.
        """
        parts = RankParts(
            training=self._training,
            groups=self._groups,
            guard=self._guard,
            journal=self._journal,
            page=self._page,
            dumps=self._dumps,
            structure=partial(self._outbox.parcel, f"{STRUCTURE_FOLDER}/rank{self._coordinates.rank}"),
        )
        self._loop = StepLoop(
            parts, self._config, step=step, num_micro_steps=num_micro_steps, between_steps=self._between_steps
        )
        rows = self._loop.taps.estimate_rows()
        bytes_per_step = rows * JOURNAL_BYTES_PER_ROW
        write_run_files(
            self.run, self._coordinates, self._config, self._training, bytes_per_step=bytes_per_step, notes=notes
        )
        if self._coordinates.local_rank == 0:
            edits = Path(config_source) if isinstance(config_source, str | Path) else None
            self._start_agent(rows, edits=edits if is_followed(self._config) else None)
        self._loop.start()
        _living.add(self)

    def fall_silent(self) -> None:
        """Do nothing from now on: this is a forked child, and the run is its parent's."""
        self._guard.tripped = True
        self._witness.fall_silent()

    def record(self, values: Mapping[str, Any]) -> None:
        """File numbers of the step; contained. A value that is none is left out, and the log says so."""
        numbers = {name: number for name, value in values.items() if (number := _number(name, value)) is not None}
        if self._loop is not None and os.getpid() == self._pid:
            self._guard.wrap(self._loop.values.record)(numbers)

    def file(self, name: str, tensor: Tensor) -> None:
        """File the statistics of a tensor under the step that runs; contained."""
        if self._loop is not None and os.getpid() == self._pid:
            self._guard.wrap(self._loop.values.file)({name: tensor})

    def expect_micro_steps(self, number: object) -> None:
        """Count on `number` backwards in the step that runs."""
        if not isinstance(number, int) or number < 1:
            logger.warning("expect_micro_steps: found %r, expected a whole number, 1 or more; it has no effect", number)
        elif self._loop is not None:
            self._loop.steps.expect(number)

    def scale_found_loss(self, factor: float) -> None:
        """See `TrainerMon.scale_found_loss`."""
        if self._loop is not None:
            self._loop.values.scale_found_loss(factor)

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self._coordinates.rank

    def latest_rows(self, kind: Kind, ops: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the statistics `ops` of the series of `kind` in the newest step that has ended, by msprobe's tags.

        Waits for the device. Contained: empty after a fault, or if no step has ended.
        """
        if self._loop is None or os.getpid() != self._pid:
            return {}
        block = self._guard.wrap(self._loop.collector.flushed)()
        if block is None:
            return {}
        found = self._guard.wrap(metrics_of)(block, self._loop.collector.table, kind, self._coordinates.rank, ops)
        return found or {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See `TrainerMon.phase`."""
        phase = _PHASES.get(name)
        if phase is None:
            logger.warning("phase(%r) is left out: expected one of %s", name, ", ".join(map(repr, _PHASES)))
        if phase is None or self._loop is None or self._guard.tripped or os.getpid() != self._pid:
            yield
            return
        with self._loop.phases.marked(phase):
            yield

    def close(self, error: BaseException | None = None) -> None:
        """Take every hook away, write what is left, and wait for the agent as long as the configuration says.

        `error` is the exception that ends the script, if one does.
        """
        if os.getpid() != self._pid:
            return  # a forked child: the run is its parent's
        endings: list[Callable[[], None]] = [partial(self._finish, error), self.release]
        if self._coordinates.local_rank == 0 and self._config.agent.start:
            endings.append(self._wait_for_agent)
        endings.append(self._empty_outbox)
        for ending in endings:
            _contained(ending)

    def give_up(self) -> None:
        """Leave nothing behind of a `start` that has failed."""
        if self._loop is not None:
            _contained(self._loop.remove)
        self.release()

    def release(self) -> None:
        """Close the files of the spool, and give the rank's place free."""
        self._witness.close()
        self._journal.close()
        self._page.close()
        self._lock.close()

    def _finish(self, error: BaseException | None) -> None:
        if self._loop is None:
            return
        step = self._loop.step
        if error is not None:
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            self._journal.append_event(FailedEvent(step=step, message=text[-MAX_TRACEBACK:]))
        try:
            self._loop.finish(failed=error is not None)
        finally:
            self._page.beat(step, Phase.CLOSED if error is None else Phase.FAILED, time.time())

    def _let_go(self, message: str) -> None:
        """Detach after a fault of the monitor's own; the rank stays alive for the agent, but silent."""
        if os.getpid() != self._pid:
            return
        if self._loop is not None:
            self._loop.let_go()
            self._page.beat(self._loop.step, Phase.DETACHED, time.time())
        self._journal.append_event(DetachedEvent(message=message))

    def _header(self) -> Header:
        return Header(
            run_id=self.run.run_id,
            attempt=self.run.attempt,
            coordinates=self._coordinates,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_s=time.time(),
            version=trainermon.__version__,
            series=(),
            placements=(),
        )

    def _start_agent(self, rows: int, *, edits: Path | None) -> None:
        write_agent_settings(self._spool, self.run, self._config, self._coordinates, edits=edits)
        if self._config.rules:
            launcher.check_rules(Path(self._config.rules))
        logger.info("run %s (attempt %d) in %s", self.run.run_id, self.run.attempt, self.run.directory)
        logger.info(
            "collects about %d rows a step%s: %.1f kB journal, %.1f kB stored (kernel: %s)",
            rows,
            self._not_estimated(),
            rows * JOURNAL_BYTES_PER_ROW / 1e3,
            rows * STORED_BYTES_PER_ROW / 1e3,
            kernel_name(self._training.device),
        )
        if is_waiting(self._config):
            logger.info("DYNAMIC_MONITOR is set: nothing is collected until the configuration says dynamic_on: true")
        if not self._config.agent.start:
            return
        launcher.start_agent(self._spool)
        status = self._wait_for_status(lambda status: bool(status.get("url")), PAGE_WAIT_S)
        if status:
            logger.info("page %s  metrics %s/metrics", *[status["url"].rstrip("/")] * 2)
        else:
            log = self.run.directory / "nodes" / "*" / "agent.log"
            logger.warning(
                "the agent has not started within %.0f s; `grep page %s` tells where its page is", PAGE_WAIT_S, log
            )

    def _not_estimated(self) -> str:
        config = self._config
        more = {"collectives": config.cc_distribution.enable, "features": config.recording_l2_features}
        wanted = [name for name, is_wanted in more.items() if is_wanted]
        return f", those of {' and '.join(wanted)} not counted" if wanted else ""

    def _wait_for_agent(self) -> None:
        written = self._journal.cursor
        rank = str(self._coordinates.rank)
        flushed = self._wait_for_status(
            lambda status: (
                tuple(status.get("flushed", {}).get(rank, (0, 0))) >= (written.file, written.offset)
                and self._outbox.is_empty()
            ),
            self._config.agent.wait_s,
        )
        if flushed is None:
            logger.warning(
                "the agent has not stored everything within %.0f s; it goes on by itself, see %s",
                self._config.agent.wait_s,
                self.run.directory,
            )

    def _empty_outbox(self) -> None:
        """Have delivered what no agent has delivered, by a process that a file system may keep waiting as it likes."""
        if self._outbox.is_empty() or (self._config.agent.start and self._coordinates.local_rank):
            return
        if not launcher.deliver(self._spool, self.run.directory, self._config.agent.wait_s):
            logger.warning(
                "not all dumps are in %s after %.0f s; the rest is in %s, from where the next agent takes it",
                self.run.directory,
                self._config.agent.wait_s,
                self._spool,
            )

    def _wait_for_status(self, wanted: Callable[[dict[str, Any]], bool], limit_s: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + limit_s
        while True:
            try:
                status: dict[str, Any] = json.loads((self._spool / STATUS_FILE).read_text(encoding="utf-8"))
                if wanted(status):
                    return status
            except (OSError, ValueError):
                if not self._spool.exists():  # the agent has stored everything and removed the spool
                    return {}
            if time.monotonic() >= deadline:
                return None
            time.sleep(POLL_S)

    def _between_steps(self, step: int) -> None:
        """Look for commands; it is memory that is looked at, never a file, unless something has come."""
        self._dumps.ordered.poll_commands(step)
        self._witness.notice_groups()
        self._reconfiguration.poll(step)

    def _reconfigure(self, wanted: MonitorConfig) -> MonitorConfig:
        assert self._loop is not None
        before = self._config
        self._config = check_against_model(wanted, self._training, self._coordinates)
        self._loop.reconfigure(self._config)
        return before


def _contained(ending: Callable[[], None]) -> None:
    try:
        ending()
    except Exception:  # the border to training: whatever it is, the script goes on
        logger.exception("the monitor could not close cleanly")


def _readable(tensor: Tensor) -> Tensor:
    if tensor.device.type == "meta" or tensor.layout not in _READABLE or tensor.is_quantized or tensor.is_nested:
        raise TypeError(f"a tensor that is {tensor.layout}, {tensor.dtype}, on {tensor.device}")
    return tensor


def _number(name: str, value: object) -> Tensor | float | None:
    """Return what can be filed of a value of the script's; None for what is no number, which the log says."""
    try:
        return _readable(value) if isinstance(value, Tensor) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        logger.warning(
            "record(%s=…) is left out: found %s, expected a number or a tensor (%s)", name, type(value).__name__, error
        )
        return None
