"""Rows of memory that no framework knows: the compiled library and numpy, each against float64 element by element."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.moments import numpy_moments
from trainermon.statistics import native as module
from trainermon.statistics.native import KINDS, PARALLEL, native, pack, write_by_numpy

SIZES = (0, 1, 7, 70_001)


def arrays(dtype):
    """Return arrays of every size, with what is rare in them where the dtype has it, and their float64 values."""
    random = np.random.default_rng(1)
    for size in SIZES:
        values = random.normal(scale=50, size=size)
        if dtype in ("bfloat16", "float16", "float32", "float64"):
            values[3:6] = [np.nan, np.inf, -np.inf][: max(size - 3, 0)]
        values[6:7] = 0
        if dtype == "bfloat16":
            stored = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
            yield stored, (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        else:
            stored = (np.abs(values) if dtype.startswith(("u", "b")) else values).astype(dtype)
            yield stored, stored.astype(np.float64)


def by_library(lies, out):
    return native().write(pack([x for each in lies for x in each], len(lies)), len(lies), out.ctypes.data, 1)


@pytest.mark.parametrize("write", [by_library, write_by_numpy])
@pytest.mark.parametrize("dtype", KINDS)
def test_rows_are_those_of_float64(dtype, write):
    stored, values = zip(*arrays(dtype), strict=True)
    rows = np.empty((len(stored), 8))

    missing = write([(each.ctypes.data, each.size, KINDS[dtype]) for each in stored], rows)

    expected = np.array([numpy_moments(each) for each in values])
    magnitudes = np.array([np.abs(each[np.isfinite(each)]).sum() for each in values])
    assert missing == 0
    assert (rows[:, [0, 1, 2, 5, 6, 7]] == expected[:, [0, 1, 2, 5, 6, 7]]).all()
    assert (np.abs(rows[:, 3] - expected[:, 3]) <= 1e-6 * magnitudes).all()
    assert rows[:, 4] == pytest.approx(expected[:, 4], rel=1e-6)


@pytest.mark.parametrize("write", [by_library, write_by_numpy])
def test_a_tensor_without_memory_is_named(write):
    one = np.ones(3, np.float32)

    assert write([(one.ctypes.data, 3, 0), (0, 2, 0)], np.empty((2, 8))) == 2


def test_threads_are_offered_wherever_the_library_would_use_them():
    source = Path(module.__file__).with_name("moments.c").read_text(encoding="utf-8")
    found = re.search(r"#define PARALLEL \((\d+) << (\d+)\)", source)

    assert found is not None
    assert int(found[1]) << int(found[2]) == PARALLEL
