"""Merging of rows of moments with torch, on the device where they are."""

from __future__ import annotations

import torch
from torch import Tensor

from trainermon.core.values import STATISTICS

NUM_STATISTICS = len(STATISTICS)
MIN = STATISTICS.index("min")
MAX = STATISTICS.index("max")


def merge_rows(rows: Tensor) -> Tensor:
    """Return the moments of the union of disjoint sets of elements.

    Args:
        rows: float64 `[..., n, 8]`, columns as in `values.STATISTICS`, one row per set. May be empty (`n` = 0): the
            result is then the row of no elements.

    Returns:
        float64 `[..., 8]` on the same device: counts, sums and sums of squares added, min and max taken. Counts are
        exact up to 2**53. No copy to the host.
    """
    neutral = rows.new_zeros((*rows.shape[:-2], 1, NUM_STATISTICS))
    neutral[..., MIN] = torch.inf
    neutral[..., MAX] = -torch.inf
    rows = torch.cat((neutral, rows), dim=-2)
    merged = rows.sum(dim=-2)
    merged[..., MIN] = rows[..., MIN].amin(dim=-1)
    merged[..., MAX] = rows[..., MAX].amax(dim=-1)
    return merged
