"""Dumps and extra collection that a command orders, and what the journal says of them, whatever the framework."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, TypeVar

from trainermon.core.control import ControlPage
from trainermon.core.errors import DumpError
from trainermon.core.events import DumpEvent, DumpStatus
from trainermon.core.journal import JournalWriter
from trainermon.core.outbox import Parcel
from trainermon.core.values import Action, Command, DumpTask
from trainermon.dump.files.records import DumpInfo
from trainermon.dump.writer import DumpWriter

_Writer = TypeVar("_Writer", bound=DumpWriter)

MAX_AT_ONCE = 4
"""So many dumps of one step may be ordered; each reads every tensor anew."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _ActiveOrder:
    """A command that this rank carries out, and how many bytes it may still write."""

    command: Command
    bytes_left: int

    def covers(self, step: int) -> bool:
        return self.command.first_step <= step < self.command.first_step + self.command.num_steps


class CallCapture(Protocol):
    """Interface of what records the calls of a model between its start and `detach`."""

    def detach(self) -> None:
        """Remove every hook."""

    def stop_in_child(self) -> None:
        """Stop recording in a forked child process: the files belong to the parent."""


class StartedDump:
    """A dump of the step that runs, on its way to `parcel`, of what `capture` hands to `writer`."""

    def __init__(self, parcel: Parcel, writer: DumpWriter, capture: CallCapture) -> None:
        self.parcel, self.writer, self.capture = parcel, writer, capture

    def close(self) -> DumpInfo:
        """Write what was captured, send it off, and return its final info. Detach the capture before.

        Raises:
            DumpError: It cannot be written as a whole.
        """
        try:
            return self.writer.close()
        finally:
            self.parcel.send()


def begin_writer(kind: type[_Writer], parcel: Parcel, info: DumpInfo, task: DumpTask, max_bytes: int) -> _Writer:
    """Return a new writer into `parcel`, which is deleted if that cannot be written.

    Raises:
        DumpError: It cannot.
    """
    try:
        return kind(parcel.content, info, task=task, max_bytes=max_bytes, final=parcel.final)
    except DumpError:
        parcel.delete()
        raise


class DumpMaker(Protocol):
    """Interface of what dumps the calls of a framework's modules."""

    def has_module(self, scope: Sequence[str]) -> bool:
        """Return whether any name or pattern in `scope` matches a module of the model."""

    def start(self, command: Command, step: int, max_bytes: int) -> StartedDump:
        """Start to capture `step`, of which at most `max_bytes` are written, for a command.

        Raises:
            DumpError: It cannot be captured or written; nothing is left then.
        """


class OrderedDumps:
    """Carries out, on this rank, the commands that arrive on the control page: dump, collect more, stop dumping."""

    def __init__(self, maker: DumpMaker, journal: JournalWriter, page: ControlPage) -> None:
        self._maker = maker
        self._journal = journal
        self._page = page
        self._epoch = page.epoch()
        self._known: set[str] = set()
        self._orders: list[_ActiveOrder] = []
        self._open: list[tuple[_ActiveOrder, StartedDump]] = []

    @property
    def are_any(self) -> bool:
        """Whether something is ordered for the open step or a later one."""
        return bool(self._orders or self._open)

    def collects(self, step: int) -> bool:
        """Return whether a command asks to collect `step` beside the schedule."""
        return any(order.command.action is Action.COLLECT and order.covers(step) for order in self._orders)

    def prepare(self, step: int) -> None:
        """Start to capture `step` for every dump of it that was ordered."""
        if not self._orders:
            return
        self._orders = [order for order in self._orders if step < order.command.first_step + order.command.num_steps]
        due = [order for order in self._orders if order.command.action is Action.DUMP and order.covers(step)]
        for order in due[:MAX_AT_ONCE]:
            self._start(step, order)
        for order in due[MAX_AT_ONCE:]:
            self._tell_failed(
                order.command, step, f"{MAX_AT_ONCE} other dumps of this step are ordered, as many as can be"
            )

    def finish_step(self) -> None:
        """End the dumps of this step, and write what was captured."""
        if not self._open:
            return
        finished, self._open = self._open, []
        for _, dump in finished:
            dump.capture.detach()
        for order, dump in finished:
            self._close(order, dump)

    def stop_in_child(self) -> None:
        """Leave open dumps to the process that this one was forked from."""
        for _, dump in self._open:
            dump.capture.stop_in_child()

    def _close(self, order: _ActiveOrder, dump: StartedDump) -> None:
        step = dump.writer.info.step
        try:
            written = dump.close()
        except DumpError as error:
            self._tell_failed(order.command, step, str(error))
            return
        order.bytes_left -= written.bytes_written
        self._journal.append_event(
            DumpEvent(
                step=step,
                command=order.command.id,
                status=DumpStatus.OVER_QUOTA if written.over_quota else DumpStatus.WRITTEN,
                dump=dump.parcel.place,
                bytes=written.bytes_written,
            )
        )

    def poll_commands(self, step: int, epoch: int) -> None:
        """Read new commands if the control page is at another `epoch` than before; `step` is the next one to begin."""
        if epoch == self._epoch:
            return
        self._epoch = epoch
        for command in self._page.read_commands():
            if command.id not in self._known:
                self._known.add(command.id)
                self._take_up(command, step)

    def _take_up(self, command: Command, step: int) -> None:
        if command.action is Action.CONFIGURE:
            return
        if command.action is Action.STOP:
            self._orders.clear()
        elif command.first_step < step:
            self._journal.append_event(DumpEvent(step=step, command=command.id, status=DumpStatus.LATE))
        elif command.scope and not self._maker.has_module(command.scope):
            self._tell_failed(command, step, f"no module of the model is named by the scope {command.scope}")
        else:
            self._orders.append(_ActiveOrder(command=command, bytes_left=command.max_bytes))

    def _start(self, step: int, order: _ActiveOrder) -> None:
        try:
            dump = self._maker.start(order.command, step, max(order.bytes_left, 0))
        except DumpError as error:
            self._orders.remove(order)
            self._tell_failed(order.command, step, str(error))
        else:
            self._open.append((order, dump))

    def _tell_failed(self, command: Command, step: int | None, reason: str) -> None:
        event = DumpEvent(step=step, command=command.id, status=DumpStatus.FAILED, reason=reason)
        self._journal.append_event(event)
