"""The statistics that follow from moments: over arrays of many series for rules, and as SQL for the store.

The scalar form of most of them stands in `core.values.Moments`; a test holds the three together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from trainermon.core.values import STATISTICS

Array = NDArray[np.float64]

COUNT, MIN, MAX, SUM, SUM_SQ, ZEROS, NANS, INFS = range(len(STATISTICS))
"""Rows of a block's values, in the order of `core.values.STATISTICS`."""


def _finite(moments: Array) -> Array:
    finite: Array = moments[COUNT] - moments[NANS] - moments[INFS]
    return finite


def _extreme(row: int, moments: Array) -> Array:
    # Without a finite element the moments hold the neutral ±inf, which no rule may take for a value.
    return np.where(np.isfinite(moments[row]), moments[row], np.nan)


def _std(moments: Array) -> Array:
    finite = _finite(moments)
    variance: Array = moments[SUM_SQ] / finite - np.square(moments[SUM] / finite)
    return np.sqrt(np.maximum(variance, 0.0))


DERIVED: Mapping[str, Callable[[Array], Array]] = MappingProxyType(
    {
        "norm": lambda m: np.sqrt(m[SUM_SQ]),
        "rms": lambda m: np.sqrt(m[SUM_SQ] / _finite(m)),
        "mean": lambda m: m[SUM] / _finite(m),
        "std": _std,
        "absmax": lambda m: np.maximum(np.abs(_extreme(MIN, m)), np.abs(_extreme(MAX, m))),
        "max": lambda m: _extreme(MAX, m),
        "min": lambda m: _extreme(MIN, m),
        "sum": lambda m: m[SUM],
        "sum_sq": lambda m: m[SUM_SQ],
        "zero_ratio": lambda m: m[ZEROS] / m[COUNT],
        "zeros": lambda m: m[ZEROS],
        "nonfinite": lambda m: m[NANS] + m[INFS],
        "nans": lambda m: m[NANS],
        "infs": lambda m: m[INFS],
        "finite": _finite,
        "count": lambda m: m[COUNT],
    }
)
"""From moments `[8, n]` to one value per series `[n]`; NaN where it is not defined. Call under `np.errstate`."""

SQL: Mapping[str, str] = MappingProxyType(
    {
        "finite": "count - nans - infs",
        "nonfinite": "nans + infs",
        "mean": "sum / nullif(count - nans - infs, 0)",
        "norm": "sqrt(sum_sq)",
        "rms": "sqrt(sum_sq / nullif(count - nans - infs, 0))",
        "std": (
            "CASE WHEN count > nans + infs "
            "THEN sqrt(greatest(0, sum_sq / (count - nans - infs) - (sum / (count - nans - infs)) ** 2)) END"
        ),
        "zero_ratio": "zeros / nullif(count, 0)",
    }
)
"""The columns that the store shows beside the moments, as SQL over these; NULL where it is not defined."""

MOMENTS = "moments"
"""Not one statistic but all eight moments, for a comparison of ranks bit by bit."""

NEVER_NEGATIVE = frozenset({"norm", "rms", "std", "absmax", "sum_sq"})
"""Statistics whose spread grows with their level, so that they are compared by their logarithms."""
