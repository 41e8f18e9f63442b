import dataclasses
import json
import math
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainermon.core.errors import StoreError
from trainermon.core.journal import Cursor, Header
from trainermon.core.values import STATISTICS, Coordinates, Kind, Moments, Placement, SeriesKey, StatBlock
from trainermon.exporters.store import segments
from trainermon.exporters.store.blocks import read_blocks
from trainermon.exporters.store.segments import LOCK_FILE, JournalPosition, clean, cover, read_metadata
from trainermon.exporters.store.store import SegmentWriter, open_run, read_cursors

LOSS = SeriesKey(Kind.LOSS, "loss")
DURATION = SeriesKey(Kind.STEP, "duration_seconds")
GRADS = (SeriesKey(Kind.GRAD_REDUCED, "embed.weight"), SeriesKey(Kind.GRAD_REDUCED, "head.weight"))
KEYS = (*GRADS, LOSS, DURATION)
COUNTS = ("count", "zeros", "nans", "infs")


def header(rank=0, attempt=1, keys=KEYS, placements=None):
    return Header(
        run_id="run",
        attempt=attempt,
        coordinates=Coordinates(rank=rank, world_size=2, dp=rank, dp_size=2),
        host="node",
        pid=1,
        started_s=0.0,
        series=tuple(keys),
        placements=tuple(placements or [None] * len(keys)),
    )


def block(step, columns, *, series=None):
    """A block whose series have these moments, one tuple of eight each."""
    values = np.ascontiguousarray(np.array(columns, np.float64).reshape(-1, len(STATISTICS)).T)
    ids = np.arange(values.shape[1]) if series is None else np.array(list(series))
    return StatBlock(step=step, time_s=1000.0 + step, series=ids.astype(np.uint32), values=values)


def plain(value, *, count=4):
    """Moments of `count` times the same finite value."""
    return (count, value, value, count * value, count * value**2, count * (value == 0), 0, 0)


def node_of(run_dir, host="node"):
    return run_dir / "nodes" / host / "segments"


def rows_of(run_dir, sql):
    with open_run(run_dir) as connection:
        return connection.execute(sql).fetchall()


numbers = st.floats(allow_nan=False) | st.sampled_from([0.0, 1e-310, 1e308])
moments = st.tuples(*[st.integers(0, 2**53) if name in COUNTS else numbers for name in STATISTICS])
names = st.sampled_from(["", "a"]) | st.text(max_size=8).filter(lambda text: "\0" not in text and text.isprintable())
keys = st.builds(
    SeriesKey,
    st.sampled_from([Kind.ACTV, Kind.LOSS]),
    names,
    names,
    st.integers(0, 1),
    st.none() | st.integers(0, 1),
    st.integers(0, 1),
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(keys, min_size=1, max_size=6, unique=True), st.data())
def test_whatever_was_added_is_found_again_with_its_series_rank_and_step(tmp_path_factory, table, data):
    directory = tmp_path_factory.mktemp("run")
    writer = SegmentWriter(directory)
    expected = {}
    for step in range(data.draw(st.integers(1, 3))):
        for rank in range(2):
            chosen = data.draw(st.lists(st.integers(0, len(table) - 1), unique=True))
            columns = data.draw(st.lists(moments, min_size=len(chosen), max_size=len(chosen)))
            writer.add(header(rank, keys=table), table, block(step, columns, series=chosen))
            expected.update({(rank, step, table[place]): row for place, row in zip(chosen, columns, strict=True)})
        if data.draw(st.booleans()):
            writer.commit({})
    writer.commit({})

    found = {}
    for head, stored in read_blocks(directory):
        for place, row in zip(stored.series, stored.values.T, strict=True):
            found[head.coordinates.rank, stored.step, head.series[place]] = tuple(row)

    assert found == expected


def test_series_that_differ_in_one_field_are_kept_apart(tmp_path):
    base = SeriesKey(Kind.ACTV, "h.0", "input.0", 1, 1, 1)
    others: dict[str, Any] = {
        "kind": Kind.ACTV_GRAD,
        "name": "h.1",
        "slot": "input.1",
        "call": 2,
        "micro_step": None,
        "stage": 2,
    }
    table = [base, *(dataclasses.replace(base, **{field: value}) for field, value in others.items())]
    writer = SegmentWriter(tmp_path)
    writer.add(header(keys=table), table, block(0, [plain(float(place)) for place in range(len(table))]))
    writer.commit({})

    ((head, stored),) = read_blocks(tmp_path)

    found = {head.series[place]: row[1] for place, row in zip(stored.series, stored.values.T, strict=True)}
    assert found == {key: float(place) for place, key in enumerate(table)}


def test_a_row_of_the_views_has_the_derived_statistics_of_its_moments(tmp_path):
    rows = [(5, -1.0, 3.0, 2.0, 10.0, 1, 1, 0), (0, math.inf, -math.inf, 0.0, 0.0, 0, 0, 0)]
    writer = SegmentWriter(node_of(tmp_path))
    writer.add(header(), KEYS, block(0, rows))
    writer.commit({})

    found = rows_of(tmp_path, "SELECT finite, nonfinite, mean, norm, rms, std, zero_ratio FROM stats ORDER BY name")

    truth = Moments(*rows[0])
    names = ("finite", "nonfinite", "mean", "norm", "rms", "std", "zero_ratio")
    assert found[0] == pytest.approx(tuple(getattr(truth, name) for name in names))
    assert found[1] == (0, 0, None, 0.0, None, None, None)


@pytest.mark.parametrize(("num_series", "num_steps", "ranks"), [(4, 2, (1, 0)), (300, 1, (0,)), (5000, 3, (0,))])
def test_rows_are_sorted_by_series_and_then_by_attempt_rank_and_step(tmp_path, num_series, num_steps, ranks):
    table = [SeriesKey(Kind.ACTV, f"h.{place:03d}") for place in reversed(range(num_series))]
    placements = [Placement(dtype="f32", shape=(4,))] * num_series
    writer = SegmentWriter(node_of(tmp_path))
    for step in range(num_steps):
        for rank in ranks:
            head = header(rank, keys=table, placements=placements)
            chosen = range(0, num_series, 1 + num_series // 300)
            writer.add(head, table, block(step, [plain(1.0)] * len(chosen), series=chosen))
    path = writer.commit({})

    with duckdb.connect() as connection:
        found = connection.execute(f"SELECT kind, name, rank, step FROM '{path}'").fetchall()

    assert found == sorted(found)
    assert len(found) == len(chosen) * num_steps * len(ranks)


def test_the_series_table_may_grow_and_differ_between_ranks(tmp_path):
    late = SeriesKey(Kind.ACTV, 'it\'s "late"', "input.0", 1, 2, 1)
    writer = SegmentWriter(node_of(tmp_path))
    writer.add(header(0), KEYS, block(0, [plain(1.0)] * 4))
    writer.add(header(0), (*KEYS, late), block(1, [plain(2.0)], series=[4]))
    writer.add(header(1, keys=KEYS[::-1]), KEYS[::-1], block(0, [plain(3.0)], series=[0]))
    writer.commit({})

    found = rows_of(tmp_path, "SELECT kind, name, slot, call, micro_step, stage, rank, max FROM stats WHERE max > 1")

    assert sorted(found) == [
        ("actv", 'it\'s "late"', "input.0", 1, 2, 1, 0, 2.0),
        ("step", "duration_seconds", "", 0, None, 0, 1, 3.0),
    ]


def test_positions_and_attempts_go_on_over_restarts(tmp_path):
    first = SegmentWriter(tmp_path)
    first.add(header(0), KEYS, block(7, [plain(1.0)] * 4))
    first.add(header(1), KEYS, block(6, [plain(1.0)] * 4))
    first.commit({0: JournalPosition(1, Cursor(3, 70)), 1: JournalPosition(1, Cursor(3, 80))})

    second = SegmentWriter(tmp_path)
    second.add(header(0, attempt=2), KEYS, block(4, [plain(1.0)] * 4))
    path = second.commit({0: JournalPosition(2, Cursor(4, 50))})

    assert path == tmp_path / "0000000002-0000000002.parquet"
    assert read_cursors(tmp_path) == {0: JournalPosition(2, Cursor(4, 50)), 1: JournalPosition(1, Cursor(3, 80))}
    metadata = read_metadata(path)
    assert metadata.attempts == {1: 6, 2: 4}
    assert metadata.coordinates[1]["dp"] == 1
    assert (metadata.num_rows, metadata.last_time_s, metadata.window_steps) == (4, 1004.0, 1)


def test_without_rows_there_is_nothing_to_commit(tmp_path):
    writer = SegmentWriter(tmp_path)
    writer.add(header(), KEYS, block(0, []))

    assert writer.commit({0: JournalPosition(1, Cursor(1, 1))}) is None
    assert read_cursors(tmp_path) == {}
    assert read_cursors(tmp_path / "nowhere") == {}


def test_a_batch_may_be_written_twice_and_while_the_next_is_gathered(tmp_path):
    writer = SegmentWriter(node_of(tmp_path))
    writer.add(header(), KEYS, block(0, [plain(1.0)] * 4))
    batch = writer.seal({})
    writer.add(header(), KEYS, block(1, [plain(1.0)] * 4))

    batch.write()
    batch.write()
    writer.commit({})

    assert rows_of(tmp_path, "SELECT step, count(*) FROM stats GROUP BY step ORDER BY step") == [(0, 4), (1, 4)]


def test_a_full_or_missing_disk_is_an_error_that_leaves_nothing(tmp_path):
    writer = SegmentWriter(tmp_path / "gone")
    writer.add(header(), KEYS, block(0, [plain(1.0)] * 4))
    batch = writer.seal({})
    shutil.rmtree(tmp_path / "gone")

    with pytest.raises(StoreError, match=r"0000000001-0000000001\.parquet: the segment could not be written"):
        batch.write()
    batch.path.mkdir(parents=True)
    with pytest.raises(StoreError, match="could not be written"):
        batch.write()
    assert list(batch.path.parent.iterdir()) == [batch.path]
    batch.path.rmdir()
    assert batch.write().is_file()


def test_a_disk_that_fills_up_while_writing_leaves_nothing(tmp_path):
    script = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from tests.exporters.store.test_store import KEYS, SegmentWriter, StoreError, block, header

writer = SegmentWriter(Path(sys.argv[1]))
rng = np.random.default_rng(0)
for step in range(2000):
    writer.add(header(), KEYS, block(step, rng.random((4, 8))))
batch = writer.seal({})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
try:
    batch.write()
except StoreError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(*(path.name for path in Path(sys.argv[1]).iterdir()))
batch.write()
"""
    root = Path(__file__).parents[3]

    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True, cwd=root
    )

    error, left = done.stdout.splitlines()
    assert "could not be written" in error
    assert left == LOCK_FILE
    assert len(cover(tmp_path)) == 1


def test_counts_that_are_no_numbers_do_not_stop_the_store(tmp_path):
    writer = SegmentWriter(node_of(tmp_path))
    writer.add(header(), KEYS, block(0, [(math.nan, 0, 0, 0, 0, math.inf, 0, 0)]))

    assert writer.commit({}) is not None


def test_files_are_private_to_the_user(tmp_path):
    writer = SegmentWriter(tmp_path / "segments")
    writer.add(header(), KEYS, block(0, [plain(1.0)] * 4))
    path = writer.commit({})

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("names", "live"),
    [
        ([], []),
        (["1-1", "2-2", "3-3"], ["1-1", "2-2", "3-3"]),
        (["1-1", "2-2", "1-2", "3-3"], ["1-2", "3-3"]),
        (["1-4", "2-2", "5-5", "1-1", "5-6"], ["1-4", "5-6"]),
        (["1-2", "1-4", "3-4", "9-9"], ["1-4", "9-9"]),
    ],
)
def test_the_live_set_is_the_cover_of_ranges(tmp_path, names, live):
    def path(name):
        first, last = name.split("-")
        return tmp_path / f"{int(first):010d}-{int(last):010d}.parquet"

    for name in names:
        path(name).touch()
    for other in (".0000000009-0000000009.parquet.tmp", "notes.txt", "1-2.parquet"):
        (tmp_path / other).touch()

    assert [segment.path for segment in cover(tmp_path)] == [path(name) for name in live]
    clean(tmp_path)
    kept = {path(name) for name in live} | {tmp_path / "notes.txt", tmp_path / "1-2.parquet", tmp_path / LOCK_FILE}
    assert set(tmp_path.iterdir()) == kept


def test_a_damaged_or_foreign_segment_is_named(tmp_path):
    path = tmp_path / "0000000001-0000000001.parquet"
    path.write_bytes(b"PAR1 torn")

    with pytest.raises(StoreError, match=r"0000000001-0000000001\.parquet: not a segment of format 1"):
        read_metadata(path)
    path.unlink()
    with duckdb.connect() as connection:
        connection.execute(
            f"COPY (SELECT 1 AS a) TO '{path}' (KV_METADATA {{trainermon: '{json.dumps({'format': 9})}'}})"
        )
    with pytest.raises(StoreError, match="found format 9, expected 1"):
        read_cursors(tmp_path)
    with pytest.raises(StoreError, match="found format 9, expected 1"):  # a newer release wrote it: left as it is
        SegmentWriter(tmp_path)
    assert path.exists()


def test_the_newest_segment_may_be_merged_away_while_it_is_looked_for(tmp_path, monkeypatch):
    writer = SegmentWriter(tmp_path)
    writer.add(header(), KEYS, block(0, [plain(1.0)] * 4))
    path = writer.commit({0: JournalPosition(1, Cursor(2, 3))})
    real = segments.read_metadata

    def read(wanted):
        if wanted == path:
            wanted.replace(tmp_path / "0000000001-0000000002.parquet")
        return real(wanted)

    monkeypatch.setattr(segments, "read_metadata", read)

    assert read_cursors(tmp_path) == {0: JournalPosition(1, Cursor(2, 3))}


def test_a_run_without_any_segment_has_empty_tables(tmp_path):
    for table in ("stats", "all_stats", "steps", "step_values", "alerts", "alerts_handled"):
        assert rows_of(tmp_path, f"FROM {table}") == []
    with pytest.raises(StoreError, match="no such run directory"):
        open_run(tmp_path / "nowhere")


def test_all_nodes_are_read(tmp_path):
    for rank, host in enumerate(("a", "b")):
        writer = SegmentWriter(node_of(tmp_path, host))
        writer.add(header(rank), KEYS, block(0, [plain(1.0)] * 4))
        writer.commit({})

    assert rows_of(tmp_path, "SELECT DISTINCT rank FROM stats ORDER BY rank") == [(0,), (1,)]


def test_stats_hold_the_last_attempt_and_all_stats_every_one(tmp_path):
    for rank, host in enumerate(("a", "b")):  # the nodes store at different times
        writer = SegmentWriter(node_of(tmp_path, host))
        for attempt, steps in ((1, range(11)), (2, range(8, 15)), (3, range(12 + rank, 14))):
            for step in steps:
                writer.add(header(rank, attempt), KEYS, block(step, [plain(1.0)] * 4))
            writer.commit({})

    found = rows_of(tmp_path, "SELECT rank, step, attempt FROM stats WHERE kind = 'loss' ORDER BY ALL")
    history = [(step, 1) for step in range(8)] + [(step, 2) for step in range(8, 12)]
    last = {0: [(12, 3), (13, 3)], 1: [(13, 3)]}
    assert found == [(rank, *place) for rank in (0, 1) for place in history + last[rank]]
    assert rows_of(
        tmp_path, "SELECT attempt, count(*) FROM all_stats WHERE kind = 'loss' GROUP BY ALL ORDER BY ALL"
    ) == [
        (1, 22),
        (2, 14),
        (3, 3),
    ]


def test_dtype_shape_and_start_are_kept_and_missing_in_segments_of_earlier_versions(tmp_path):
    placements = [Placement(dtype="bfloat16", shape=(2, 2)), Placement(dtype="float32", shape=())]
    writer = SegmentWriter(node_of(tmp_path))
    for step in range(2):
        head = header(0, keys=KEYS[:2], placements=placements)
        writer.add(head, KEYS[:2], block(step, [plain(1.0), plain(2.0)], series=[0, 1]))
        path = writer.commit({})
    with duckdb.connect() as connection:  # as it was written before there were these columns
        plain_metadata = json.loads(read_metadata(path).to_json())
        del plain_metadata["started_s"]
        connection.execute(
            f"COPY (SELECT * EXCLUDE (dtype, shape) FROM read_parquet('{path}')) TO '{path}'"
            f" (FORMAT parquet, KV_METADATA {{trainermon: '{json.dumps(plain_metadata)}'}})"
        )

    found = rows_of(tmp_path, "SELECT step, name, dtype, shape FROM stats ORDER BY step, dtype")
    (first, _), (second, _) = read_blocks(node_of(tmp_path))

    names = [key.name for key in KEYS[:2]]
    assert found[:2] == [(0, names[0], "bfloat16", "[2, 2]"), (0, names[1], "float32", "[]")]
    assert sorted(found[2:]) == sorted((1, name, None, None) for name in names)
    assert {(at.dtype, at.shape) for at in first.placements} == {("bfloat16", (2, 2)), ("float32", ())}
    assert {(at.dtype, at.shape) for at in second.placements} == {("", ())}
    assert (first.started_s, second.started_s) == (head.started_s, 0.0)


def test_steps_tell_loss_norm_and_duration_over_all_ranks(tmp_path):
    replica = [Placement(dtype="f32", shape=(4,), in_global_norm=False)] * 2 + [None, None]
    scaled = [Placement(dtype="f32", shape=(4,), scale=2.0)] * 2 + [None, None]
    writer = SegmentWriter(node_of(tmp_path))
    writer.add(header(0, placements=scaled), KEYS, block(0, [plain(3.0), plain(4.0), plain(1.0, count=1), plain(0.5)]))
    writer.add(
        header(1, placements=replica), KEYS, block(0, [plain(9.0), plain(4.0), plain(2.0, count=1), plain(0.75)])
    )
    writer.commit({})

    found = rows_of(tmp_path, "SELECT step, num_ranks, loss, grad_norm, duration_s, num_steps FROM steps")

    assert found == [(0, 2, 1.5, math.sqrt(4 * (9 + 16)) / 2, 0.75, 1)]


def test_step_values_are_one_row_for_each_rank_and_step(tmp_path):
    placements = [Placement(dtype="f32", shape=(4,), scale=2.0), None]
    losses = [SeriesKey(Kind.LOSS, "loss", micro_step=number) for number in range(2)]
    tokens = [SeriesKey(Kind.STEP, "tokens", micro_step=number) for number in range(2)]
    rates = [SeriesKey(Kind.STEP, "learning_rate", group) for group in ("0", "10", "2")]
    names = ("global_grad_norm", "clip_ratio", "loss_scale", "skipped", "tokens_per_second", "learning_rate", "mine")
    keys = [GRADS[0], SeriesKey(Kind.GRAD_UNREDUCED, "w"), SeriesKey(Kind.GRAD_UNREDUCED, "w", micro_step=0)]
    keys += [*losses, *tokens, *rates, *(SeriesKey(Kind.STEP, name) for name in names), DURATION]
    numbers = (2, 4, 100, 50, 0.1, 0.3, 0.2, 5, 0.5, 1024, 1, 300, 9, 7, 0.25)
    writer = SegmentWriter(node_of(tmp_path))
    for rank in range(2):
        head = header(rank, keys=keys, placements=[*placements, *[None] * (len(keys) - 2)])
        values = [plain(3.0), plain(2.0 + rank), plain(99.0), *(plain(value, count=1) for value in numbers)]
        writer.add(head, keys, block(7, values))
    bad = (1, math.inf, -math.inf, 0, 0, 0, 0, 1)
    writer.add(head, keys, block(8, [plain(1.0), bad, bad], series=[1, 3, 10]))
    writer.commit({})

    found = rows_of(tmp_path, "SELECT * EXCLUDE (attempt, num_steps, time_s) FROM step_values")

    rest = (5, 0.5, 1024, 1, 150, 300, 0.3, [0.1, 0.2, 0.3], {"learning_rate": 9.0, "mine": 7.0})
    assert found == [
        (7, 0, 0.25, 3, 4, 3, *rest),
        (7, 1, 0.25, 3, 6, 3, *rest),
        (8, 1, None, math.inf, 2, None, math.inf, *[None] * 8),
    ]


def test_of_a_rank_without_numbers_the_step_values_have_its_norms(tmp_path):
    writer = SegmentWriter(node_of(tmp_path))
    writer.add(header(), KEYS, block(3, [plain(2.0)], series=[0]))
    writer.commit({})

    assert rows_of(tmp_path, "SELECT step, rank, num_steps, time_s, grad_norm, loss FROM step_values") == [
        (3, 0, 1, 1003.0, 4.0, None)
    ]


def test_a_rank_is_there_whatever_it_recorded(tmp_path):
    writer = SegmentWriter(node_of(tmp_path))
    keys = (SeriesKey(Kind.ACTV, "h.0", "output.0"), SeriesKey(Kind.LOSS, "loss"))
    for rank, recorded in enumerate([(0,), (0, 1), (1,)]):
        chosen = tuple(keys[place] for place in recorded)
        writer.add(header(rank), chosen, block(0, [plain(1.0)] * len(chosen)))
    writer.add(header(1), keys[:1], block(1, [plain(1.0)]))
    writer.commit({})

    assert rows_of(tmp_path, "SELECT step, num_ranks, loss FROM steps") == [(0, 3, 1.0), (1, 1, None)]


@pytest.mark.parametrize(
    ("nans", "infs", "shown"), [(1, 0, math.nan), (0, 1, math.inf), (1, 1, math.nan), (0, 0, 1.0)], ids=str
)
def test_steps_tell_nan_from_infinity(tmp_path, nans, infs, shown):
    finite = 4 - nans - infs
    moments = (4, 1.0, 1.0, finite, finite / 4, 0, nans, infs)
    writer = SegmentWriter(node_of(tmp_path))
    writer.add(header(0), KEYS, block(0, [moments, plain(0.0), moments, moments]))
    writer.add(header(1), KEYS, block(0, [plain(1.0)] * 4))
    writer.commit({})

    (found,) = rows_of(tmp_path, "SELECT loss, grad_norm FROM steps")

    np.testing.assert_equal(found, (shown, shown))
