"""Dumps and extra collection that a command orders, and what the journal says of them."""

from __future__ import annotations

import dataclasses

from trainermon.core.control import ControlPage
from trainermon.core.errors import DumpError
from trainermon.core.events import DumpEvent, DumpStatus
from trainermon.core.journal import JournalWriter
from trainermon.core.outbox import Parcel
from trainermon.core.values import Action, Command
from trainermon.dump.capture import ModuleCapture
from trainermon.dump.writer import DumpWriter
from trainermon.monitor.session.dump_origin import DumpOrigin

MAX_AT_ONCE = 4
"""So many dumps of one step may be ordered; each reads every tensor anew."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _ActiveOrder:
    """A command that this rank carries out, and how many bytes it may still write."""

    command: Command
    bytes_left: int

    def covers(self, step: int) -> bool:
        return self.command.first_step <= step < self.command.first_step + self.command.num_steps


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _OpenDump:
    """A dump of the step that runs."""

    order: _ActiveOrder
    parcel: Parcel
    writer: DumpWriter
    capture: ModuleCapture


class OrderedDumps:
    """Carries out, on this rank, the commands that arrive on the control page: dump, collect more, stop dumping."""

    def __init__(self, origin: DumpOrigin, journal: JournalWriter, page: ControlPage) -> None:
        self._origin = origin
        self._journal = journal
        self._page = page
        self._epoch = page.epoch()
        self._known: set[str] = set()
        self._orders: list[_ActiveOrder] = []
        self._open: list[_OpenDump] = []

    @property
    def are_any(self) -> bool:
        """Whether something is ordered for the open step or a later one."""
        return bool(self._orders or self._open)

    def collects(self, step: int) -> bool:
        """Return whether a command asks to collect `step` beside the schedule."""
        return any(order.command.action is Action.COLLECT and order.covers(step) for order in self._orders)

    def prepare(self, step: int) -> None:
        """Start to capture `step` for every dump of it that was ordered."""
        self._orders = [order for order in self._orders if step < order.command.first_step + order.command.num_steps]
        due = [order for order in self._orders if order.command.action is Action.DUMP and order.covers(step)]
        for order in due[:MAX_AT_ONCE]:
            self._start_capture(step, order)
        for order in due[MAX_AT_ONCE:]:
            self._tell_failed(
                order.command, step, f"{MAX_AT_ONCE} other dumps of this step are ordered, as many as can be"
            )

    def finish_step(self) -> None:
        """End the dumps of this step, and write what was captured."""
        finished, self._open = self._open, []
        for dump in finished:
            dump.capture.detach()
        for dump in finished:
            self._close(dump)

    def _close(self, dump: _OpenDump) -> None:
        order, parcel, writer = dump.order, dump.parcel, dump.writer
        step = writer.info.step
        try:
            written = writer.close()
        except DumpError as error:
            parcel.send()
            self._tell_failed(order.command, step, str(error))
        else:
            parcel.send()
            order.bytes_left -= written.bytes_written
            self._journal.append_event(
                DumpEvent(
                    step=step,
                    command=order.command.id,
                    status=DumpStatus.OVER_QUOTA if written.over_quota else DumpStatus.WRITTEN,
                    dump=parcel.place,
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
        elif command.scope and not self._origin.has_module(command.scope):
            self._tell_failed(command, step, f"no module of the model is named by the scope {command.scope}")
        else:
            self._orders.append(_ActiveOrder(command=command, bytes_left=command.max_bytes))

    def _start_capture(self, step: int, order: _ActiveOrder) -> None:
        command = order.command
        info = self._origin.info(command.id, step, command.reason)
        parcel = self._origin.parcel(command.id, step)
        most = self._origin.room(max(order.bytes_left, 0))
        try:
            writer = DumpWriter(parcel.content, info, task=command.task, max_bytes=most, final=parcel.final)
            writer.source = self._origin.source
        except DumpError as error:
            parcel.delete()
            self._orders.remove(order)
            self._tell_failed(command, step, str(error))
            return
        capture = ModuleCapture(
            [stage.model for stage in self._origin.stages()],
            writer,
            scope=command.scope,
            names=self._origin.names,
            gathered=not self._origin.replayable.shadowed,
        )
        capture.attach()
        self._open.append(_OpenDump(order=order, parcel=parcel, writer=writer, capture=capture))

    def _tell_failed(self, command: Command, step: int | None, reason: str) -> None:
        event = DumpEvent(step=step, command=command.id, status=DumpStatus.FAILED, reason=reason)
        self._journal.append_event(event)
