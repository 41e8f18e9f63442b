"""What a command asks of a rank of MindSpore: more steps are collected, and dumps are refused with a reason."""

from __future__ import annotations

from trainermon.core.control import ControlPage
from trainermon.core.events import DumpEvent, DumpStatus
from trainermon.core.journal import JournalWriter
from trainermon.core.values import Action, Command

NO_DUMP = "a dump on command is made of models of torch only; PrecisionDebugger dumps those of MindSpore"


class CollectOrders:
    """Carries out the commands that arrive on the control page, as far as a session of MindSpore can."""

    def __init__(self, page: ControlPage, journal: JournalWriter) -> None:
        self._page = page
        self._journal = journal
        self._epoch = page.epoch()
        self._known: set[str] = set()
        self._orders: list[Command] = []

    def await_any(self, step: int) -> bool:
        """Return whether a command asks to collect `step` or a later one."""
        return any(step < order.first_step + order.num_steps for order in self._orders)

    def collects(self, step: int) -> bool:
        """Return whether a command asks to collect `step` beside the schedule."""
        return any(order.first_step <= step < order.first_step + order.num_steps for order in self._orders)

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

    def _take_up(self, command: Command, step: int) -> None:
        if command.action is Action.STOP:
            self._orders.clear()
        elif command.action is Action.DUMP:
            event = DumpEvent(step=step, command=command.id, status=DumpStatus.FAILED, reason=NO_DUMP)
            self._journal.append_event(event)
        elif command.action is Action.COLLECT and command.first_step < step:
            self._journal.append_event(DumpEvent(step=step, command=command.id, status=DumpStatus.LATE))
        elif command.action is Action.COLLECT:
            self._orders.append(command)
