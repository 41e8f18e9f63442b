"""Histograms in the store: exactly the counts of the journals, in files, tables and merges."""

import dataclasses
import itertools

import numpy as np
import pytest

from tests.core.journals import make_block, make_header, make_keys
from trainermon.core.values import BIN_BOUNDS, BlockHistograms, Coordinates
from trainermon.exporters.store import store as store_module
from trainermon.exporters.store.blocks import read_blocks
from trainermon.exporters.store.retention import RetentionPolicy, compact
from trainermon.exporters.store.store import SegmentWriter, open_run

KEYS = make_keys(3)
COUNTED_STEPS = (1, 12, 14)


def histograms(step):
    """Return histograms of the series 2 and 0, of larger numbers than 32 bits hold."""
    counts = np.random.default_rng(step).integers(0, 2**33, (2, 128)).astype(np.uint64)
    return BlockHistograms(places=np.array([2, 0], np.uint32), counts=counts)


def block_of(step):
    return dataclasses.replace(make_block(step), histograms=histograms(step) if step in COUNTED_STEPS else None)


@pytest.fixture
def segments(tmp_path):
    """Two ranks, 20 steps, in two segments; the ranks' blocks are the same."""
    directory = tmp_path / "nodes" / "node" / "segments"
    writer = SegmentWriter(directory)
    for step, rank in itertools.product(range(20), (0, 1)):
        header = make_header(coordinates=Coordinates(rank=rank, world_size=2, dp=rank), series=tuple(KEYS))
        writer.add(header, KEYS, block_of(step))
        if (step, rank) == (9, 1):
            writer.commit({})
    writer.commit({})
    return directory


def test_blocks_come_back_with_their_histograms(segments):
    found = {(block.step, header.coordinates.rank): block for header, block in read_blocks(segments)}

    assert found.keys() == set(itertools.product(range(20), (0, 1)))
    for (step, _), block in found.items():
        np.testing.assert_array_equal(block.values, block_of(step).values)
        if step in COUNTED_STEPS:
            assert block.histograms.places.tolist() == [0, 2]
            np.testing.assert_array_equal(block.histograms.counts, histograms(step).counts[::-1])
        else:
            assert block.histograms is None


def test_sql_reaches_the_counts_and_their_bounds(segments, tmp_path):
    with open_run(tmp_path) as connection:
        rows = connection.execute(
            "SELECT step, name, histogram FROM stats WHERE histogram IS NOT NULL AND rank = 1 ORDER BY step, name"
        ).fetchall()
        bins = connection.execute(
            "SELECT low, high, count FROM histograms WHERE rank = 1 AND name = 'p2' AND step = 12 ORDER BY low"
        ).fetchall()
        ((whole,),) = connection.execute(
            "SELECT sum(count) FROM histograms WHERE in_global_norm AND name = 'p0' AND step = 1"
        ).fetchall()

    assert [row[:2] for row in rows] == list(itertools.product(COUNTED_STEPS, ("p0", "p2")))
    assert [row[2] for row in rows[:2]] == histograms(1).counts[::-1].tolist()
    expected = histograms(12).counts[0].tolist()
    assert bins[:-1] == [
        (*bounds, count) for bounds, count in zip(BIN_BOUNDS[:-1], expected[:-1], strict=True) if count
    ]
    assert bins[-1] == (None, None, expected[-1])
    assert whole == histograms(1).counts[1].sum(), "of two copies one counts"


def test_a_merge_over_steps_adds_the_counts_of_those_that_have_some(segments, tmp_path):
    compact(segments, RetentionPolicy(full_detail_s=0.0), now_s=1000.0)

    with open_run(tmp_path) as connection:
        rows = connection.execute(
            "SELECT step, rank, name, num_steps, histogram FROM stats ORDER BY step, rank, name"
        ).fetchall()

    expected = {9: histograms(1).counts, 19: histograms(12).counts + histograms(14).counts}
    assert [row[:4] for row in rows] == [
        (*place, 10) for place in itertools.product((9, 19), (0, 1), ("p0", "p1", "p2"))
    ]
    for step, _, name, _, found in rows:
        assert found == {"p0": expected[step][1].tolist(), "p1": None, "p2": expected[step][0].tolist()}[name]


def test_rows_that_are_left_out_take_their_histograms_with_them():
    ids = np.arange(3, dtype=np.uint32)
    part = store_module._BlockPart(1, 0, 5, 0.0, ids, np.zeros((8, 3)), histograms(1))

    kept = store_module._of_rows(part, np.array([False, True, True]))

    assert kept.ids.tolist() == [1, 2]
    assert kept.histograms.places.tolist() == [1]
    np.testing.assert_array_equal(kept.histograms.counts, histograms(1).counts[:1])
