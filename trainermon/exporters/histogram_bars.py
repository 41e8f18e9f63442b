"""Histograms as others draw them: bars between ascending edges, as TensorBoard and Weights & Biases take them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainermon.core.values import BIN_BOUNDS, ZERO_BIN, Moments, StatBlock

_EDGES = np.array([BIN_BOUNDS[0][0], *(high for _, high in BIN_BOUNDS[: ZERO_BIN - 1])])
_ALL_EDGES = np.concatenate([_EDGES, -_EDGES[::-1]])


class HistogramBars(NamedTuple):
    """The finite elements of a tensor by magnitude.

    Attributes:
        edges: float64 `[n + 1]`, ascending and finite.
        counts: int64 `[n]`, the elements between two edges.
    """

    edges: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]


def bars_of(counts: Any, moments: Moments) -> HistogramBars | None:
    """Return a histogram `[128]` as bars, from the smallest element to the largest; None if none is finite.

    Zeros share a bar with what is smaller than 2^-45. Elements beyond the bins for powers of two have a bar that ends
    at the extreme itself.
    """
    counts = np.asarray(counts, np.int64)
    middle = counts[ZERO_BIN - 1 : ZERO_BIN + 2].sum()
    bars = np.concatenate([counts[: ZERO_BIN - 1], [middle], counts[ZERO_BIN + 2 : -1]])
    filled = np.flatnonzero(bars)
    if not len(filled):
        return None
    first, last = filled[[0, -1]]
    edges = _ALL_EDGES[first : last + 2].copy()
    edges[0] = edges[0] if math.isfinite(edges[0]) else moments.min
    edges[-1] = edges[-1] if math.isfinite(edges[-1]) else moments.max
    return HistogramBars(edges, bars[first : last + 1])


def histograms_of(block: StatBlock) -> Mapping[int, Any]:
    """Return the counts of a block's histograms by the number of their series; empty if it has none."""
    if block.histograms is None:
        return {}
    series = np.asarray(block.series)[np.asarray(block.histograms.places)]
    return dict(zip(series.tolist(), np.asarray(block.histograms.counts), strict=True))
