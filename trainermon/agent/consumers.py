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
    """Something on the hot path. Override what you need; each call must be quick, and runs on the loop's thread.

    After a restart of the agent the records since the last commit come again: what a consumer does must be idempotent.
    """

    def on_header(self, header: Header) -> None:
        """A rank began a journal file, or the agent entered it: a new attempt if `header.attempt` is new."""

    def on_block(self, header: Header, keys: Sequence[SeriesKey], block: StatBlock) -> None:
        """One step of one rank; `keys` is `header.series`, the rank's whole series table."""

    def on_event(self, header: Header, event: RankEvent) -> None:
        """The rank reported a replay, a dump, a warning, or that it detached."""

    def on_end(self, header: Header) -> None:
        """The rank closed its journal in good order."""


class ConsumerGroup:
    """All consumers of one agent, fed in order; a fault of one costs the others nothing.

    Attributes:
        num_blocks: Blocks given to the consumers.
        num_errors: Exceptions contained, each counted by name and logged when it is the 1st, 2nd, 4th, ... of its name.
    """

    def __init__(self, consumers: Sequence[RecordConsumer]) -> None:
        self.num_blocks = self.num_errors = 0
        self._consumers = tuple(consumers)
        self._num_errors_of: Counter[str] = Counter()

    def feed(self, followed: FollowedRecord) -> None:
        """Give one record to every consumer."""
        self.num_blocks += isinstance(followed.record, BlockRecord)
        for consumer in self._consumers:
            with self.containing(type(consumer).__name__):
                _hand_over(consumer, followed)

    @contextlib.contextmanager
    def containing(self, name: str) -> Iterator[None]:
        """Count and log a fault of `name`, which must not cost the others a record."""
        try:
            yield
        except Exception:  # noqa: BLE001 - the border: whatever a record made of it
            self.num_errors += 1
            self._num_errors_of[name] += 1  # by name: one that always fails must not hide the first fault of another
            if self._num_errors_of[name].bit_count() == 1:
                _log.exception("%s failed (failure %d)", name, self._num_errors_of[name])


def _hand_over(consumer: RecordConsumer, followed: FollowedRecord) -> None:
    header, record = followed
    if isinstance(record, BlockRecord):
        consumer.on_block(header, header.series, record.block)
    elif isinstance(record, EventRecord):
        consumer.on_event(header, record.event)
    elif isinstance(record, EndRecord):
        consumer.on_end(header)
    elif isinstance(record, HeaderRecord):
        consumer.on_header(header)
