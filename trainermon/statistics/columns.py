"""Derived statistics and merging for readers, with numpy only: agents, exporters and offline tools need no torch.

An array of moments is float64 `[8, ...]`: the statistics in the order of `values.STATISTICS` first, then any number of
other axes (series, steps, ranks).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from trainermon.core.values import STATISTICS

Array = NDArray[np.float64]

_COUNT, _MIN, _MAX, _SUM, _SUM_SQ, _ZEROS, _NANS, _INFS = range(len(STATISTICS))


def derive(values: Array, name: str) -> Array:
    """Return one statistic of every set of elements.

    Args:
        values: moments, float64 `[8, ...]`.
        name: one of `values.STATISTICS`, or `mean`, `norm`, `rms`, `std`, `zero_ratio`, `finite` (number of finite
            elements), `nonfinite` (number of the others) or `absmax`. The same definitions as on `values.Moments`.

    Returns:
        float64 `[...]`. Means, `rms`, `std` and `absmax` are NaN where there is no finite element, `zero_ratio` where
        there is no element; `norm` is 0 there.

    Raises:
        ValueError: there is no statistic of that name.

    >>> moments = np.array([[4.0], [-2.0], [2.0], [0.0], [8.0], [1.0], [0.0], [0.0]])
    >>> float(derive(moments, "zero_ratio")[0]), float(derive(moments, "absmax")[0])
    (0.25, 2.0)
    """
    if name in STATISTICS:
        return np.asarray(values[STATISTICS.index(name)])
    if name not in _DERIVED:
        known = ", ".join((*STATISTICS, *_DERIVED))
        raise ValueError(f"statistic is {name!r}, expected one of {known}")
    with np.errstate(divide="ignore", invalid="ignore"):
        return _DERIVED[name](values)


def merge(values: Array, axis: int = -1) -> Array:
    """Return the moments of the unions of disjoint sets of elements along one axis.

    Args:
        values: moments, float64 `[8, ...]`.
        axis: the axis that disappears: -1 or any other than that of the statistics. May be of length 0, which gives
            the moments of no elements.

    Returns:
        float64, one axis fewer than `values`.

    Raises:
        ValueError: `axis` is the statistics' own.
    """
    axis = axis % values.ndim
    if axis == 0:
        raise ValueError("axis is 0, the axis of the statistics; expected the axis of the sets to merge")
    merged = np.asarray(values.sum(axis=axis))
    merged[_MIN] = values[_MIN].min(axis=axis - 1, initial=np.inf)
    merged[_MAX] = values[_MAX].max(axis=axis - 1, initial=-np.inf)
    return merged


def _finite(values: Array) -> Array:
    return np.asarray(values[_COUNT] - values[_NANS] - values[_INFS])


def _mean(values: Array) -> Array:
    return np.asarray(values[_SUM] / _finite(values))


def _mean_square(values: Array) -> Array:
    return np.asarray(values[_SUM_SQ] / _finite(values))


def _std(values: Array) -> Array:
    return np.sqrt(np.maximum(_mean_square(values) - _mean(values) ** 2, 0.0))


def _absmax(values: Array) -> Array:
    return np.where(_finite(values) > 0, np.maximum(-values[_MIN], values[_MAX]), np.nan)


_DERIVED: dict[str, Callable[[Array], Array]] = {
    "mean": _mean,
    "norm": lambda values: np.sqrt(values[_SUM_SQ]),
    "rms": lambda values: np.sqrt(_mean_square(values)),
    "std": _std,
    "zero_ratio": lambda values: np.asarray(values[_ZEROS] / values[_COUNT]),
    "finite": _finite,
    "nonfinite": lambda values: np.asarray(values[_NANS] + values[_INFS]),
    "absmax": _absmax,
}
