"""Histograms by numpy in float64, element by element: `frexp` says the power of two."""

import numpy as np


def numpy_histogram(values):
    """Return the counts of a flat float64 array by the bins of `core.values.BIN_BOUNDS`, int64 `[128]`."""
    finite = values[np.isfinite(values) & (values != 0)]
    exponents = np.frexp(finite)[1] - 1  # frexp's mantissa is 0.5 to 1
    places = np.clip(exponents + 46, 0, 62)
    counts = np.bincount(np.where(finite < 0, 62 - places, 64 + places), minlength=128)
    counts[63] = (values == 0).sum()
    counts[127] = (~np.isfinite(values)).sum()
    return counts
