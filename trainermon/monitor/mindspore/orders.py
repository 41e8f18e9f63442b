"""What a command asks of a rank of MindSpore: that more steps are collected, or that steps are dumped."""

from __future__ import annotations

import dataclasses

from trainermon.core.control import ControlPage
from trainermon.core.errors import DumpError
from trainermon.core.events import DumpEvent, DumpStatus
from trainermon.core.journal import JournalWriter
from trainermon.core.values import Action, Command
from trainermon.dump.mindspore.debugger import NO_CALLS_NOTE
from trainermon.monitor.mindspore.dumps import CellDump, CellDumpOrigin, failed

MAX_AT_ONCE = 4
"""So many dumps of one step may be ordered; each reads every tensor anew."""


@dataclasses.dataclass(slots=True)
class _CellOrder:
    """A command that this rank carries out, and how many bytes it may still write."""

    command: Command
    bytes_left: int

    def covers(self, step: int) -> bool:
        return self.command.first_step <= step and not self.is_over(step)

    def is_over(self, step: int) -> bool:
        return step >= self.command.first_step + self.command.num_steps


class CellOrders:
    """Carries out the commands that arrive on the control page: collect more, dump, take back what was ordered.

    Args:
        origin: What dumps say of themselves, and where they go.
        page: Where commands arrive.
        journal: Where it is told what became of them.

    Attributes:
        are_compiled: Whether steps are compiled, so that nothing can be dumped of them.
    """

    def __init__(self, origin: CellDumpOrigin, page: ControlPage, journal: JournalWriter) -> None:
        self.are_compiled = False
        self._origin = origin
        self._page = page
        self._journal = journal
        self._epoch = page.epoch()
        self._known: set[str] = set()
        self._orders: list[_CellOrder] = []
        self._open: list[tuple[_CellOrder, CellDump]] = []

    @property
    def are_any(self) -> bool:
        """Whether something is ordered for the open step or a later one."""
        return bool(self._orders or self._open)

    def collects(self, step: int) -> bool:
        """Return whether a command asks to collect `step` beside the schedule."""
        return any(order.command.action is Action.COLLECT and order.covers(step) for order in self._orders)

    def poll(self, step: int) -> None:
        """Read new commands, if any has come; `step` is the next one to begin."""
        epoch = self._page.epoch()
        if epoch == self._epoch:
            return
        self._epoch = epoch
        for command in self._page.read_commands():
            if command.id not in self._known:
                self._known.add(command.id)
                self._take_up(command, step)

    def prepare(self, step: int) -> None:
        """Start to capture `step`, which begins, for every dump of it that was ordered."""
        self._orders = [order for order in self._orders if not order.is_over(step)]
        due = [order for order in self._orders if order.command.action is Action.DUMP and order.covers(step)]
        for order in due[:MAX_AT_ONCE]:
            self._start(order, step)
        for order in due[MAX_AT_ONCE:]:
            reason = f"{MAX_AT_ONCE} other dumps of this step are ordered, as many as can be"
            self._journal.append_event(failed(order.command, step, reason))

    def finish_step(self) -> None:
        """End the dumps of the step that has ended, and write what was captured."""
        finished, self._open = self._open, []
        for _, dump in finished:
            dump.detach()
        for order, dump in finished:
            order.bytes_left -= dump.close(self._journal)

    def stop_in_child(self) -> None:
        """Leave open dumps to the process that this one was forked from."""
        for _, dump in self._open:
            dump.stop_in_child()

    def _take_up(self, command: Command, step: int) -> None:
        if command.action is Action.CONFIGURE:
            return
        if command.action is Action.STOP:
            self._orders.clear()
        elif command.first_step < step:
            self._journal.append_event(DumpEvent(step=step, command=command.id, status=DumpStatus.LATE))
        elif not self._origin.has_cell(command):
            reason = f"no cell of the model is named by the scope {command.scope}"
            self._journal.append_event(failed(command, step, reason))
        else:
            self._orders.append(_CellOrder(command, command.max_bytes))

    def _start(self, order: _CellOrder, step: int) -> None:
        try:
            dump = self._dump(order, step)
        except DumpError as error:
            self._orders.remove(order)
            self._journal.append_event(failed(order.command, step, str(error)))
        else:
            self._open.append((order, dump))

    def _dump(self, order: _CellOrder, step: int) -> CellDump:
        if self.are_compiled:
            raise DumpError(NO_CALLS_NOTE)
        return CellDump(self._origin, order.command, step, max(order.bytes_left, 0))
