"""The elements of a tensor as numpy has them, and how near to their moments a row must be."""

import numpy as np
import torch

from tests.moments import numpy_moments


def elements_of(tensor):
    """Return all elements of a tensor as a flat float64 array. bfloat16 is widened by its definition, not by torch."""
    tensor = tensor.detach().reshape(-1).contiguous()
    if tensor.dtype is torch.bfloat16:
        bits = tensor.view(torch.int16).numpy().view(np.uint16).astype(np.uint32) << 16
        with np.errstate(invalid="ignore"):  # a signalling NaN among the bits
            return bits.view(np.float32).astype(np.float64)
    return tensor.numpy().astype(np.float64)


def assert_moments(row, values):
    """Fail unless `row` holds the moments of `values`.

    Counts, min and max exactly, the norm to 1e-6 of itself, the sum to 1e-6 of the sum of magnitudes.
    """
    row = np.asarray(row)
    expected = numpy_moments(values)
    np.testing.assert_array_equal(row[[0, 5, 6, 7]], expected[[0, 5, 6, 7]], "count, zeros, nans, infs")
    np.testing.assert_array_equal(row[[1, 2]], expected[[1, 2]], "min, max")
    magnitudes = np.abs(values[np.isfinite(values)]).sum()
    assert abs(row[3] - expected[3]) <= 1e-6 * magnitudes, f"sum {row[3]!r}, expected {expected[3]!r}"
    np.testing.assert_allclose(np.sqrt(row[4]), np.sqrt(expected[4]), rtol=1e-6, atol=0, err_msg="norm")
