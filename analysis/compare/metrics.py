"""How far two rows are apart: msprobe's columns of statistics, and one size of the difference, safe near zero."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from trainermon.analysis.compare.items import Item

TINY = 1e-38  # below the least normal float32, a difference means nothing


class Difference(NamedTuple):
    """How a target's row differs from the golden one.

    `relative` is the size of the difference: 0 equal, NaN if one side alone is not finite, None if it cannot be told.
    `columns` are the values of the result table's columns where they cannot be had from the rows alone.
    """

    relative: float | None
    columns: tuple[Any, ...] = ()


EQUAL = Difference(0.0)


def statistics_difference(target: Item, golden: Item) -> Difference:
    """Return how far the statistics of two rows are apart."""
    return EQUAL if _values(target) == _values(golden) else Difference(relative_size(target, golden))


def statistics_columns(target: Item, golden: Item) -> tuple[float | None, ...]:
    """Return the differences of max, min, mean and norm, and these in per cent of the golden ones."""
    pairs = (
        (target.max, golden.max),
        (target.min, golden.min),
        (target.mean, golden.mean),
        (target.norm, golden.norm),
    )
    differences = [_difference(ours, theirs) for ours, theirs in pairs]
    return (*differences, *(_share(ours, theirs) for ours, theirs in pairs))


def relative_size(target: Item, golden: Item) -> float | None:
    """Return how far the statistics of two rows are apart, relative to the size of the tensor.

    The largest of these: the extrema's difference relative to the largest magnitude, the norm's to the norm, and the
    mean's to the root mean square (a mean that is zero but for rounding differs by nothing then). Statistics cannot
    see a permutation.
    """
    if _values(target) == _values(golden):
        return 0.0
    if target.nonfinite != golden.nonfinite:
        return math.nan
    if target.nonfinite:
        return 0.0 if (target.nans, target.infs) == (golden.nans, golden.infs) or target.nans is None else math.nan
    extremes = [_number(value) for value in (target.max, target.min, golden.max, golden.min)]
    if any(value is None for value in extremes):
        return None if target.dtype == golden.dtype and not isinstance(target.max, str) else math.inf
    high, low, their_high, their_low = (value or 0.0 for value in extremes)
    largest = max(abs(high), abs(low), abs(their_high), abs(their_low))
    if largest <= TINY:
        return 0.0
    sizes = [max(abs(high - their_high), abs(low - their_low)) / largest]
    norm, their_norm = _number(target.norm), _number(golden.norm)
    if norm is not None and their_norm is not None and max(norm, their_norm) > TINY:
        sizes.append(abs(norm - their_norm) / max(norm, their_norm))
    mean, their_mean = _number(target.mean), _number(golden.mean)
    if mean is not None and their_mean is not None:
        spread = max(norm or 0.0, their_norm or 0.0) / math.sqrt(max(1, golden.num_elements)) or largest
        sizes.append(abs(mean - their_mean) / spread)
    return max(sizes)


def _values(item: Item) -> tuple[Any, ...]:
    return item.max, item.min, item.mean, item.norm, item.nans, item.infs


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _difference(target: Any, golden: Any) -> float | None:
    if target == golden:
        return 0
    if not isinstance(target, int | float) or not isinstance(golden, int | float):
        return None
    return target - golden


def _share(target: Any, golden: Any) -> float | None:
    """Return the difference in per cent of the golden value, infinite if that is zero."""
    if target == golden:
        return 0
    if not isinstance(target, int | float) or not isinstance(golden, int | float):
        return None
    if golden == 0:
        return math.nan if math.isnan(target) else math.inf
    return abs((target - golden) / golden) * 100


def checksum_difference(target: Item, golden: Item) -> Difference:
    """Return whether the checksums of two rows are equal; the size of a difference is that of the statistics, if any.

    Checksums of different kinds cannot be compared.
    """
    ours, theirs = target.checksum, golden.checksum
    columns = (ours[1] if ours else None, theirs[1] if theirs else None)
    if ours is None or theirs is None:
        return Difference(relative_size(target, golden) if ours == theirs else None, columns)
    if ours[0] != theirs[0]:
        return Difference(None, columns)
    if ours == theirs:
        return Difference(0.0, columns)
    return Difference(relative_size(target, golden) or math.inf, columns)
