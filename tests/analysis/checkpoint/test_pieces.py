"""Elements are mapped where they are, with their strides."""

from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trainermon.analysis.checkpoint.pieces import Box, Chunks, Piece, StoredArray, TensorPieces
from trainermon.core.errors import CheckpointError


def test_a_strided_part_of_a_file_is_what_numpy_has_there(tmp_path):
    values = np.arange(60, dtype="<f4").reshape(6, 10)
    (tmp_path / "elements").write_bytes(b"header" + values.tobytes())

    stored = StoredArray(tmp_path / "elements", 6 + 4 * 11, "float32", (3, 4), (1, 10))

    assert np.array_equal(stored.array(), values.T[1:4, 1:5])
    assert not stored.array().flags.writeable


def test_a_file_that_became_shorter_is_named(tmp_path):
    (tmp_path / "elements").write_bytes(bytes(15))

    with pytest.raises(CheckpointError, match="elements has 15 bytes, 16 are needed"):
        StoredArray(tmp_path / "elements", 0, "float32", (4,), (1,)).array()


def test_chunks_are_pieces_whether_one_several_or_all_are_asked_for():
    boxes = [Box((row, 0), (1, 4)) for row in range(3)]
    like = [StoredArray(Path(name), 0, "float32", (1, 4), (4, 1)) for name in ("a.distcp", "b.distcp")]
    expected = [
        Piece(box, replace(like[file], offset=offset), like[file].path.name)
        for box, file, offset in zip(boxes, (0, 1, 1), (7, 8, 9), strict=True)
    ]

    found = Chunks(boxes, [like[0], like[1], like[1]], array("q", (7, 8, 9)))

    assert list(found) == expected == [found[number] for number in range(len(found))]
    assert found[1:] == tuple(expected[1:])
    for pieces in (found, expected):
        assert TensorPieces("w", (3, 4), "float32", pieces).files == {Path("a.distcp"), Path("b.distcp")}
