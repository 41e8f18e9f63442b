"""What is read of split tensors without the compiled library is what numpy has there."""

import itertools
import math
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainermon.analysis.checkpoint import sums
from trainermon.analysis.checkpoint.boxes import PlacedView, dense_strides
from trainermon.analysis.checkpoint.comparison import CheckpointOptions, compare_checkpoints
from trainermon.analysis.checkpoint.pieces import StoredArray
from trainermon.analysis.checkpoint.sums import read_of
from trainermon.core.errors import CheckpointError
from trainermon.statistics import pairs

SHAPES = st.lists(st.integers(1, 7), max_size=4).map(tuple)


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    """Few elements at a time, so that views are taken apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "_CHUNK", 5)
        yield


@given(SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape))))))
def test_a_view_of_any_strides_is_read_as_it_is(tmp_path_factory, case):
    shape, order = case
    values = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    path = tmp_path_factory.getbasetemp() / "elements"
    path.write_bytes(b"head" + values.tobytes())
    turned = values.transpose(order)
    strides = tuple(dense_strides(shape)[dim] for dim in order)
    stored = StoredArray(path, 4, "int32", turned.shape, strides)

    found = read_of(PlacedView((0,) * len(shape), turned.shape, stored, 0, strides, ""))

    assert np.array_equal(found, turned)


@given(SHAPES)
def test_blocks_make_up_a_box_in_c_order(shape):
    numbers = np.arange(math.prod(shape)).reshape(shape)

    blocks = list(sums._blocks((0,) * len(shape), shape))
    places = [tuple(map(slice, starts, np.add(starts, sizes))) for starts, sizes in blocks]
    found = [numbers[place].reshape(-1) for place in places]

    assert list(itertools.chain(*map(list, found))) == list(range(numbers.size))
    assert max(map(len, found)) <= 5


def test_a_file_that_is_cut_while_numpy_reads_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(pairs, "is_available", lambda: False)
    for side in "ab":
        np.save(tmp_path / f"{side}.npy", np.ones(5_000, np.float32))
    original = sums._numpy_sums

    def cut(*arguments):
        os.truncate(tmp_path / "b.npy", 256)
        return original(*arguments)

    monkeypatch.setattr(sums, "_numpy_sums", cut)

    with pytest.raises(CheckpointError, match=r"b\.npy was written while it was read: wait until"):
        compare_checkpoints(
            tmp_path / "a.npy", tmp_path / "b.npy", options=CheckpointOptions(renamed={"b": "a"}, jobs=1)
        )
