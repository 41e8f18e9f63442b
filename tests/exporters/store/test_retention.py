import fcntl
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.moments import numpy_moments
from trainermon.core.errors import StoreError
from trainermon.core.journal import Cursor, Header
from trainermon.core.values import NO_ELEMENTS, STATISTICS, Coordinates, Kind, Moments, SeriesKey, StatBlock
from trainermon.exporters.store import retention as subject
from trainermon.exporters.store import tables
from trainermon.exporters.store.retention import RetentionPolicy, compact
from trainermon.exporters.store.segments import LOCK_FILE, JournalPosition, cover, read_metadata
from trainermon.exporters.store.store import SegmentWriter, open_run, read_cursors

KEYS = (
    SeriesKey(Kind.LOSS, "loss"),
    SeriesKey(Kind.GRAD_REDUCED, "w"),
    SeriesKey(Kind.GRAD_REDUCED, "w", micro_step=0),
)
FOREVER = RetentionPolicy(max_bytes=1 << 40, full_detail_s=math.inf)
AT_ONCE = RetentionPolicy(max_bytes=1 << 40, full_detail_s=0.0)


def header(rank=0, attempt=1):
    return Header(
        run_id="run",
        attempt=attempt,
        coordinates=Coordinates(rank=rank, world_size=2),
        host="node",
        pid=1,
        started_s=0.0,
        series=KEYS,
        placements=(None,) * len(KEYS),
    )


def random_moments(rng):
    elements = rng.choice([0.0, 1.5, -2.0, math.nan, math.inf], size=rng.integers(1, 5), p=[0.3, 0.3, 0.3, 0.05, 0.05])
    return numpy_moments(elements)


def store(directory, steps, *, attempt=1, ranks=(0, 1), rng=None):
    """Commit one segment of these steps; returns the moments by (attempt, rank, step, series)."""
    rng = rng or np.random.default_rng(0)
    writer = SegmentWriter(directory)
    rows = {}
    for step in steps:
        for rank in ranks:
            values = np.array([random_moments(rng) for _ in KEYS])
            block = StatBlock(
                step=step,
                time_s=float(step),
                series=np.arange(len(KEYS), dtype=np.uint32),
                values=np.ascontiguousarray(values.T),
            )
            writer.add(header(rank, attempt), KEYS, block)
            rows |= {(attempt, rank, step, key): Moments(*row) for key, row in zip(KEYS, values.tolist(), strict=True)}
    writer.commit({rank: JournalPosition(attempt, Cursor(1, int(max(steps)))) for rank in ranks})
    return rows


def stored(run_dir, table="all_stats"):
    columns = ", ".join(STATISTICS)
    with open_run(run_dir) as connection:
        found = connection.execute(
            f"SELECT attempt, rank, step, kind, name, micro_step, num_steps, {columns} FROM {table}"
        )
        return {
            (attempt, rank, step, SeriesKey(Kind(kind), name, micro_step=micro)): (num_steps, Moments(*moments))
            for attempt, rank, step, kind, name, micro, num_steps, *moments in found.fetchall()
        }


@pytest.fixture
def segments(tmp_path):
    return tmp_path / "nodes" / "node" / "segments"


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 25), min_size=1, max_size=4), st.integers(0, 2**32), st.sampled_from([1, 7]))
def test_a_merged_row_has_the_moments_of_its_steps(tmp_path_factory, sizes, seed, interval):
    run_dir = tmp_path_factory.mktemp("run")
    directory = run_dir / "nodes" / "node" / "segments"
    rng = np.random.default_rng(seed)
    truth, begin = {}, 0
    for size in sizes:
        truth |= store(directory, range(begin, begin + size * interval, interval), rng=rng)
        begin += size * interval

    compact(directory, AT_ONCE, now_s=begin + 1.0)

    width = read_metadata(cover(directory)[0].path).window_steps
    expected = {}
    for (attempt, rank, step, key), row in truth.items():
        num, last, merged = expected.get((attempt, rank, step // width, key), (0, 0, NO_ELEMENTS))
        expected[attempt, rank, step // width, key] = (num + 1, max(last, step), merged.merge(row))
    found = stored(run_dir)
    assert len(found) == len(expected)
    for (attempt, rank, _, key), (num, last, row) in expected.items():
        assert found[attempt, rank, last, key] == (num, row)
    assert width == 10 * interval or sum(sizes) == 1


def test_young_segments_keep_full_detail_and_old_ones_do_not(segments, tmp_path):
    for begin in range(0, 100, 20):
        store(segments, range(begin, begin + 20))

    compact(segments, RetentionPolicy(full_detail_s=45.0), now_s=100.0)

    assert [read_metadata(file.path).window_steps for file in cover(segments)] == [10, 1, 1, 1]
    steps = sorted({step for _, _, step, _ in stored(tmp_path)})
    assert steps == [9, 19, 29, 39, *range(40, 100)]
    assert compact(segments, RetentionPolicy(full_detail_s=45.0), now_s=100.0) == 0


def test_a_budget_is_kept_and_the_newest_steps_stay_the_finest(segments, tmp_path):
    for begin in range(0, 3000, 300):
        store(segments, range(begin, begin + 300))
    size = sum(file.path.stat().st_size for file in cover(segments))
    total = sum(row.count for _, row in stored(tmp_path).values())

    compact(segments, RetentionPolicy(max_bytes=size // 2, full_detail_s=math.inf), now_s=3001.0)

    assert sum(file.path.stat().st_size for file in cover(segments)) <= size // 2
    windows = [read_metadata(file.path).window_steps for file in cover(segments)]
    assert windows == sorted(windows, reverse=True)
    assert (windows[0] > 1, windows[-1]) == (True, 1)
    assert sum(row.count for _, row in stored(tmp_path).values()) == total


def test_a_budget_that_cannot_be_met_ends_and_loses_nothing(segments, tmp_path):
    rows = store(segments, range(50))

    compact(segments, RetentionPolicy(max_bytes=1), now_s=100.0)

    found = stored(tmp_path)
    assert len(found) == 2 * len(KEYS)
    assert sum(row.nonfinite for _, row in found.values()) == sum(row.nonfinite for row in rows.values()) > 0


def test_many_small_segments_are_joined_as_they_are(segments, tmp_path):
    for step in range(25):
        store(segments, [step], rng=np.random.default_rng(step))
    before = stored(tmp_path)

    compact(segments, FOREVER, now_s=100.0)

    assert stored(tmp_path) == before
    assert len(cover(segments)) == 1


def test_what_is_joined_stays_sorted_by_series(segments):
    for step in range(12):
        store(segments, [step])

    compact(segments, FOREVER, now_s=100.0)

    with open_run(segments.parents[2]) as connection:
        found = connection.execute("SELECT kind, name, micro_step, rank, step FROM all_stats").fetchall()
    assert found == sorted(found, key=lambda row: (*row[:2], math.inf if row[2] is None else row[2], *row[3:]))


def test_a_writer_goes_on_where_it_was_after_a_merge_and_beside_it(segments):
    for step in range(12):
        store(segments, [step], attempt=1 + step // 6)
    writer = SegmentWriter(segments)

    compact(segments, FOREVER, now_s=100.0)

    assert read_cursors(segments) == {0: JournalPosition(2, Cursor(1, 11)), 1: JournalPosition(2, Cursor(1, 11))}
    assert read_metadata(cover(segments)[-1].path).attempts == {1: 0, 2: 6}
    values = np.ones((8, 1))
    writer.add(header(), KEYS, StatBlock(step=12, time_s=12.0, series=np.zeros(1, np.uint32), values=values))
    assert writer.commit({}).name == "0000000013-0000000013.parquet"
    assert [(file.first, file.last) for file in cover(segments)] == [(1, 12), (13, 13)]


def test_merged_windows_end_where_a_later_attempt_begins(segments, tmp_path):
    store(segments, range(10), attempt=1)
    store(segments, range(4, 14), attempt=2)

    compact(segments, AT_ONCE, now_s=100.0)

    steps = {(attempt, step) for attempt, _, step, _ in stored(tmp_path, "stats")}
    assert steps == {(1, 3), (2, 9), (2, 13)}


def test_the_step_table_shows_the_mean_step_of_a_window(segments, tmp_path):
    writer = SegmentWriter(segments)
    for step in range(10):
        values = np.array([[1, 2.0, 2.0, 2.0, 4.0, 0, 0, 0], [4, 3.0, 3.0, 12.0, 36.0, 0, 0, 0]]).T
        series = np.arange(2, dtype=np.uint32)
        block = StatBlock(step=step, time_s=float(step), series=series, values=np.ascontiguousarray(values))
        writer.add(header(), KEYS, block)
    writer.commit({})

    compact(segments, AT_ONCE, now_s=100.0)

    with open_run(tmp_path) as connection:
        assert connection.execute("SELECT step, num_steps, loss, grad_norm FROM steps").fetchall() == [
            (9, 10, 2.0, 6.0)
        ]


def test_it_runs_as_a_program_and_only_once_at_a_time(segments, caplog):
    for step in range(12):
        store(segments, [step])
    command = [sys.executable, "-m", "trainermon.exporters.store.retention", segments, "--full-detail-hours", "1e9"]

    with (segments / LOCK_FILE).open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        subprocess.run(command, check=True, capture_output=True)
        assert len(cover(segments)) == 12
    subprocess.run(command, check=True, capture_output=True)
    assert len(cover(segments)) == 1
    assert subject.main([str(segments / "nowhere")]) == 1
    assert "nowhere" in caplog.text


def test_the_next_writer_leaves_alone_what_a_merge_is_about_to_rename(segments):
    store(segments, [1])
    code = (
        "import pathlib, sys; from trainermon.exporters.store.store import SegmentWriter\n"
        "SegmentWriter(pathlib.Path(sys.argv[1]))"
    )
    unfinished = segments / ".0000000001-0000000012.parquet.tmp"
    unfinished.touch()

    with (segments / LOCK_FILE).open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        subprocess.run([sys.executable, "-c", code, segments], check=True)
        assert unfinished.exists()
    subprocess.run([sys.executable, "-c", code, segments], check=True)
    assert not unfinished.exists()


@pytest.mark.parametrize("read", ["cover", "_readable"])
def test_segments_that_are_merged_while_a_run_is_being_opened_lose_no_row(segments, tmp_path, monkeypatch, read):
    for step in range(25):
        store(segments, [step])
    before = stored(tmp_path)
    real = vars(tables)[read]

    def and_then_merge(*arguments):
        found = real(*arguments)
        compact(segments, FOREVER, now_s=100.0)
        return found

    monkeypatch.setattr(tables, read, and_then_merge)

    with open_run(tmp_path) as connection:
        assert connection.execute("SELECT count(*) FROM stats").fetchall() == [(len(before),)]


@pytest.mark.parametrize("event", ["before", "after"])
def test_a_merge_that_is_interrupted_at_its_commit_changes_nothing_that_is_read(segments, tmp_path, monkeypatch, event):
    for step in range(12):
        store(segments, [step])
    before = stored(tmp_path)
    write = vars(subject)["write_segment"]

    def interrupted(*arguments):
        if event == "after":
            write(*arguments)
        raise StoreError("interrupted")

    monkeypatch.setattr(subject, "write_segment", interrupted)
    with pytest.raises(StoreError, match="interrupted"):
        compact(segments, FOREVER, now_s=100.0)

    assert stored(tmp_path) == before
    SegmentWriter(segments)
    assert stored(tmp_path) == before
    assert len(list(segments.glob("*.parquet"))) == (1 if event == "after" else 12)
