"""The agent's loop body without HTTP: journals → consumers on the hot path → segments, exactly once.

    pipeline = Pipeline(spool, directory, executor=executor, consumers=[rules, metrics, history], flush_s=30)
    while running:
        pipeline.step()              # one turn; never waits for the disk
        sleep
    done = pipeline.flush()          # a concurrent.futures.Future, completed by a later step()
    while not done.done(): pipeline.step()

Every record is given to the consumers as soon as it is read, and gathered for the store. A commit writes what was
gathered, together with the position reached in every journal, in the executor's thread; only when it is there are the
journal files before that position removed. A restarted agent reads on from the committed positions: consumers see the
records after them again, the store does not.

A store that fails or hangs never holds up the consumers, and never fills the memory: once twice `flush_bytes` are
waiting, the store falls behind the hot path with a reader of its own, and the journals are the buffer.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path

from trainermon.agent.follower import FollowedRecord, JournalFollower
from trainermon.core.errors import StoreError
from trainermon.core.events import RankEvent
from trainermon.core.journal import BlockRecord, EndRecord, EventRecord, Header, HeaderRecord, remove_before
from trainermon.core.values import SeriesKey, StatBlock
from trainermon.exporters.store.segments import JournalPosition
from trainermon.exporters.store.store import SegmentBatch, SegmentWriter, SetAside

logger = logging.getLogger(__name__)

RETRY_S = 5.0
TURN_S = 0.05
"""Page, signals and the watch over ranks wait for the end of a turn."""


class RecordConsumer:
    """Something on the hot path. Override what you need; each call must be quick, and runs on the thread of `step`.

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


class RecordPipeline:
    """Moves records from the journals in `spool` to the consumers, and to the segments in `directory`.

    `executor` must run one job at a time. All methods belong to one thread.

    Attributes:
        follower: The hot path's follower: headers, ends, refusals.
        num_blocks: Blocks given to the consumers.
        num_commits: Segments committed.
        num_consumer_errors: Exceptions of consumers, each logged; the others and the store went on.
        store_error: Why the last commit failed, '' if it did not; it is repeated every few seconds until it succeeds.

    Raises:
        StoreError: The directory cannot be used, or its newest segment not be read.
    """

    def __init__(  # noqa: PLR0913  (the ports and limits of one process)
        self,
        spool: Path,
        directory: Path,
        *,
        executor: Executor,
        consumers: Sequence[RecordConsumer] = (),
        flush_bytes: int = 8 << 20,
        flush_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_blocks = self.num_commits = self.num_consumer_errors = 0
        self._num_errors: Counter[str] = Counter()
        self.store_error = ""
        self._spool = spool
        self._consumers = tuple(consumers)
        self._executor = executor
        self._flush_bytes = flush_bytes
        self._flush_s = flush_s
        self._clock = clock
        self._writer = SegmentWriter(directory)
        self._committed = dict(self._writer.metadata.positions)
        self.follower = JournalFollower(spool, self._committed)
        self._behind: JournalFollower | None = None
        self._batch: SegmentBatch | None = None
        self._commit: Future[Path] | None = None
        self._next_seal_s = clock() + flush_s
        self._retry_s = 0.0
        self._waiting: list[tuple[dict[int, JournalPosition], Future[None]]] = []

    @property
    def flushed(self) -> dict[int, JournalPosition]:
        """By rank, the position up to which everything is stored, or there was nothing to store."""
        nothing_pending = self._batch is None and not self._writer.num_rows
        return {**self._committed, **(self._stored_from.positions if nothing_pending else {})}

    @property
    def set_aside(self) -> SetAside:
        """What is missing in the store, as the rows could not be stored or a segment not be read again."""
        return self._writer.set_aside

    @property
    def num_pending_rows(self) -> int:
        """Rows that were gathered for the next commit."""
        return self._writer.num_rows

    def step(self) -> int:
        """Take one turn and return how many records were new; reads the journals, never waits for the store.

        A turn ends after about `TURN_S`, however much there is to follow: what is left comes with the next one.
        """
        self._settle()
        if self._behind is None and self._writer.size_bytes >= 2 * self._flush_bytes:
            logger.warning("the store does not keep up; what is new waits in the journals")
            self._behind = JournalFollower(self._spool, self.follower.positions)
        num_records = self._follow(self._clock() + (TURN_S if self._behind is None else TURN_S / 2))
        self._catch_up(self._clock() + TURN_S / 2)
        if self._batch is None and self._is_due():
            self._batch = self._writer.seal(self._stored_from.positions)
            self._next_seal_s = self._clock() + self._flush_s
            self._submit()
        self._complete_flushes()
        return num_records

    def flush(self) -> Future[None]:
        """Return a future that a later `step` completes, when everything read so far is stored.

        It is not completed while the store fails; the caller decides how long to wait.
        """
        done: Future[None] = Future()
        self._waiting.append((self.follower.positions, done))
        return done

    def close(self) -> None:
        """Close the journals; what is not committed is read again next time."""
        self.follower.close()
        if self._behind:
            self._behind.close()

    @property
    def _stored_from(self) -> JournalFollower:
        return self._behind or self.follower

    def _follow(self, deadline_s: float) -> int:
        """Give what is new to the consumers, and to the store unless it is behind, until the deadline."""
        num_records = 0
        for followed in self.follower.news():
            num_records += 1
            self._feed(followed)
            if self._behind is None:
                self._gather(followed)
            if self._clock() >= deadline_s:
                break
        return num_records

    def _catch_up(self, deadline_s: float) -> None:
        """Take into the store what it is behind, as far as there is room and time."""
        if self._behind is None or self._writer.size_bytes >= self._flush_bytes:
            return
        for followed in self._behind.news():
            self._gather(followed)
            if self._writer.size_bytes >= self._flush_bytes or self._clock() >= deadline_s:
                break
        if self._behind.positions == self.follower.positions:
            self._behind.close()
            self._behind = None

    def _gather(self, followed: FollowedRecord) -> None:
        header, record = followed
        if isinstance(record, BlockRecord):
            with self._surviving("the store"):
                self._writer.add(header, header.series, record.block)

    def _feed(self, followed: FollowedRecord) -> None:
        self.num_blocks += isinstance(followed.record, BlockRecord)
        for consumer in self._consumers:
            self._feed_one(consumer, followed)

    def _feed_one(self, consumer: RecordConsumer, followed: FollowedRecord) -> None:
        header, record = followed
        with self._surviving(type(consumer).__name__):
            if isinstance(record, BlockRecord):
                consumer.on_block(header, header.series, record.block)
            elif isinstance(record, EventRecord):
                consumer.on_event(header, record.event)
            elif isinstance(record, EndRecord):
                consumer.on_end(header)
            elif isinstance(record, HeaderRecord):
                consumer.on_header(header)

    @contextlib.contextmanager
    def _surviving(self, name: str) -> Iterator[None]:
        """Count and log a fault of one consumer, which must not cost the others a record."""
        try:
            yield
        except Exception:  # the border: whatever a record made of it
            self.num_consumer_errors += 1
            self._num_errors[name] += 1  # each for itself: one that always fails must not hide the first of another
            if self._num_errors[name].bit_count() == 1:
                logger.exception("%s failed (failure %d)", name, self._num_errors[name])

    def _is_due(self) -> bool:
        writer = self._writer
        return writer.num_rows > 0 and (
            bool(self._waiting) or writer.size_bytes >= self._flush_bytes or self._clock() >= self._next_seal_s
        )

    def _submit(self) -> None:
        if self._batch:
            self._commit = self._executor.submit(commit, self._batch, self._spool)

    def _settle(self) -> None:
        """Take note of a commit that has come to an end; repeat one that failed, after a while."""
        if self._batch and self._commit is None and self._clock() >= self._retry_s:
            self._submit()
        if self._batch is None or self._commit is None or not self._commit.done():
            return
        finished, self._commit = self._commit, None
        error = finished.exception()
        if error is None:
            self._committed = dict(self._batch.metadata.positions)
            self._batch = None
            self.num_commits += 1
        else:
            self._retry_s = self._clock() + RETRY_S
            if not self.store_error:
                unexpected = None if isinstance(error, StoreError) else error
                logger.error("%s; it is tried again every %g s", error, RETRY_S, exc_info=unexpected)
        self.store_error = "" if error is None else str(error) or type(error).__name__

    def _complete_flushes(self) -> None:
        flushed = self.flushed
        for target, done in list(self._waiting):
            if all(rank in flushed and flushed[rank].cursor >= at.cursor for rank, at in target.items()):
                self._waiting.remove((target, done))
                done.set_result(None)


def commit(batch: SegmentBatch, spool: Path) -> Path:
    """Write the segment, then remove the journal files that it makes superfluous; runs in the worker's thread.

    Raises:
        StoreError: The segment could not be written; nothing was removed.
    """
    path = batch.write()
    try:
        for rank, position in batch.metadata.positions.items():
            remove_before(spool, rank, position.cursor)
    except OSError as error:  # the next commit tries again; the records are stored, and will not be read twice
        logger.warning("finished journals could not be removed from %s: %s", spool, error)
    return path
