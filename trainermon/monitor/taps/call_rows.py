"""The rows of single collectives: which call they belong to, and what is taken for it when."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainermon.core.config import CollectivesConfig
from trainermon.core.values import Kind, SeriesKey
from trainermon.monitor.taps.call_lines import CallLines
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.micro_steps import in_backward
from trainermon.monitor.taps.process_groups import WatchedGroup, WatchedGroups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger("trainermon")

# Call lines that `cc_log_only` writes to the log at most.
MAX_LOGGED = 1000


class _CallRows:
    """The series of one call: of the tensors before and after, and of the waiting time."""

    __slots__ = ("after", "before", "call", "name", "wait")

    def __init__(self, name: str, call: int) -> None:
        self.name = name
        self.call = call
        self.before: list[int] = []
        self.after: list[int] = []
        self.wait = -1


class GroupOperation:
    """One operation (`all_reduce` …) of one process group: counts its calls in this step, and knows each call's series.

    Attributes:
        group: The group.
        name: Purpose of the group and name of the operation: `dp.all_reduce`.
        calls: Calls that have begun in this step.
        rows: The series of each call, by its number.
    """

    __slots__ = ("calls", "group", "name", "rows")

    def __init__(self, group: WatchedGroup, name: str, rows: list[_CallRows]) -> None:
        self.group = group
        self.name = name
        self.calls = 0
        self.rows = rows


class CollectiveCall:
    """A collective that is running, or whose result is waited for.

    Attributes:
        group: The group that it communicates over.
        rows: Its series; None for a call of which only number and size are counted.
        size_bytes: Size of the larger one of what it reads and what it writes.
        sequence: The group's number just before it.
        written: The tensors that it writes: read once it has been waited for.
        kept: Number of the first row of what it reads, if that is what it writes, too; else -1.
    """

    __slots__ = ("group", "kept", "rows", "sequence", "size_bytes", "written")

    def __init__(
        self, group: WatchedGroup, rows: _CallRows | None, written: Sequence[Tensor], size_bytes: int, kept: int = -1
    ) -> None:
        self.group = group
        self.rows = rows
        self.written = written
        self.size_bytes = size_bytes
        self.kept = kept
        self.sequence = group.sequence()


class CallRows:
    """Collects the rows of each collective call, by group, operation and number.

    A tensor that cannot be read (freed, quantized) has no row, and the log says so once per name.

    Attributes:
        thread: The thread that trains.
        operations: What was counted, and which series there are, by group and operation.

    Raises:
        ConfigError: `cc_codeline` holds what is no regular expression.
    """

    def __init__(self, collector: Collector, groups: WatchedGroups, config: CollectivesConfig) -> None:
        self._collector = collector
        self._groups = groups
        self._takes_before = config.cc_pre_hook
        self._takes_all = not (config.cc_log_only or config.cc_codeline)
        self._logs_only = config.cc_log_only
        self._lines = CallLines(config.cc_codeline)
        self._logged: set[tuple[str, str]] = set()
        self._unreadable: set[str] = set()
        self.operations: dict[tuple[ProcessGroup, str], GroupOperation] = {}
        self._rows: dict[str, list[_CallRows]] = {}
        self.thread = 0
        # where a call comes from that no pattern is found in; None once a wanted one was seen, or this was told
        self._unwanted: str | None = ""

    def attach(self) -> None:
        """Note the calling thread as the one that trains: other threads' collectives are not recorded."""
        self.thread = get_ident()

    def new_step(self) -> None:
        """Begin to count calls from zero."""
        for operation in self.operations.values():
            operation.calls = 0

    def step_ended(self) -> None:
        """Warn, once, if there were calls and no pattern of `cc_codeline` is found in where they come from."""
        if self._unwanted:
            logger.warning(
                "cc_distribution.cc_codeline is found in no line that calls a collective: none is taken; one is at %s",
                self._unwanted,
            )
            self._unwanted = None

    def detach(self) -> None:
        """Release the process groups; the series keep their numbers."""
        self.operations.clear()

    def is_training_thread(self) -> bool:
        """Return whether this thread trains: it attached, or it is one of those that torch runs a backward in."""
        return get_ident() == self.thread or in_backward()

    def operation(self, group: ProcessGroup, op: str) -> GroupOperation:
        """Return the counts and series kept for the operation `op` (`all_reduce`) of the process group `group`."""
        return self.operations.get((group, op)) or self.add(group, op)

    def add(self, process_group: ProcessGroup, op: str) -> GroupOperation:
        """Return what is kept for an operation that `operations` does not have; it has it from then on."""
        group = self._groups.of(process_group)
        name = f"{group.name}.{op}"
        added = self.operations[process_group, op] = GroupOperation(group, name, self._rows.setdefault(name, []))
        return added

    def open(
        self, operation: GroupOperation, read: Sequence[Tensor], written: Sequence[Tensor], *, is_kept: bool = False
    ) -> CollectiveCall:
        """Begin a collective: record the statistics of what it reads, if asked for; return an object for the call.

        It has no rows where the call is not wanted. `is_kept`: it will leave in `written`, one by one, what is in
        `read` now.
        """
        size = size_bytes(read) if read is written else max(size_bytes(read), size_bytes(written))
        if self._collector.muted:
            return CollectiveCall(operation.group, None, written, size)
        number = operation.calls
        operation.calls = number + 1
        if number == len(operation.rows):
            operation.rows.append(_CallRows(operation.name, number))
        rows = operation.rows[number]
        if not (self._takes_all or self._is_wanted(rows.name)):
            return CollectiveCall(operation.group, None, written, size)
        first = self._take(rows, "pre", rows.before, read) if self._takes_before and read else -1
        return CollectiveCall(operation.group, rows, written, size, first if is_kept else -1)

    def account(self, call: CollectiveCall) -> None:
        """Add the size and number of a call that has just returned to its group's counts."""
        group = call.group
        group.accounted += group.sequence() - call.sequence
        group.size_bytes += call.size_bytes

    def take_after(self, call: CollectiveCall) -> None:
        """Record the statistics of all results of `call`, which are complete now."""
        rows = call.rows
        if rows is None or not call.written:
            return
        if call.kept < 0:
            self._take(rows, "post", rows.after, call.written)
            return
        series = self._series(rows, "post", rows.after, len(call.written))
        for row, (number, tensor) in enumerate(zip(series, call.written, strict=True), start=call.kept):
            self._collector.share(number, row, tensor)

    def take_one_after(self, call: CollectiveCall, index: int, tensor: Tensor) -> None:
        """Record the statistics of one result of `call`, the tensor with number `index`, which is complete now."""
        if call.rows is not None:
            series = self._series(call.rows, "post", call.rows.after, index + 1)[index:]
            self._take(call.rows, "post", series, (tensor,))

    def put_wait(self, call: CollectiveCall, wait_s: float) -> None:
        """Record how many seconds `call` was waited for."""
        rows = call.rows
        if rows is None:
            return
        if rows.wait < 0:
            rows.wait = self._collector.table.id_of(SeriesKey(Kind.COMM, rows.name, "wait_seconds", rows.call))
        self._collector.put(rows.wait, wait_s)

    def _take(self, rows: _CallRows, side: str, series: list[int], tensors: Sequence[Tensor]) -> int:
        """Return the number of the first row of `tensors`; -1 if they could not be taken together."""
        if len(series) != len(tensors):
            series = self._series(rows, side, series, len(tensors))
        try:
            return self._collector.take(series, tensors)
        except (TypeError, ValueError, RuntimeError) as error:  # what torch says of a tensor of an unusual kind
            self._take_readable(rows, series, tensors, error)
            return -1

    def _series(self, rows: _CallRows, side: str, series: list[int], length: int) -> list[int]:
        for index in range(len(series), length):
            key = SeriesKey(Kind.COMM, rows.name, f"{side}.{index}", rows.call)
            series.append(self._collector.table.id_of(key))
        return series[:length]

    def _take_readable(
        self, rows: _CallRows, series: Sequence[int], tensors: Sequence[Tensor], error: Exception
    ) -> None:
        """Take those of `tensors` that can be read, after they could not be taken together."""
        if len(tensors) > 1:
            for number, tensor in zip(series, tensors, strict=True):
                self._take(rows, "", [number], (tensor,))
        elif rows.name not in self._unreadable:
            self._unreadable.add(rows.name)
            logger.warning("an operand of %s has no statistics: %s: %s", rows.name, type(error).__name__, error)

    def _is_wanted(self, name: str) -> bool:
        """Return whether rows are taken of the call that begins now; with `cc_log_only`, log its line instead."""
        line = self._lines.here()
        if self._unwanted is not None:
            self._unwanted = None if line.is_wanted else line.place
        if not (self._logs_only and line.is_wanted):
            return line.is_wanted
        if (name, line.text) not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add((name, line.text))
            logger.info("%s is called at %s, stack %s", name, line.place, line.text)
        return False


def size_bytes(tensors: Sequence[Tensor]) -> int:
    """Return how many bytes the elements of `tensors` take."""
    if len(tensors) == 1:
        return tensors[0].numel() * tensors[0].element_size()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


Arguments = tuple[Any, ...]
"""Positional arguments of a call, a method's `self` included."""
