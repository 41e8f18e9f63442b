"""Rows of MindSpore's tensors against numpy in float64, element by element."""

import mindspore as ms
import numpy as np
import pytest

from tests.moments import numpy_moments
from trainermon.monitor.mindspore.rows import HostSlabRing
from trainermon.statistics.mindspore.moments import MomentsOfTensors, is_readable

pytestmark = pytest.mark.mindspore


def truth(values):
    return numpy_moments(values).tolist()


def rows_of(*tensors):
    rows = np.empty((len(tensors), 8))
    MomentsOfTensors().write(tensors, rows)
    return rows


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("shape", [(), (0, 3), (70_001,), (40, 30)])
def test_rows_are_those_of_float64(dtype, shape):
    values = np.asarray(np.random.default_rng(3).normal(size=shape), np.float32)
    values.reshape(-1)[2:5] = [np.nan, np.inf, 0][: max(values.size - 2, 0)]
    tensor = ms.Tensor(values).astype(getattr(ms, dtype))

    [row] = rows_of(tensor)

    np.testing.assert_allclose(row, truth(tensor.astype(ms.float32).asnumpy().astype(np.float64)), rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"])
def test_integers_are_exact(dtype):
    values = np.array([0, 1, 1, 7, 0]).astype(dtype)

    [row] = rows_of(ms.Tensor(values))

    assert row.tolist() == truth(values.astype(np.float64))


def test_complex_numbers_count_as_their_parts():
    values = np.array([1 + 2j, 0 - 3j], np.complex64)

    rows = rows_of(ms.Tensor(values), ms.Tensor(np.ones(3, np.float32)))

    assert rows[0].tolist() == truth(values.view(np.float32).astype(np.float64))
    assert rows[1].tolist() == truth(np.ones(3))


def test_views_are_read_as_their_own_elements():
    whole = ms.Tensor(np.arange(12, dtype=np.float32).reshape(3, 4))

    rows = rows_of(whole[:, 1], whole.T, whole)

    assert rows[0].tolist() == truth(np.array([1.0, 5, 9]))
    assert rows[1].tolist() == rows[2].tolist() == truth(np.arange(12.0))


def test_a_result_that_is_still_pending_is_waited_for():
    large = ms.Tensor(np.ones((600, 600), np.float32))

    rows = [rows_of(ms.mint.matmul(large, large) * number)[0] for number in range(1, 20)]

    assert [row[1] for row in rows] == [600.0 * number for number in range(1, 20)]


def test_numpy_takes_the_place_of_the_library(monkeypatch):
    tensor = ms.Tensor(np.arange(-3, 70_000, dtype=np.float32)).astype(ms.bfloat16)
    [expected] = rows_of(tensor)
    monkeypatch.setenv("TRAINERMON_KERNEL", "torch")

    assert MomentsOfTensors().name == "numpy"
    np.testing.assert_allclose(rows_of(tensor)[0], expected, rtol=1e-12)


def test_a_slab_grows_and_is_used_again():
    ring = HostSlabRing(MomentsOfTensors(), capacity=1)
    slab = ring.begin(4)
    slab.take([ms.Tensor(1.0)])
    assert slab.take([ms.Tensor(2.0), ms.Tensor(float("nan"))]) == 1
    ring.seal(slab)

    [ready] = ring.ready()

    assert ready.step == 4
    assert ready.rows()[:, 1].tolist() == [1.0, 2.0, np.inf]
    assert [ready.any_nonfinite([0, 1]), ready.any_nonfinite([2])] == [False, True]
    ring.put_back(ready)
    assert ring.begin(5) is ready
    assert len(ready.rows()) == 0


def test_what_cannot_be_read_is_known_and_refused():
    strange = ms.Tensor(np.ones(3, np.float32))

    assert is_readable(strange)
    assert not is_readable(np.ones(3))
    assert not is_readable(None)
