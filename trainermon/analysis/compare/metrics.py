"""How far two rows are apart: msprobe's columns of statistics, and one size of the difference, safe near zero."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainermon.analysis.compare.frameworks import dtype_name
from trainermon.analysis.compare.items import DumpRow
from trainermon.analysis.compare.noise import ROUNDOFF, is_limit

TINY = 1e-38  # below the least normal float32, a difference means nothing, but in float64
_FLOATING = frozenset(f"torch.{name}" for name in ROUNDOFF)
_numbers = attrgetter("max", "min", "mean", "norm")
_DOUBLES = ("float64", "complex128")
_LARGE = 1e38  # beyond, statistics may be those of a mask
_ALIKE = 16.0  # a mean hides errors of elements by this factor at most
_BLOCK = 8192  # rows that are looked at together: bounds the memory, and fits a cache

ItemPair = tuple[DumpRow, DumpRow]
Array = npt.NDArray[np.float64]


class DumpRowDifference(NamedTuple):
    """How a target's row differs from the golden one.

    `relative` is the size of the difference: 0 equal, NaN if one side alone is not finite, None if it cannot be told.
    `columns` are the values of the result table's columns where they cannot be had from the rows alone. `unread` is why
    a tensor's file was not read, as a clause: then `relative` is what the statistics tell; "" if it was. `norm` is the
    larger norm of both, of their finite elements; 0 where these were not read.
    """

    relative: float | None
    columns: tuple[Any, ...] = ()
    unread: str = ""
    norm: float = 0.0


def statistics_differences(pairs: Sequence[ItemPair]) -> Iterator[DumpRowDifference]:
    """Yield how far the statistics of the rows of each pair are apart: `relative_size`, of many of them at once."""
    for start in range(0, len(pairs), _BLOCK):
        block = pairs[start : start + _BLOCK]
        chosen, values = finite_statistics(block)
        counts = np.array([max(1, block[index][1].num_elements) for index in chosen], dtype=np.float64)
        sizes = dict(zip(chosen, _relative_sizes(values, counts).tolist(), strict=True))
        for index, pair in enumerate(block):
            yield DumpRowDifference(sizes[index] if index in sizes else relative_size(*pair))


def finite_statistics(pairs: Sequence[ItemPair]) -> tuple[list[int], Array]:
    """Pick the pairs that can be compared all at once: floating point tensors whose eight statistics are finite.

    Left out are rows that lack a number, of which NaN and Inf are not the same, that may be masks, or whose numbers are
    tiny: they are looked at one by one.

    Returns:
        The positions of the pairs, and an array of shape (pairs, 8): max, min, mean and norm of the target, then those
        of the golden row.
    """
    likely = [
        index
        for index, (ours, theirs) in enumerate(pairs)
        if ours.dtype in _FLOATING
        and theirs.dtype in _FLOATING
        and (ours.nans or 0) == (theirs.nans or 0)
        and (ours.infs or 0) == (theirs.infs or 0)
        and ours.more is None
    ]
    values = np.array([_numbers(pairs[index][0]) + _numbers(pairs[index][1]) for index in likely], dtype=np.float64)
    values = values.reshape(-1, 8)  # numpy makes NaN of None
    largest = np.abs(values[:, [0, 1, 4, 5]]).max(axis=1, initial=0.0)
    plain = np.isfinite(values).all(axis=1) & (largest < _LARGE) & ((largest > TINY) | (largest == 0))
    finite = np.flatnonzero(plain)
    return [likely[index] for index in finite.tolist()], values[finite]


def _relative_sizes(values: Array, counts: Array) -> Array:
    ours, theirs = values[:, :4].T, values[:, 4:].T
    with np.errstate(all="ignore"):
        gap = np.abs(ours - theirs)
        larger = np.maximum(np.abs(ours), np.abs(theirs))
        largest, norm = np.maximum(larger[0], larger[1]), larger[3]
        spread = norm / np.sqrt(counts)
        by_extremes = np.maximum(gap[0], gap[1]) / largest
        by_norm = np.where(norm > TINY, gap[3] / norm, 0.0)
        by_mean = gap[2] / np.where(spread > 0, spread, largest)
    sizes = np.maximum(np.maximum(by_extremes, by_norm), by_mean)
    return np.where(largest > TINY, sizes, 0.0)


def shares(values: Array) -> Array:
    """Return how far max, min, mean and norm are from the golden ones, in per cent of those; shape (pairs, 4).

    `values` is the array of `finite_statistics`. Infinite where the golden number alone is zero.
    """
    ours, theirs = values[:, :4], values[:, 4:]
    with np.errstate(all="ignore"):
        gap = ours - theirs
        share: Array = np.where(gap == 0, 0.0, np.abs(gap / theirs) * 100)
    return share


def norm_ratios(values: Array) -> Array:
    """Return the target's norm over the golden one for each row of `finite_statistics`' array; shape (pairs,)."""
    ours, theirs = values[:, 3], values[:, 7]
    with np.errstate(all="ignore"):
        ratio: Array = np.where(ours == theirs, 1.0, ours / theirs)
    return ratio


def norm_ratio(target: DumpRow, golden: DumpRow) -> float | None:
    """Return the target's norm over the golden one.

    1 if they are equal, infinite if the golden one alone is zero, None if one is not known.
    """
    for ours, theirs in _finite_pairs((target.norm, golden.norm)):
        return 1.0 if ours == theirs else ours / theirs if theirs else math.inf
    return None


def statistics_columns(target: DumpRow, golden: DumpRow) -> tuple[float | None, ...]:
    """Return eight cells of the result table: the differences of max, min, mean, norm, then these in per cent.

    None where a number is missing.
    """
    pairs = (
        (target.max, golden.max),
        (target.min, golden.min),
        (target.mean, golden.mean),
        (target.norm, golden.norm),
    )
    differences = [_difference(ours, theirs) for ours, theirs in pairs]
    return (*differences, *(_share(ours, theirs) for ours, theirs in pairs))


def relative_size(target: DumpRow, golden: DumpRow) -> float | None:
    """Return how far the statistics of two rows are apart, relative to the size of the tensor.

    The largest of these: the extrema's difference relative to the largest magnitude, the norm's to the norm, and the
    mean's to the root mean square (a mean that is zero but for rounding differs by nothing then). Whole numbers and
    truth values are equal or infinitely far apart: they are indices, of which none is near another. Where both have the
    same NaN and Inf, what is finite counts. Where both have the limits of their types, as a mask does, only the other
    extremum counts: mean and norm tell of nothing else. Statistics cannot see a permutation. None if neither side has
    any, of a tensor that is not empty.
    """
    is_same = _values(target) == _values(golden)
    if is_same and _is_same_beside(target, golden):
        return 0.0 if target.has_values else None
    if is_discrete(target) and is_discrete(golden):
        return math.inf
    size = 0.0 if is_same else _size(target, golden)
    if size is None or math.isnan(size) or _is_same_beside(target, golden):
        return size
    more = _finite_pairs(*zip(target.more, golden.more, strict=True))
    return max(size, *_gaps(_least(target, golden), *more))


def differ_below_normal(target: DumpRow, golden: DumpRow) -> bool:
    """Return whether statistics differ, all below the least normal float32: flushing to zero makes that, and faults."""
    extremes = _finite_pairs((target.max, golden.max), (target.min, golden.min))
    largest = max((abs(value) for pair in extremes for value in pair), default=math.inf)
    return largest <= _least(target, golden) and _values(target) != _values(golden)


def _is_same_beside(target: DumpRow, golden: DumpRow) -> bool:
    """Return whether what else is known of both is the same: zeros of truth values, the parts of complex numbers."""
    return target.more is None or golden.more is None or target.more == golden.more


def _least(target: DumpRow, golden: DumpRow) -> float:
    """Return the size up to which a number of either row is taken for zero."""
    is_double = any(dtype_name(row.dtype) in _DOUBLES for row in (target, golden))
    return 0.0 if is_double else TINY


def _gaps(least: float, *pairs: tuple[float, float]) -> list[float]:
    largest = max((abs(value) for pair in pairs for value in pair), default=0.0)
    return [abs(ours - theirs) / largest if largest > least else 0.0 for ours, theirs in pairs]


def _size(target: DumpRow, golden: DumpRow) -> float | None:
    if not _same_nonfinite(target, golden):
        return math.nan
    if _has_limit(target) and _has_limit(golden):
        return _size_beside_limits(target, golden)
    extremes = _finite_pairs((target.max, golden.max), (target.min, golden.min))
    if not extremes:
        return _size_without_extremes(target, golden)
    largest, least = max(abs(value) for pair in extremes for value in pair), _least(target, golden)
    if largest <= least:
        return 0.0
    sizes = [abs(ours - theirs) / largest for ours, theirs in extremes]
    root_mean_square = largest
    for ours, theirs in _finite_pairs((target.norm, golden.norm)):
        norm = max(ours, theirs)
        root_mean_square = norm / math.sqrt(max(1, golden.num_elements)) or largest
        sizes.append(abs(ours - theirs) / norm if norm > least else 0.0)
    sizes += [abs(ours - theirs) / root_mean_square for ours, theirs in _finite_pairs((target.mean, golden.mean))]
    return max(sizes)


def _size_without_extremes(target: DumpRow, golden: DumpRow) -> float | None:
    if target.nonfinite:
        return 0.0
    for total, whole in ((target, golden), (golden, target)):
        if total.max is None and isinstance(total.mean, float):  # a sum over ranks, of which no more is known
            return _mean_gap(total.mean, whole)
    return None if target.dtype == golden.dtype and not isinstance(target.max, str) else math.inf


def is_discrete(item: DumpRow) -> bool:
    """Return whether a tensor holds integers or booleans, of which no two different ones are close."""
    return item.is_tensor and dtype_name(item.dtype).startswith(("int", "uint", "bool", "bits"))


def _has_limit(item: DumpRow) -> bool:
    name = dtype_name(item.dtype)
    return any(is_limit(value, name) for value in map(_number, (item.max, item.min)) if value is not None)


def _size_beside_limits(target: DumpRow, golden: DumpRow) -> float:
    ours, theirs = dtype_name(target.dtype), dtype_name(golden.dtype)
    size = 0.0
    for one, other in _finite_pairs((target.max, golden.max), (target.min, golden.min)):
        are_limits = is_limit(one, ours), is_limit(other, theirs)
        if all(are_limits):
            size = max(size, 0.0 if (one > 0) == (other > 0) else 1.0)
        elif any(are_limits):
            size = max(size, 1.0)
        elif one != other:
            size = max(size, abs(one - other) / max(abs(one), abs(other)))
    return size


def _mean_gap(mean: float, whole: DumpRow) -> float | None:
    """Return by how much of their size elements differ if a mean is so far from that of `whole`; None: not known.

    Errors of N elements that have nothing to do with one another leave their mean sqrt(N) times less; held against it
    is a sixteenth at least, as errors may be alike.
    """
    if not isinstance(whole.mean, float) or not isinstance(whole.norm, float) or whole.norm <= TINY:
        return None
    root = math.sqrt(max(1, whole.num_elements))
    return abs(mean - whole.mean) * root / whole.norm * min(root, _ALIKE)


def _same_nonfinite(target: DumpRow, golden: DumpRow) -> bool:
    """Return whether both have as many NaN and Inf, or where one is not counted, whether both have any NaN, or any."""
    if not target.nonfinite and not golden.nonfinite:
        return True
    if target.nans is not None and golden.nans is not None:
        return (target.nans, target.infs) == (golden.nans, golden.infs)
    return target.nonfinite == golden.nonfinite and _has_nan(target) == _has_nan(golden)


def _has_nan(item: DumpRow) -> bool:
    return item.nans > 0 if item.nans is not None else item.max != item.max or item.min != item.min


def _finite_pairs(*pairs: tuple[Any, Any]) -> list[tuple[float, float]]:
    numbers = ((_number(ours), _number(theirs)) for ours, theirs in pairs)
    return [(ours, theirs) for ours, theirs in numbers if ours is not None and theirs is not None]


def _values(item: DumpRow) -> tuple[Any, ...]:
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


def checksum_differences(pairs: Sequence[ItemPair]) -> list[DumpRowDifference]:
    """Return for each pair of rows whether the checksums are equal; if not, the difference is that of the statistics.

    Checksums of different kinds cannot be compared.
    """
    return [_checksum_difference(ours, theirs) for ours, theirs in pairs]


def _checksum_difference(target: DumpRow, golden: DumpRow) -> DumpRowDifference:
    """Return whether the checksums of two rows are equal; the size of a difference is that of the statistics, if any.

    Checksums of different kinds cannot be compared.
    """
    ours, theirs = target.checksum, golden.checksum
    columns = (ours[1] if ours else None, theirs[1] if theirs else None)
    if ours is None or theirs is None:
        return DumpRowDifference(relative_size(target, golden) if ours == theirs else None, columns)
    if ours[0] != theirs[0]:
        return DumpRowDifference(None, columns)
    if ours == theirs:
        return DumpRowDifference(0.0, columns)
    return DumpRowDifference(relative_size(target, golden) or math.inf, columns)
