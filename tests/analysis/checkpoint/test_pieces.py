"""Elements are mapped where they are, with their strides."""

import numpy as np
import pytest

from trainermon.analysis.checkpoint.pieces import StoredArray
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
