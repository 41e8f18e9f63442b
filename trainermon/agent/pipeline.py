"""The agent's loop body without HTTP: journals → consumers on the hot path → segments, exactly once.

    pipeline = RecordPipeline(spool, directory, executor=executor, consumers=[rules, metrics, history], flush_s=30)
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

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path

from trainermon.agent.commits import SegmentCommits
from trainermon.agent.consumers import ConsumerGroup, RecordConsumer
from trainermon.agent.follower import FollowedRecord, JournalFollower
from trainermon.core.journal import BlockRecord, Header
from trainermon.exporters.store.segments import JournalPosition
from trainermon.exporters.store.store import SetAside

logger = logging.getLogger(__name__)

TURN_S = 0.05
"""Page, signals and the watch over ranks wait for the end of a turn."""

ROUND_S = 0.1
"""So long a step that some ranks have shown waits for the others before rules look at it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStatus:
    """How far a pipeline has come, and what went wrong in it.

    Attributes:
        num_blocks: Blocks given to the consumers.
        num_commits: Segments committed.
        num_consumer_errors: Exceptions of consumers, each logged; the others and the store went on.
        num_pending_rows: Rows that were gathered for the next commit.
        store_error: Why the last commit failed, '' if it did not; it is repeated every few seconds until it succeeds.
        set_aside: What is missing in the store, as the rows could not be stored or a segment not be read again.
    """

    num_blocks: int
    num_commits: int
    num_consumer_errors: int
    num_pending_rows: int
    store_error: str
    set_aside: SetAside


def _as_it_is(followed: FollowedRecord) -> FollowedRecord:
    return followed


class RecordPipeline:
    """Reads records from the journals in `spool`, passes them to consumers, and stores them as segments.

    Args:
        spool: The folder on the node through which ranks and agent talk.
        directory: Folder of the segments, in the run directory.
        executor: Writes them; it must run one job at a time.
        consumers: Receive every record.
        extend: Given each record before anyone else, returns it with what the agent itself knows of the step; the same
            step must come out the same again.
        flush_bytes: A commit is due when this much was gathered.
        flush_s: Or after so many seconds.
        clock: Monotonic seconds.

    All methods belong to one thread.

    Attributes:
        follower: Reads the journals: headers, ends, refusals.

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
        extend: Callable[[FollowedRecord], FollowedRecord] = _as_it_is,
        flush_bytes: int = 8 << 20,
        flush_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spool = spool
        self._consumers = ConsumerGroup(consumers)
        self._extend = extend
        self._flush_bytes = flush_bytes
        self._flush_s = flush_s
        self._clock = clock
        self._commits = SegmentCommits(spool, directory, executor=executor, clock=clock)
        self.follower = JournalFollower(spool, self._commits.positions)
        self._behind: JournalFollower | None = None
        self._next_seal_s = clock() + flush_s
        self._round_end_s = clock() + ROUND_S
        self._waiting: list[tuple[dict[int, JournalPosition], Future[None]]] = []

    @property
    def flushed(self) -> dict[int, JournalPosition]:
        """By rank, the position up to which everything is stored, or there was nothing to store."""
        nothing_pending = not self._commits.is_pending and not self._commits.num_rows
        return {**self._commits.positions, **(self._stored_from.positions if nothing_pending else {})}

    @property
    def headers(self) -> Mapping[int, Header]:
        """By rank, the newest header that the consumers have seen."""
        return self.follower.headers

    @property
    def refused(self) -> Mapping[int, str]:
        """By rank, why its journal cannot be read: an incompatible release wrote it."""
        return self.follower.refused

    @property
    def num_lost_files(self) -> int:
        """Journal files that were removed for the spool's budget before they were read."""
        return self.follower.lost_files

    @property
    def status(self) -> PipelineStatus:
        """How far the pipeline has come, and what went wrong in it so far."""
        return PipelineStatus(
            num_blocks=self._consumers.num_blocks,
            num_commits=self._commits.num_done,
            num_consumer_errors=self._consumers.num_errors,
            num_pending_rows=self._commits.num_rows,
            store_error=self._commits.error,
            set_aside=self._commits.set_aside,
        )

    def step(self) -> int:
        """Read new records and pass them on; return how many there were. Reads the journals, never waits for the store.

        It ends after about `TURN_S` seconds, however much there is to read: the rest comes with the next call.
        """
        self._commits.poll()
        if self._behind is None and self._commits.size_bytes >= 2 * self._flush_bytes:
            logger.warning("the store does not keep up; what is new waits in the journals")
            self._behind = JournalFollower(self._spool, self.follower.positions)
        num_records = self._follow(self._clock() + (TURN_S if self._behind is None else TURN_S / 2))
        self._catch_up(self._clock() + TURN_S / 2)
        if not self._commits.is_pending and self._is_due():
            self._consumers.end_round()  # whoever goes on from the commit does not see these records again
            self._commits.begin(self._stored_from.positions)
            self._next_seal_s = self._clock() + self._flush_s
        self._complete_flushes()
        return num_records

    def flush(self) -> Future[None]:
        """Return a future that is completed by a later `step`, when everything read so far is stored.

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
            extended = self._extended(followed)
            self._consumers.feed(extended)
            if self._behind is None:
                self._gather(extended)
            if self._clock() >= deadline_s:
                break
        self._settle_round(has_news=num_records > 0)
        return num_records

    def _settle_round(self, *, has_news: bool) -> None:
        """End the round unless more of it is likely to come soon: ranks end a step some milliseconds apart."""
        now_s = self._clock()
        if not has_news or now_s >= self._round_end_s:
            self._consumers.end_round()
            self._round_end_s = now_s + ROUND_S

    def _catch_up(self, deadline_s: float) -> None:
        """Take into the store what it is behind, as far as there is room and time."""
        if self._behind is None or self._commits.size_bytes >= self._flush_bytes:
            return
        for followed in self._behind.news():
            self._gather(self._extended(followed))
            if self._commits.size_bytes >= self._flush_bytes or self._clock() >= deadline_s:
                break
        if self._behind.positions == self.follower.positions:
            self._behind.close()
            self._behind = None

    def _extended(self, followed: FollowedRecord) -> FollowedRecord:
        return self._consumers.attempt("what the agent adds to a step", self._extend, followed) or followed

    def _gather(self, followed: FollowedRecord) -> None:
        header, record = followed
        if isinstance(record, BlockRecord):
            self._consumers.attempt("the store", self._commits.add, header, record.block)

    def _is_due(self) -> bool:
        commits = self._commits
        return commits.num_rows > 0 and (
            bool(self._waiting) or commits.size_bytes >= self._flush_bytes or self._clock() >= self._next_seal_s
        )

    def _complete_flushes(self) -> None:
        flushed = self.flushed
        for target, done in list(self._waiting):
            if all(rank in flushed and flushed[rank].cursor >= at.cursor for rank, at in target.items()):
                self._waiting.remove((target, done))
                done.set_result(None)
