"""Histograms of a row are those that numpy makes of the tensors of all ranks together."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest

from tests.exporters.recorded_run import BAD_STEP, GRADIENTS, commit, counted_run, tensors_of
from tests.statistics.histogram_truth import numpy_histogram
from trainermon.core.errors import QueryError
from trainermon.core.values import BIN_BOUNDS, Kind
from trainermon.exporters.store.curves import CurveQuery
from trainermon.exporters.store.histograms import encode_histograms, read_histogram_table, read_histograms

NUM_STEPS = 12
ROW = CurveQuery(heat_map="grad_reduced", row=GRADIENTS[1].label)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run: Path = tmp_path_factory.mktemp("run")
    counted_run(run, range(NUM_STEPS))
    return run


def truth(step: int) -> np.ndarray:
    return np.asarray(sum(numpy_histogram(tensors_of(rank, step)[GRADIENTS[1]].ravel()) for rank in (0, 1)))


def test_counts_are_those_of_numpy(run_dir: Path) -> None:
    found = read_histograms(run_dir, ROW)

    assert found.first.tolist() == found.last.tolist() == list(range(NUM_STEPS))
    for step in range(NUM_STEPS):
        np.testing.assert_array_equal(found.counts[step], truth(step))
    assert found.counts[BAD_STEP, -1] == 2


def test_more_steps_than_points_are_added_up(run_dir: Path) -> None:
    query = CurveQuery(heat_map="grad_reduced", row=ROW.row, first=2, last=8, points=3)
    found = read_histograms(run_dir, query)

    assert (found.first.tolist(), found.last.tolist()) == ([2, 4, 6], [3, 5, 8])
    np.testing.assert_array_equal(found.counts[2], truth(6) + truth(7) + truth(8))
    assert found.counts.sum() == 7 * 2 * 30


def test_a_table_has_every_bin_with_its_bounds(run_dir: Path) -> None:
    lines = list(csv.DictReader(io.StringIO(read_histogram_table(run_dir, ROW).decode())))

    bad = [line for line in lines if line["step"] == str(BAD_STEP)]
    told = {(line["low"], line["high"]): int(line["count"]) for line in bad}
    expected = truth(BAD_STEP)
    finite = {(str(low), str(high)): int(expected[bin]) for bin, (low, high) in enumerate(BIN_BOUNDS[:-1])}
    assert told == {bounds: count for bounds, count in finite.items() if count} | {("", ""): 2}


def test_the_page_gets_bounds_steps_and_counts(run_dir: Path) -> None:
    found = read_histograms(run_dir, ROW)
    content = encode_histograms(found, ROW)

    size = int.from_bytes(content[:4], "little")
    header, numbers = json.loads(content[4 : 4 + size]), np.frombuffer(content, "<f8", offset=4 + size)
    assert header["size"] == NUM_STEPS
    assert header["bounds"][:2] == [[None, -(2.0**16)], [-(2.0**16), -(2.0**15)]]
    assert (header["bounds"][63], header["bounds"][-1]) == ([0.0, 0.0], [None, None])
    np.testing.assert_array_equal(numbers[2 * NUM_STEPS :].reshape(NUM_STEPS, 128), found.counts)


def test_a_run_without_histograms_has_none_and_an_unknown_row_is_an_error(tmp_path: Path) -> None:
    segments = tmp_path / "nodes" / "host-a" / "segments"
    segments.mkdir(parents=True)
    commit(segments, range(2))

    assert read_histograms(tmp_path, ROW).counts.shape == (0, 128)
    with pytest.raises(QueryError, match="is no row of"):
        read_histograms(tmp_path, CurveQuery(heat_map=Kind.ACTV.value, row="h.0"))
