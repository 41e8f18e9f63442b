"""What is on the hot path: the interface of a consumer, and how records reach all of them."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence

from trainermon.agent.follower import FollowedRecord
from trainermon.core.events import RankEvent
from trainermon.core.journal import BlockRecord, EndRecord, EventRecord, Header, HeaderRecord
from trainermon.core.values import SeriesKey, StatBlock

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
        self._consumers = tuple(consumers)
        self._num_errors_of: Counter[str] = Counter()
        self._shown: set[int] = set()  # ranks, in this round

    def feed(self, followed: FollowedRecord) -> None:
        """Pass one journal record to every consumer; errors in them are contained.

        A block belongs to a round, which ends before its rank's next record. Call `end_round` after the last one.
        """
        rank = followed.header.coordinates.rank
        if rank in self._shown:
            self.end_round()
        if isinstance(followed.record, BlockRecord):
            self.num_blocks += 1
            self._shown.add(rank)
        for consumer in self._consumers:
            self._hand_over(consumer, followed)

    def end_round(self) -> None:
        """Tell every consumer that the round is over, if a block was passed on since the last one."""
        if not self._shown:
            return
        self._shown.clear()
        for consumer in self._consumers:
            with self.containing(type(consumer).__name__):
                consumer.end_round()

    @contextlib.contextmanager
    def containing(self, name: str) -> Iterator[None]:
        """Return a context that counts and logs an error in the consumer `name` instead of raising it."""
        try:
            yield
        except Exception:  # noqa: BLE001 - the border: whatever a record made of it
            self._note(name)

    def _hand_over(self, consumer: RecordConsumer, followed: FollowedRecord) -> None:
        header, record = followed
        try:
            if isinstance(record, BlockRecord):
                consumer.on_block(header, header.series, record.block)
            elif isinstance(record, EventRecord):
                consumer.on_event(header, record.event)
            elif isinstance(record, EndRecord):
                consumer.on_end(header)
            elif isinstance(record, HeaderRecord):
                consumer.on_header(header)
        except Exception:  # noqa: BLE001 - the border: whatever a record made of it
            self._note(type(consumer).__name__)

    def _note(self, name: str) -> None:
        self.num_errors += 1
        self._num_errors_of[name] += 1  # by name: one that always fails must not hide the first fault of another
        if self._num_errors_of[name].bit_count() == 1:
            _log.exception("%s failed (failure %d)", name, self._num_errors_of[name])
