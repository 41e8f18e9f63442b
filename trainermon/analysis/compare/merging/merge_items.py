"""One row of several ranks as one row of the whole: split along a dimension, the same everywhere, or parts of a sum.

The other side's shape tells which it is: concatenated it must be as large. Rows of one shape are copies, which must be
equal, or parts of a sum. Statistics are merged as moments: extrema, means by their counts, norms by their squares. Of a
sum they tell the mean only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainermon.analysis.compare.items import DumpRow
from trainermon.analysis.compare.merging.assembly import TensorAssembly
from trainermon.analysis.compare.metrics import relative_size
from trainermon.analysis.compare.noise import roundoff

Sources = dict[str, Path | TensorAssembly]

COPY_TOLERANCE = 64.0
"""Copies of a value may be apart by so many units of roundoff: kernels may add up in another order on each rank."""
_MAX_SUM_ROUNDING = 2.0**-6  # of coarse types copies may be a quarter apart, as terms of a sum often are
_SUM_TOLERANCE = 0.05  # of the root mean square: a mean, which statistics round off, tells a sum from a copy


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRow:
    """What the other side has for a row that is being merged from several ranks.

    Attributes:
        shape: The tensor's shape there; None: not a tensor.
        parts: Number of ranks along the axis there.
        item: The row itself, if it is whole; else None.
        is_dealt: Whether its ranks along the axis have different values of one shape: parts, and no copies.
        is_copied: Whether they seem to have the same: then its shape is that of the whole.
    """

    shape: tuple[int, ...] | None
    parts: int = 1
    item: DumpRow | None = None
    is_dealt: bool = False
    is_copied: bool = False


@dataclass(slots=True)
class MergeCounts:
    """Counts, for a sentence in the report, how the rows of several ranks were merged.

    Attributes:
        split: Tensors joined from parts.
        copies: Tensors of which every rank has the same.
        sums: Tensors that are the sum of the ranks' parts.
        own: Values that each rank has for itself, which were left out.
        diverged: Names of copies that are not equal.
        unclear: Names of rows whose shapes do not fit.
        averaged: By what number the gradients of replicas were divided; 0: they were not.
        alone: The only replica that is compared; None: all are.
    """

    split: int = 0
    copies: int = 0
    sums: int = 0
    own: int = 0
    diverged: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)
    averaged: int = 0
    alone: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedRow:
    """The same row of a call on all ranks of an axis, about to be merged into one.

    Attributes:
        name: Full name of the row.
        items: The rows, by position on the axis.
        axis: `tp`, `cp`, `dp` …
        reference: What the other side has.
        split: Dimension, and number of blocks along it, where the dump tells how the tensor is split.
        sums: Whether these are parts of a sum: True if they surely are, None if the values decide.
        is_function: A function's: in what order the elements of its tensors lie is not known, since heads and batch may
            be one dimension.
        is_own: Whether the call was given something of its rank alone.
    """

    name: str
    items: Sequence[DumpRow]
    axis: str = "tp"
    reference: ReferenceRow | None = None
    split: tuple[int, int] | None = None
    sums: bool | None = False
    is_function: bool = False
    is_own: bool = False


def merge_row(row: MergedRow, sources: Sources, counts: MergeCounts) -> DumpRow | None:
    """Merge one row of several ranks into that of the whole tensor; its files go into `sources` under `row.name`.

    Returns:
        The row, or None if the whole has no such value: what a function makes of one rank's part, such as the largest
        logit in it.
    """
    first = row.items[0]
    if len(row.items) == 1:
        return first
    return _merge_tensors(row, sources, counts) if first.is_tensor else _argument(row)


def _merge_tensors(row: MergedRow, sources: Sources, counts: MergeCounts) -> DumpRow | None:
    first, dim = row.items[0], _dimension(row)
    if dim is not None:
        return _of_parts(row, sources, counts, dim)
    is_mask_of_own = row.is_own and not roundoff(row.items)  # the same statistics make no copies of these
    if is_mask_of_own or any(item.shape != first.shape for item in row.items) or (row.is_function and not _fits(row)):
        return _left_out(row, counts, counts.unclear)
    is_sum = _is_sum(row)
    if not is_sum and _are_copies(row.items):
        counts.copies += 1
        return first._replace(merged=f"{len(row.items)} copies, {row.axis}")
    if is_sum:
        counts.sums += 1
        total = _stored(summed(row.items), row, sources, dim=None)
        return total._replace(merged=f"sum of {len(row.items)}, {row.axis}")
    if row.is_function and (row.is_own or not _has_sound_copy(row)):
        return _left_out(row, counts, counts.diverged)
    index = _farthest(row)
    counts.diverged.append(f"{row.name} (most: {row.axis} {index})")
    return row.items[index]._replace(merged=f"{row.axis} {index} of {len(row.items)} that differ")


def _of_parts(row: MergedRow, sources: Sources, counts: MergeCounts, dim: int) -> DumpRow:
    counts.split += 1
    stride = row.split[1] if row.split and row.split[0] == dim else 1
    whole = _stored(concatenated(row.items, dim), row, sources, dim=dim, stride=stride)
    return whole._replace(merged=f"{len(row.items)} parts, {row.axis}")


def _is_dealt_alike(row: MergedRow) -> bool:
    """Return whether both sides are dealt out to as many ranks, in parts of one shape: in which dimension, none tells.

    Of all elements together the statistics are the same whichever it is.
    """
    other = row.reference
    is_alike = (
        other is not None and other.is_dealt and (other.parts, other.shape) == (len(row.items), row.items[0].shape)
    )
    return is_alike and bool(row.items[0].shape) and not _are_copies(row.items)


def _left_out(row: MergedRow, counts: MergeCounts, names: list[str]) -> DumpRow | None:
    """Return None for a function's row; for a module's, note its name and return the first rank's row for all."""
    if row.is_function:
        counts.own += 1
        return None
    names.append(row.name)
    return row.items[0]


def _fits(row: MergedRow) -> bool:
    """Return whether the rows have the other side's shape, or that of all its parts together."""
    first, other = row.items[0].shape or (), row.reference
    if other is None or other.shape in (None, row.items[0].shape):
        return True
    part = other.shape or ()
    wholes = (_grown(part, dim, other.parts) for dim in range(len(part)))
    return not other.is_copied and first in wholes


def concatenated(items: Sequence[DumpRow], dim: int) -> DumpRow:
    """Return the row of the tensor that joins those of `items` along `dim`, with the statistics of all elements."""
    first = items[0]
    shape = list(first.shape or ())
    shape[dim] = sum((item.shape or ())[dim] for item in items)
    counts = [item.num_elements - (item.nans or 0) - (item.infs or 0) for item in items]
    return first._replace(
        shape=tuple(shape),
        requires_grad=any(item.requires_grad for item in items),
        max=_over(max, [item.max for item in items]),
        min=_over(min, [item.min for item in items]),
        mean=_mean([item.mean for item in items], counts),
        norm=_norm([item.norm for item in items], counts),
        nans=_total([item.nans for item in items]),
        infs=_total([item.infs for item in items]),
        checksum=None,
    )


def summed(items: Sequence[DumpRow]) -> DumpRow:
    """Return the row of the sum of the tensors in `items`: its mean is known, its extrema and norm are None."""
    means = [item.mean for item in items]
    mean = math.fsum(means) if all(isinstance(value, int | float) for value in means) else None
    return items[0]._replace(
        max=None,
        min=None,
        mean=mean,
        norm=None,
        checksum=None,
        nans=_total([item.nans for item in items]),
        infs=_total([item.infs for item in items]),
    )


def scaled(item: DumpRow, factor: float, sources: Sources) -> DumpRow:
    """Return the row of `item`'s tensor multiplied by a positive `factor`.

    `sources` gets how to compute its elements.
    """
    values = (item.max, item.min, item.mean, item.norm)
    changed = [value * factor if isinstance(value, float) else value for value in values]
    name = item.data_name and f"{item.data_name} × {factor:g}"
    if item.data_name and name:
        sources[name] = TensorAssembly(parts=(sources[item.data_name],), scale=factor)
    return item._replace(
        max=changed[0], min=changed[1], mean=changed[2], norm=changed[3], checksum=None, data_name=name
    )


def _stored(item: DumpRow, row: MergedRow, sources: Sources, *, dim: int | None, stride: int = 1) -> DumpRow:
    parts = tuple(sources[part.data_name] for part in row.items if part.data_name)
    is_unordered = row.is_function and dim is not None
    if len(parts) < len(row.items) or is_unordered:
        return item._replace(data_name=None)
    sources[row.name] = TensorAssembly(parts=parts, dim=dim, stride=stride)
    return item._replace(data_name=row.name)


def _argument(row: MergedRow) -> DumpRow | None:
    """Return a plain argument; a number that is smaller by as much as the whole was divided is that of the whole."""
    first, other = row.items[0], row.reference.item if row.reference else None
    same = all(item.max == first.max for item in row.items)
    if row.is_function and not same:
        return None
    is_part = same and isinstance(first.max, int) and other is not None and first.max * len(row.items) == other.max
    return other if is_part and other is not None and first.max is not True else first


def _dimension(row: MergedRow) -> int | None:
    """Return along which dimension the rows are parts of what the other side has, None if they are not."""
    shapes = [item.shape or () for item in row.items]
    first = shapes[0]
    if row.reference is None or row.reference.shape is None:
        return row.split[0] if row.split else None
    other, parts = row.reference.shape, row.reference.parts
    if any(len(shape) != len(other) for shape in shapes):
        return None
    possible = _joining(shapes, other, parts)
    if not possible and row.reference.is_copied:
        possible = _joining(shapes, other, 1)
    exact = [dim for dim in possible if _without(first, dim) == _without(other, dim)]
    if exact or possible:
        return (exact or possible)[-1]
    if row.split and first == other and parts == len(shapes):
        return row.split[0]
    return len(first) - 1 if _is_dealt_alike(row) else None


def _joining(shapes: Sequence[tuple[int, ...]], other: tuple[int, ...], parts: int) -> list[int]:
    """Return the dimensions along which `shapes` together are as large as `parts` of the shape `other`."""
    first = shapes[0]
    return [
        dim
        for dim in range(len(other))
        if first[dim] != other[dim]
        and sum(shape[dim] for shape in shapes) == other[dim] * parts
        and all(_without(shape, dim) == _without(first, dim) for shape in shapes)
    ]


def _grown(shape: tuple[int, ...], dim: int, parts: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] * parts, *shape[dim + 1 :])


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1 :]


def _are_copies(items: Sequence[DumpRow]) -> bool:
    return all(is_copy(item, items[0]) for item in items[1:])


def is_copy(item: DumpRow, other: DumpRow) -> bool:
    """Return whether two rows are apart by no more than kernels that add up in another order."""
    return _are_within(item, other, COPY_TOLERANCE * roundoff((item, other)))


def _has_sound_copy(row: MergedRow) -> bool:
    """Return whether a rank has what the other side has: then all should have it, unless it is a mask or an index."""
    other = row.reference.item if row.reference else None
    return other is not None and roundoff((other,)) > 0 and any(is_copy(item, other) for item in row.items)


def _is_sum(row: MergedRow) -> bool:
    """Return whether rows are parts of a sum: as is known of them, or as they add up and are not the same."""
    if row.sums is not None:
        return row.sums
    other = row.reference.item if row.reference else None
    if other is None:
        return not _are_copies(row.items)
    rounding = min(COPY_TOLERANCE * roundoff((*row.items, other)), _MAX_SUM_ROUNDING)
    first, *others = row.items
    are_same = all(_are_within(item, first, rounding) for item in others)
    return not are_same and _adds_up(row, other, rounding)


def _are_within(item: DumpRow, other: DumpRow, limit: float) -> bool:
    size = relative_size(item, other)
    return size is None or size <= limit


def _adds_up(row: MergedRow, other: DumpRow, rounding: float) -> bool:
    """Return whether the sum of the rows may be the other side's: by its mean, and no larger than the rows allow.

    Not if a rank has the other side's value though others add something: then it is a copy, and theirs are wrong.
    """
    total, norms = summed(row.items).mean, [item.norm for item in row.items]
    if not isinstance(total, float) or not isinstance(other.mean, float) or not isinstance(other.norm, float):
        return False
    known = [norm for norm in norms if isinstance(norm, float)]
    tolerance = rounding * max(known, default=0.0)
    if len(known) < len(norms) or not _is_within_bounds(row.items, other, tolerance):
        return False
    if sorted(known)[-2] > tolerance and any(_are_within(item, other, rounding) for item in row.items):
        return False
    if other.num_elements == 1:  # its mean is the number itself, which nothing rounds off
        return abs(total - other.mean) <= COPY_TOLERANCE * roundoff((other,)) * abs(other.mean)
    spread = other.norm / math.sqrt(max(1, other.num_elements))
    return abs(total - other.mean) <= _SUM_TOLERANCE * spread


def _is_within_bounds(items: Sequence[DumpRow], whole: DumpRow, tolerance: float) -> bool:
    """Return whether `whole` may be the sum of the rows: by its norm and extrema, but for `tolerance`.

    A norm is at most the sum of those of the terms, and at least what is left of the largest after all others. Extrema
    lie between the sums of theirs.
    """
    norms = [float(item.norm) for item in (*items, whole)]
    size = norms.pop()
    if not 2 * max(norms) - sum(norms) - tolerance <= size <= sum(norms) + tolerance:
        return False
    highest, lowest = ([getattr(item, name) for item in (*items, whole)] for name in ("max", "min"))
    if not all(isinstance(value, float) for value in (*highest, *lowest)):
        return True
    return bool(highest[-1] <= sum(highest[:-1]) + tolerance and lowest[-1] >= sum(lowest[:-1]) - tolerance)


def _farthest(row: MergedRow) -> int:
    """Return the number of the copy that differs most from the other side: the others must not hide a fault."""
    other = row.reference.item if row.reference else None
    sizes = [relative_size(item, other) if other is not None else 0.0 for item in row.items]
    ranked = [math.inf if size is None or math.isnan(size) else size for size in sizes]
    return ranked.index(max(ranked))


def _over(choose: Callable[[list[Any]], Any], values: Sequence[Any]) -> Any:
    known = [value for value in values if isinstance(value, int | float)]
    return choose(known) if known else None


def _mean(means: Sequence[object], counts: Sequence[int]) -> float | None:
    pairs = [(mean, count) for mean, count in zip(means, counts, strict=True) if count]
    if not pairs or not all(isinstance(mean, int | float) for mean, _ in pairs):
        return None
    return math.fsum(float(mean) * count for mean, count in pairs) / sum(counts)  # type: ignore[arg-type]


def _norm(norms: Sequence[object], counts: Sequence[int]) -> float | None:
    known = [norm for norm, count in zip(norms, counts, strict=True) if count]
    if not known or not all(isinstance(norm, int | float) for norm in known):
        return None
    return math.hypot(*(float(norm) for norm in known))  # type: ignore[arg-type]


def _total(counts: Sequence[int | None]) -> int | None:
    return None if any(count is None for count in counts) else sum(count or 0 for count in counts)
