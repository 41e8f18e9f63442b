"""What is on the hot path: the interface of a consumer, and how records reach all of them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from trainermon.agent.follower import FollowedRecord
from trainermon.core.events import RankEvent
from trainermon.core.journal import BlockRecord, EndRecord, EventRecord, Header, HeaderRecord
from trainermon.core.values import SeriesKey, StatBlock

_Result = TypeVar("_Result")
_METHODS = ("on_header", "on_block", "on_event", "on_end", "end_round")

_log = logging.getLogger(__name__)


class RecordConsumer:
    """Base of everything in the agent that receives the records of ranks' journals. Override what you need.

    Each call must be quick, and runs on the loop's thread. After a restart of the agent the records since the last
    commit come again: what a consumer does must be idempotent.
    """

    def on_header(self, header: Header) -> None:
        """Handle the header of a journal file that a rank began, or that the agent began to read.

        A new `header.attempt` is a restart of the job.
        """

    def on_block(self, header: Header, keys: Sequence[SeriesKey], block: StatBlock) -> None:
        """Handle the statistics of one step of one rank: `block` has the rows, `keys` says which series each id is."""

    def end_round(self) -> None:
        """Handle that a round is over: no rank has shown more than one block since the last one ended.

        What is done for the blocks of all ranks together costs less than for each of them.
        """

    def on_event(self, header: Header, event: RankEvent) -> None:
        """Handle an event that the rank reported: a replay, a dump, a warning, or that its monitor detached."""

    def on_end(self, header: Header) -> None:
        """Handle that the rank has closed its journal in good order: no more records come."""


class ConsumerGroup:
    """Passes each record to all consumers in order; an error in one does not affect the others.

    Attributes:
        num_blocks: Blocks given to the consumers.
        num_errors: Exceptions contained, each counted by name and logged when it is the 1st, 2nd, 4th, ... of its name.
    """

    def __init__(self, consumers: Sequence[RecordConsumer]) -> None:
        self.num_blocks = self.num_errors = 0
        self._handlers = {method: _handlers(consumers, method) for method in _METHODS}
        self._num_errors_of: Counter[str] = Counter()
        self._shown: set[int] = set()  # ranks, in this round

    def feed(self, followed: FollowedRecord) -> None:
        """Pass one journal record to every consumer; errors in them are contained.

        A block belongs to a round, which ends before its rank's next record. Call `end_round` after the last one.
        """
        header, record = followed
        rank = header.coordinates.rank
        if rank in self._shown:
            self.end_round()
        arguments: tuple[Any, ...]
        if isinstance(record, BlockRecord):
            self.num_blocks += 1
            self._shown.add(rank)
            method, arguments = "on_block", (header, header.series, record.block)
        elif isinstance(record, EventRecord):
            method, arguments = "on_event", (header, record.event)
        elif isinstance(record, EndRecord):
            method, arguments = "on_end", (header,)
        elif isinstance(record, HeaderRecord):
            method, arguments = "on_header", (header,)
        else:
            return
        for name, handle in self._handlers[method]:
            self.attempt(name, handle, *arguments)

    def end_round(self) -> None:
        """Tell every consumer that the round is over, if a block was passed on since the last one."""
        if not self._shown:
            return
        self._shown.clear()
        for name, end in self._handlers["end_round"]:
            self.attempt(name, end)

    def attempt(self, name: str, call: Callable[..., _Result], *arguments: Any) -> _Result | None:
        """Return what `call` does; None for an error in it, which is counted for the consumer `name`, and logged."""
        try:
            return call(*arguments)
        except Exception:  # noqa: BLE001 - the border: whatever a record made of it
            self._note(name)
            return None

    def _note(self, name: str) -> None:
        self.num_errors += 1
        self._num_errors_of[name] += 1  # by name: one that always fails must not hide the first fault of another
        if self._num_errors_of[name].bit_count() == 1:
            _log.exception("%s failed (failure %d)", name, self._num_errors_of[name])


def _handlers(consumers: Sequence[RecordConsumer], method: str) -> list[tuple[str, Callable[..., object]]]:
    """Return by name the consumers that do anything in `method`, with that method of theirs."""
    return [
        (type(consumer).__name__, getattr(consumer, method))
        for consumer in consumers
        if getattr(type(consumer), method) is not getattr(RecordConsumer, method)
    ]
