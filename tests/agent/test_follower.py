import logging
import struct
import subprocess
import sys
import zlib
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import numpy as np
import pytest

from trainermon.agent.consumers import RecordConsumer
from trainermon.agent.follower import JournalFollower
from trainermon.agent.pipeline import RecordPipeline
from trainermon.core.errors import StoreError
from trainermon.core.events import WarningEvent
from trainermon.core.journal import (
    BlockRecord,
    EndRecord,
    EventRecord,
    Header,
    HeaderRecord,
    JournalWriter,
    list_files,
)
from trainermon.core.values import Coordinates, Kind, Placement, SeriesKey, StatBlock
from trainermon.exporters.store.segments import JournalPosition, cover
from trainermon.exporters.store.store import open_run

KEYS = tuple(SeriesKey(Kind.GRAD_REDUCED, f"h.{layer}.w") for layer in range(4))
ROW_BYTES = 8 * 8 + 4


def open_journal(spool, rank=0, *, attempt=1, file_bytes=64 << 20, keys=KEYS):
    header = Header(
        run_id="run",
        attempt=attempt,
        coordinates=Coordinates(rank=rank, world_size=4),
        host="node",
        pid=1,
        started_s=float(attempt),
        series=keys,
        placements=(None,) * len(keys),
    )
    return JournalWriter(spool, header, file_bytes=file_bytes)


def block(step, num_series=4):
    values = np.full((8, num_series), float(step))
    return StatBlock(step=step, time_s=float(step), series=np.arange(num_series, dtype=np.uint32), values=values)


def steps_of(followed, rank=0):
    return [
        record.block.step
        for header, record in followed
        if header.coordinates.rank == rank and isinstance(record, BlockRecord)
    ]


def poll_all(follower):
    followed = []
    while news := follower.poll():
        followed += news
    return followed


class Recorder(RecordConsumer):
    def __init__(self):
        self.seen = []

    def on_header(self, header):
        self.seen.append(("header", header.coordinates.rank, header.attempt))

    def on_block(self, header, keys, block):
        assert len(keys) > block.series.max()
        self.seen.append(("block", header.coordinates.rank, block.step))

    def on_event(self, header, event):
        self.seen.append(("event", header.coordinates.rank, event.type))

    def on_end(self, header):
        self.seen.append(("end", header.coordinates.rank))

    def steps(self, rank=0):
        return [step for what, of, *step in self.seen if what == "block" and of == rank for step in step]


class LaterExecutor(Executor):
    """Runs a job when told to, or fails it."""

    def __init__(self):
        self.jobs = []

    def submit(self, function, /, *arguments, **options):
        future = Future()
        self.jobs.append((future, function, arguments))
        return future

    def run(self, error=None):
        future, function, arguments = self.jobs.pop(0)
        if error:
            future.set_exception(error)
            return
        future.set_result(function(*arguments))


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def spool(tmp_path):
    path = tmp_path / "spool"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def segments(run_dir):
    return run_dir / "nodes" / "node" / "segments"


def stored(run_dir):
    with open_run(run_dir) as connection:
        return connection.execute("SELECT rank, step, count(*) FROM all_stats GROUP BY ALL ORDER BY ALL").fetchall()


def test_all_ranks_are_followed_in_turns_and_new_ones_are_found(spool):
    follower = JournalFollower(spool)
    first, second = open_journal(spool, 0), open_journal(spool, 1)
    for step in range(3):
        first.append_block(block(step))
    second.append_block(block(0))

    followed = follower.poll()
    third = open_journal(spool, 7)
    third.append_event(WarningEvent(message="x"))
    later = follower.poll()

    places = [(header.coordinates.rank, type(record)) for header, record in followed]
    assert places == [
        (0, HeaderRecord),
        (1, HeaderRecord),
        (0, BlockRecord),
        (1, BlockRecord),
        (0, BlockRecord),
        (0, BlockRecord),
    ]
    assert [(header.coordinates.rank, type(record)) for header, record in later] == [
        (7, HeaderRecord),
        (7, EventRecord),
    ]
    assert follower.poll() == []


def test_ranks_take_turns_record_by_record_wherever_it_was_stopped(spool):
    for rank in range(3):
        journal = open_journal(spool, rank)
        for step in range(4):
            journal.append_block(block(step))
    follower = JournalFollower(spool)
    taken = []
    for size in (3, 1, 2, 5, 4):
        taken += follower.poll(size)
    after = follower.positions

    taken += poll_all(follower)

    assert [header.coordinates.rank for header, _ in taken] == [0, 1, 2] * 5
    assert [steps_of(taken, rank) for rank in range(3)] == [[0, 1, 2, 3]] * 3
    again = poll_all(JournalFollower(spool, after))
    assert [steps_of(again, rank) for rank in range(3)] == [[], [], []]


def test_the_header_grows_with_the_series_table(spool):
    journal = open_journal(spool)
    late = SeriesKey(Kind.ACTV, "late")
    placement = Placement(dtype="f32", shape=(2,))
    follower = JournalFollower(spool)
    journal.append_block(block(0))
    journal.add_series([late], [placement])
    journal.append_block(block(1, 5))

    (_, (old, _), _, (new, _)) = follower.poll()

    assert old.series == KEYS
    assert new.series == (*KEYS, late)
    assert new.placements == (None,) * 4 + (placement,)
    assert follower.headers[0] is new


@pytest.mark.parametrize("file_bytes", [64 << 20, 2000])
def test_from_any_position_exactly_the_rest_is_read(spool, file_bytes):
    journal = open_journal(spool, file_bytes=file_bytes)
    for step in range(12):
        journal.append_block(block(step))
        if step == 4:
            journal.add_series([SeriesKey(Kind.ACTV, "late")], [None])
    journal.close()
    follower = JournalFollower(spool)
    positions = []
    while follower.poll(1):
        positions.append(follower.positions)

    for seen, position in enumerate(positions, 1):
        before = JournalFollower(spool)
        known = [step for _ in range(seen) for step in steps_of(before.poll(1))]
        after = JournalFollower(spool, position)
        rest = poll_all(after)
        assert known + steps_of(rest) == list(range(12))
        assert after.positions == follower.positions


def test_a_rank_is_over_when_it_says_so_or_is_gone(spool):
    script = "import sys; from trainermon.core.spool import RankLock; from pathlib import Path\n"
    script += "RankLock(Path(sys.argv[1]), 0); print('locked', flush=True); sys.stdin.read()"
    follower = JournalFollower(spool)
    with subprocess.Popen(
        [sys.executable, "-c", script, spool], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as rank:
        rank.stdout.readline()
        assert not follower.is_over(0)
        journal = open_journal(spool)
        journal.close()
        follower.poll()
        assert follower.is_over(0)
        open_journal(spool, attempt=2)
        follower.poll()
        assert not follower.is_over(0)
        rank.kill()
    assert follower.is_over(0)


def test_a_journal_of_another_release_is_refused_and_the_others_are_read(spool, caplog):
    open_journal(spool, 0).append_block(block(0))
    open_journal(spool, 1).append_block(block(0))
    (number,) = list_files(spool, 1)
    path = spool / f"rank00001.{number}.jnl"
    content = bytearray(path.read_bytes())
    head = bytearray(content[:32])
    head[4:6] = struct.pack("<H", 9)
    head[28:32] = struct.pack("<I", zlib.crc32(bytes(head[:28])))
    path.write_bytes(head + content[32:])
    follower = JournalFollower(spool)

    with caplog.at_level(logging.ERROR):
        followed = poll_all(follower)

    assert steps_of(followed, 0) == [0]
    assert steps_of(followed, 1) == []
    assert list(follower.refused) == [1]
    assert "rank 1 is not followed" in caplog.text


def test_records_reach_every_consumer_at_once_and_the_store_when_it_is_due(spool, run_dir, segments):
    clock, recorder = Clock(), Recorder()
    journal = open_journal(spool)
    with ThreadPoolExecutor(1) as executor:
        pipeline = RecordPipeline(spool, segments, executor=executor, consumers=[recorder], flush_s=30, clock=clock)
        journal.append_block(block(0))
        journal.append_event(WarningEvent(message="x"))
        journal.close()

        assert pipeline.step() == 4
        assert recorder.seen == [("header", 0, 1), ("block", 0, 0), ("event", 0, "warning"), ("end", 0)]
        pipeline.step()
        assert (stored(run_dir) if run_dir.exists() else []) == []
        clock.now_s += 31
        while not pipeline.status.num_commits:
            pipeline.step()

    assert stored(run_dir) == [(0, 0, 4)]
    assert pipeline.flushed == pipeline.follower.positions


def test_enough_bytes_are_stored_before_the_time(spool, segments):
    executor = LaterExecutor()
    journal = open_journal(spool)
    pipeline = RecordPipeline(spool, segments, executor=executor, flush_bytes=3 * ROW_BYTES * 4, clock=Clock())

    for step in range(3):
        assert executor.jobs == []
        journal.append_block(block(step))
        pipeline.step()

    assert len(executor.jobs) == 1


def test_a_flush_is_done_when_everything_read_so_far_is_stored(spool, run_dir, segments):
    executor = LaterExecutor()
    journal = open_journal(spool)
    pipeline = RecordPipeline(spool, segments, executor=executor, clock=Clock())
    journal.append_block(block(0))
    pipeline.step()

    done = pipeline.flush()
    pipeline.step()
    journal.append_block(block(1))
    pipeline.step()
    again = pipeline.flush()
    executor.run()
    pipeline.step()

    assert (done.done(), again.done()) == (True, False)
    pipeline.step()
    executor.run()
    pipeline.step()
    assert again.done()
    assert stored(run_dir) == [(0, 0, 4), (0, 1, 4)]
    idle = pipeline.flush()
    pipeline.step()
    assert idle.done()


def test_journals_are_removed_after_the_commit_and_not_before(spool, segments):
    executor = LaterExecutor()
    journal = open_journal(spool, file_bytes=2000)
    pipeline = RecordPipeline(spool, segments, executor=executor, clock=Clock())
    for step in range(10):
        journal.append_block(block(step))
    while pipeline.step():
        pass
    files = list_files(spool, 0)
    pipeline.flush()
    pipeline.step()
    assert list_files(spool, 0) == files

    executor.run()

    assert list_files(spool, 0) == files[-1:]


def test_a_failed_commit_is_repeated_until_it_succeeds_and_counts_once(spool, run_dir, segments, caplog):
    executor, clock = LaterExecutor(), Clock()
    journal = open_journal(spool)
    pipeline = RecordPipeline(spool, segments, executor=executor, clock=clock)
    journal.append_block(block(0))
    pipeline.step()
    done = pipeline.flush()
    pipeline.step()

    with caplog.at_level(logging.ERROR):
        for error in (StoreError("disk full"), MemoryError()):
            executor.run(error)
            pipeline.step()
            assert pipeline.status.store_error == (str(error) or "MemoryError")
            assert executor.jobs == []
            clock.now_s += 6
            journal.append_block(block(pipeline.status.num_blocks))
            pipeline.step()
    assert not done.done()
    executor.run()
    pipeline.step()
    executor.run()
    pipeline.step()

    assert pipeline.status.store_error == ""
    assert caplog.text.count("disk full") == 1
    assert done.done()
    assert stored(run_dir) == [(0, step, 4) for step in range(3)]
    assert len(cover(segments)) == 2


def test_a_store_that_hangs_holds_up_neither_consumers_nor_memory_and_catches_up(spool, run_dir, segments):
    executor, recorder = LaterExecutor(), Recorder()
    journals = [open_journal(spool, rank, file_bytes=4000) for rank in (0, 1)]
    limit = 4 * ROW_BYTES * len(KEYS)
    pipeline = RecordPipeline(
        spool, segments, executor=executor, consumers=[recorder], flush_bytes=limit, clock=Clock()
    )

    for step in range(60):
        for journal in journals:
            journal.append_block(block(step))
        pipeline.step()
    assert recorder.steps(0) == recorder.steps(1) == list(range(60))
    assert len(executor.jobs) == 1
    assert pipeline.status.num_pending_rows <= 3 * limit // ROW_BYTES

    for journal in journals:
        journal.close()
    done = pipeline.flush()
    for _ in range(200):
        while executor.jobs:
            executor.run()
        pipeline.step()
    assert done.done()
    assert stored(run_dir) == [(rank, step, 4) for rank in (0, 1) for step in range(60)]
    assert recorder.steps(0) == list(range(60))
    assert pipeline.flushed == pipeline.follower.positions


def test_a_fault_in_one_consumer_costs_the_others_and_the_store_nothing(spool, run_dir, segments, caplog):
    class Faulty(RecordConsumer):
        def on_block(self, header, keys, block):
            raise ZeroDivisionError("faulty")

    class FaultyLater(RecordConsumer):
        def on_block(self, header, keys, block):
            if block.step == 1:
                raise ZeroDivisionError("later")

    recorder = Recorder()
    journal = open_journal(spool)
    for step in range(3):
        journal.append_block(block(step))
    with ThreadPoolExecutor(1) as executor, caplog.at_level(logging.ERROR):
        pipeline = RecordPipeline(spool, segments, executor=executor, consumers=[Faulty(), FaultyLater(), recorder])
        pipeline.step()
        done = pipeline.flush()
        while not done.done():
            pipeline.step()

    assert recorder.steps() == [0, 1, 2]
    assert pipeline.status.num_consumer_errors == 4
    assert caplog.text.count("Faulty failed") == 2
    assert caplog.text.count("FaultyLater failed") == 1, "the faults of others do not hide its first one"
    assert stored(run_dir) == [(0, step, 4) for step in range(3)]


def test_after_a_restart_consumers_see_again_what_was_not_stored_and_the_store_does_not(spool, run_dir, segments):
    journal = open_journal(spool)
    executor = LaterExecutor()
    first = RecordPipeline(spool, segments, executor=executor, clock=Clock())
    journal.append_block(block(0))
    first.step()
    first.flush()
    first.step()
    executor.run()
    first.step()
    journal.append_block(block(1))
    first.step()
    first.close()

    recorder = Recorder()
    second = RecordPipeline(spool, segments, executor=executor, consumers=[recorder], clock=Clock())
    journal.append_block(block(2))
    second.step()
    second.flush()
    second.step()
    executor.run()

    assert recorder.steps() == [1, 2]
    assert stored(run_dir) == [(0, step, 4) for step in range(3)]


def test_a_run_that_goes_on_in_a_new_spool_is_stored_from_its_beginning(
    spool, run_dir, segments, tmp_path, monkeypatch
):
    spools = [spool, tmp_path / "again"]
    spools[1].mkdir(mode=0o700)
    for attempt, where in enumerate(spools, 1):
        time_ns = 10**18 + attempt * 10**6  # the next attempt begins a millisecond later
        monkeypatch.setattr("trainermon.core.journal.files.time.time_ns", lambda time_ns=time_ns: time_ns)
        journal = open_journal(where, attempt=attempt)
        for step in range(5 * attempt, 5 * attempt + 3):
            journal.append_block(block(step))
        journal.close()
        executor = LaterExecutor()
        pipeline = RecordPipeline(where, segments, executor=executor, clock=Clock())
        pipeline.step()
        pipeline.flush()
        pipeline.step()
        executor.run()

    assert stored(run_dir) == [(0, step, 4) for step in (5, 6, 7, 10, 11, 12)]
    assert pipeline.follower.positions == {0: JournalPosition(2, pipeline.follower.positions[0].cursor)}


def test_the_end_of_a_rank_is_told(spool):
    journal = open_journal(spool)
    journal.close()

    assert [type(record) for _, record in poll_all(JournalFollower(spool))] == [HeaderRecord, EndRecord]
