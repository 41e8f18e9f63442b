"""What exists between `set_monitor` and `close`, whatever the framework: spool, journal, page, and the agent.

No framework is known here; a session of one adds what is hooked, and what is taken on a step.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import os
import shlex
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from trainermon.core import launcher
from trainermon.core.config import MonitorConfig, is_followed
from trainermon.core.control import Phase
from trainermon.core.environment.code import failure_text
from trainermon.core.events import DetachedEvent, FailedEvent
from trainermon.core.topology import RunIdentity
from trainermon.core.values import Coordinates, Kind
from trainermon.hooks.containment import PlainFaultGuard
from trainermon.monitor.api_format import metrics_of
from trainermon.monitor.session.agent_process import JOURNAL_BYTES_PER_ROW, AgentProcess
from trainermon.monitor.session.phases import StepPhases
from trainermon.monitor.session.rank_spool import RankSpool, spool_of_run
from trainermon.monitor.session.reconfigure import LiveReconfiguration
from trainermon.monitor.session.run_files import DescribedTraining, MadePlaces, write_run_files
from trainermon.monitor.session.script_values import ScriptValues

logger = logging.getLogger("trainermon")

MAX_TRACEBACK = 16_384
LOSS_STEPS = 10
"""After so many steps the log says how a loss is recorded, if there is none."""

_PHASES: Mapping[str, Phase] = MappingProxyType(
    {"setup": Phase.SETUP, "checkpoint": Phase.CHECKPOINT, "evaluation": Phase.EVALUATION}
)

_living: weakref.WeakSet[AttachedRank] = weakref.WeakSet()


def _fall_silent_in_child() -> None:
    for attached in list(_living):
        attached.stop_in_child()


os.register_at_fork(after_in_child=_fall_silent_in_child)


class RankLoop(Protocol):
    """Interface of what runs the monitor of a rank from step to step.

    Attributes:
        collector: Rows of the open step.
        phases: What the agent is told the rank is busy with.
        values: What the script records.
    """

    collector: Any
    phases: StepPhases
    values: ScriptValues

    @property
    def step(self) -> int:
        """Number of the step that is open."""

    def start(self) -> None:
        """Attach the hooks, and prepare the first step."""

    def estimate_rows(self) -> int:
        """Return about how many rows a collected step will have."""

    def expect_micro_steps(self, number: int) -> None:
        """Set how many backwards the running step has."""

    def reconfigure(self, config: MonitorConfig) -> None:
        """Collect by `config` from the next step on."""

    def detach_taps(self) -> None:
        """Remove every hook except those around the optimizer's step."""

    def detach(self) -> None:
        """Remove every hook."""

    def close(self, *, failed: bool = False) -> None:
        """Remove every hook, and write everything that was collected."""


class AttachedRank(abc.ABC):
    """The monitor of one training on one rank, behind `TrainerMon`: files, agent, and the loop that a session brings.

    Errors are raised up to the end of `start`, never after.

    Args:
        run: The run.
        coordinates: The rank's position in the job.
        config: The configuration.
        guard: The kind of guard that contains errors of the hooks.
    """

    def __init__(
        self, run: RunIdentity, coordinates: Coordinates, config: MonitorConfig, guard: type[PlainFaultGuard]
    ) -> None:
        self.run = run
        self._pid = os.getpid()
        self._coordinates = coordinates
        self._config = config
        self._made = MadePlaces(run.directory, spool_of_run(run, config), coordinates)
        try:
            self._files = RankSpool(run, coordinates, config)
        except BaseException:  # an interrupt too leaves no empty folders; it goes on to the script
            self._made.remove()
            raise
        self._agent = AgentProcess(run, coordinates, self._files)
        self._guard = guard(self._let_go)
        self._loop: RankLoop | None = None
        self._first_step = 0
        self._reconfiguration = LiveReconfiguration(self._files.page, self._files.journal, self._reconfigure)
        self._polled_epoch = -1  # none
        self._left_out: set[str] = set()  # names that the script records, and no numbers
        # On one rank of the job; in a pipeline the loss is that of another one.
        self._is_loss_awaited = coordinates.rank == 0 and coordinates.pp_size == 1

    def start(self, *, num_micro_steps: int, step: int, config_source: object, notes: Sequence[str] = ()) -> None:
        """Attach the hooks, write the run's files, and start the agent on local rank 0.

        Args:
            num_micro_steps: Backwards per optimizer step.
            step: Number of the first step.
            config_source: What the user gave as configuration: a path or a mapping.
            notes: Sentences on keys of the configuration that have no effect, and on the model.
        """
        self._loop = self._make_loop(num_micro_steps=num_micro_steps, step=step)
        rows = self._loop.estimate_rows()
        self._loop.start()
        write_run_files(
            self.run,
            self._coordinates,
            self._config,
            self._described(),
            bytes_per_step=rows * JOURNAL_BYTES_PER_ROW,
            accelerator=self._accelerator(),
            environment=self._environment() if self._config.environment else None,
            notes=notes,
        )
        if self._coordinates.local_rank == 0:  # last: whatever can be refused is refused before a process is started
            edits = Path(config_source) if isinstance(config_source, str | Path) else None
            self._agent.start(
                self._config, rows, kernel=self._kernel(), edits=edits if is_followed(self._config) else None
            )
        self._tell_of_disk()
        self._first_step = step
        _living.add(self)

    def _tell_of_disk(self) -> None:
        """Say what a disk that hangs does, if the spool lies on one."""
        if self._files.disk:
            logger.info(
                "the spool lies on a disk (%s, %s): while that hangs, training goes on and rows wait, but a step that "
                "writes a dump hangs with it; where /dev/shm has room, let TRAINERMON_SPOOL or spool_dir name a "
                "folder in it",
                self._files.disk,
                self._files.directory,
            )

    @abc.abstractmethod
    def _make_loop(self, *, num_micro_steps: int, step: int) -> RankLoop:
        """Return what runs from step to step, with nothing attached yet."""

    @abc.abstractmethod
    def _described(self) -> DescribedTraining:
        """Return what files tell of the training."""

    @abc.abstractmethod
    def _environment(self) -> Mapping[str, Any]:
        """Return what is kept of the rank's surroundings."""

    @abc.abstractmethod
    def _accelerator(self) -> Mapping[str, Any] | None:
        """Return which accelerator this rank trains on, as `environment.accelerator` has it; None: on none."""

    @abc.abstractmethod
    def _kernel(self) -> str:
        """Return what computes the statistics, for people."""

    @abc.abstractmethod
    def _checked(self, config: MonitorConfig) -> MonitorConfig:
        """Return the configuration for this rank; raise a TrainermonError if the model does not have what it asks."""

    @abc.abstractmethod
    def _number(self, value: object) -> Any:
        """Return what can be filed of a value of the script's; raise a TypeError or ValueError if it is no number."""

    def stop_in_child(self) -> None:
        """Stop monitoring in a forked child: the run is its parent's."""
        self._guard.tripped = True

    def record(self, values: Mapping[str, Any]) -> None:
        """Record numbers of the step, those of a mapping under their own names; raises nothing.

        A value that is not a number is dropped, and logged once.
        """
        found = {name: self._number_or_none(name, value) for name, value in _flat(values)}
        numbers = {name: number for name, number in found.items() if number is not None}
        if self._loop is not None and os.getpid() == self._pid:
            self._guard.wrap(self._loop.values.record)(numbers)

    def _number_or_none(self, name: str, value: object) -> Any:
        try:
            return self._number(value)
        except (TypeError, ValueError, OverflowError) as error:
            if name not in self._left_out:
                self._left_out.add(name)
                kind = type(value).__name__
                logger.warning(
                    "record(%s=…) is left out: found %s, expected a number or a tensor (%s)", name, kind, error
                )
            return None

    def file(self, name: str, tensor: Any) -> None:
        """Record the statistics of a tensor under `name` in the step that runs; raises nothing."""
        if self._loop is not None and os.getpid() == self._pid:
            self._guard.wrap(self._loop.values.file)({name: tensor})

    def expect_micro_steps(self, number: object) -> None:
        """Set how many backwards (micro steps) the running optimizer step has, where it is not the usual number."""
        if not isinstance(number, int) or number < 1:
            logger.warning("expect_micro_steps: found %r, expected a whole number, 1 or more; it has no effect", number)
        elif self._loop is not None:
            self._loop.expect_micro_steps(number)

    def scale_found_loss(self, factor: float) -> None:
        """Multiply the losses that are found without being recorded by `factor`, see `TrainerMon.scale_found_loss`."""
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
        """Return a context in which the agent knows that this rank is busy with `name`, a checkpoint for example.

        See `TrainerMon.phase`.
        """
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
        endings: list[Callable[[], None]] = [partial(self._finish, error), self._close_files]
        if self._coordinates.local_rank == 0 and self._config.agent.start:
            endings.append(partial(self._agent.wait, self._config.agent))
        endings.append(partial(self._agent.empty_outbox, self._config.agent))
        if self._coordinates.rank == 0:
            endings.append(self._tell_place)
        for ending in endings:
            _contained(ending)

    def undo_start(self) -> None:
        """Undo a `start` that has failed: remove the hooks, and the files and folders that it has made."""
        if self._loop is not None:
            _contained(self._loop.detach)
        _contained(self._close_files)
        self._made.remove()

    def _tell_place(self) -> None:
        """Log how to look at the run, unless that is told by what has started the job."""
        if self._loop is None:
            return
        self._tell_missing_loss(self._loop.step - self._first_step, enough=1)
        if self._config.agent.start and launcher.LAUNCHER_VARIABLE not in os.environ:
            folder = shlex.quote(str(self.run.directory))
            stored = "is not stored whole yet" if self._agent.is_behind else "is stored"
            logger.info("run %s %s; to look at it: trainermon serve %s", self.run.run_id, stored, folder)

    def _tell_missing_loss(self, num_steps: int, *, enough: int = LOSS_STEPS) -> None:
        """Log once how a loss is recorded, where `enough` steps have been collected without any."""
        if not self._is_loss_awaited or num_steps < enough or self._loop is None:
            return
        keys = self._loop.collector.table.keys
        if not keys:
            return
        self._is_loss_awaited = False
        if not any(key.kind is Kind.LOSS for key in keys):
            logger.warning(
                "no loss so far: the model returns none that can be told from its other outputs, so the rules on the "
                "loss watch nothing; record it in each step with monitor.record(loss=loss)"
            )

    def _close_files(self) -> None:
        """Close the files of the spool, and release the rank's lock."""
        self._files.close()

    def _finish(self, error: BaseException | None) -> None:
        if self._loop is None:
            return
        step, raised_s = self._loop.step, time.time()
        if error is not None:
            text = failure_text(error, sys.argv[1:], os.environ)
            failed = FailedEvent(step=step, message=text[-MAX_TRACEBACK:], time_s=raised_s)
            self._files.journal.append_event(failed)
        try:
            self._loop.close(failed=error is not None)
        finally:
            self._files.page.beat(step, Phase.CLOSED if error is None else Phase.FAILED, time.time())

    def _let_go(self, message: str) -> None:
        """Detach after a fault of the monitor's own; the rank stays alive for the agent, but silent."""
        if os.getpid() != self._pid:
            return
        if self._loop is not None:
            self._loop.detach_taps()
            self._is_loss_awaited = False
            self._files.page.beat(self._loop.step, Phase.DETACHED, time.time())
        self._files.journal.append_event(DetachedEvent(message=message))

    def _has_news(self) -> bool:
        """Return whether `_between_steps` would find anything; it is memory that is looked at."""
        return (
            self._agent.is_page_awaited
            or self._agent.is_look_due
            or self._reconfiguration.has_news(self._files.page.epoch())
        )

    def _between_steps(self, step: int) -> None:
        """Look for commands; it is memory that is looked at, no file before something has come or the agent is up."""
        if self._agent.is_page_awaited:
            self._agent.tell_page(step - self._first_step)
        if self._agent.is_look_due:
            self._agent.tell_alerts()
        if self._is_loss_awaited:
            self._tell_missing_loss(step - self._first_step)
        epoch = self._files.page.epoch()
        if epoch != self._polled_epoch or self._reconfiguration.waiting:
            self._polled_epoch = epoch
            self._poll_commands(step, epoch)

    def _poll_commands(self, step: int, epoch: int) -> None:
        """Take up what has come, the control page being at another `epoch` than before, or what was to wait."""
        self._reconfiguration.poll(step, epoch)

    def _reconfigure(self, wanted: MonitorConfig) -> MonitorConfig:
        assert self._loop is not None
        before = self._config
        self._config = self._checked(wanted)
        self._loop.reconfigure(self._config)
        return before


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield values by name, those of a mapping by their names in it: `loss={"lm": …, "mtp": …}`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((str(part), one) for part, one in value.items())
        else:
            yield name, value


def _contained(ending: Callable[[], None]) -> None:
    try:
        ending()
    except Exception:  # the border to training: whatever it is, the script goes on
        logger.exception("the monitor could not close cleanly")
