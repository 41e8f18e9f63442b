"""Pieces of tensors as boxes: intersected, cut, and checked to cover the whole once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from trainermon.analysis.checkpoint.pieces import Box, FlatRange, StoredArray, TensorPieces
from trainermon.analysis.tensor.dtypes import storage_dtype

_MAX_GAPS = 2_000  # views beyond which a gap is counted, not located: to cut it out takes their square


Layout = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""Starts and sizes of boxes: of the tensors of a model, many have the same."""
_MAX_KEPT = 1024  # boxes of a layout of which it is kept what was found


class PlacedView(NamedTuple):
    """A box of a whole tensor, and where its elements are in a file.

    Attributes:
        starts: Its first position in the whole, of each dimension.
        sizes: Its sizes.
        stored: The array in a file that holds it.
        first: Its first element there, in elements from the array's first.
        strides: In elements, of each dimension.
        label: Who wrote it, for messages.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    stored: StoredArray
    first: int
    strides: tuple[int, ...]
    label: str

    @property
    def num_elements(self) -> int:
        """The product of the sizes."""
        return math.prod(self.sizes)

    def cut(self, starts: tuple[int, ...], sizes: tuple[int, ...]) -> PlacedView:
        """Return the part in a box of the whole that lies within this one."""
        first = self.first
        for start, own, stride in zip(starts, self.starts, self.strides, strict=True):
            first += (start - own) * stride
        return PlacedView(starts, sizes, self.stored, first, self.strides, self.label)

    def as_array(self) -> StoredArray:
        """Return its elements as an array in the file."""
        offset = self.stored.offset + self.first * storage_dtype(self.stored.dtype).itemsize
        return StoredArray(self.stored.path, offset, self.stored.dtype, self.sizes, self.strides)


class Overlap(NamedTuple):
    """A box that two views cover: the part of each."""

    ours: PlacedView
    theirs: PlacedView


@dataclass(frozen=True, slots=True)
class Coverage:
    """How pieces cover a tensor.

    Attributes:
        views: Boxes that cover each position at most once.
        copies: What else covers a position, with the view in `views` that does: both should be equal.
        num_missing: Positions that nothing covers.
        gap: One box of them; None if there are none, or too many pieces to tell.
    """

    views: tuple[PlacedView, ...]
    copies: tuple[Overlap, ...] = ()
    num_missing: int = 0
    gap: Box | None = None


def views_of(tensor: TensorPieces) -> list[PlacedView]:
    """Return the pieces of a tensor as boxes; a flat range makes at most `2 d - 1` of them, in `d` dimensions."""
    found = []
    for region, stored, label in tensor.pieces:
        if isinstance(region, Box):
            found.append(PlacedView(region.starts, region.sizes, stored, 0, stored.strides, label))
        else:
            found += _flat_views(region, stored, label, tensor.shape)
    return found


def _flat_views(region: FlatRange, stored: StoredArray, label: str, shape: tuple[int, ...]) -> Iterator[PlacedView]:
    step = stored.strides[0] if stored.strides else 1
    strides = tuple(stride * step for stride in dense_strides(shape))
    for starts, sizes in flat_boxes(region, shape):
        flat = sum(start * stride for start, stride in zip(starts, strides, strict=True))
        yield PlacedView(starts, sizes, stored, flat - region.start * step, strides, label)


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides in elements of a dense array in C order.

    >>> dense_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


def flat_boxes(region: FlatRange, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield starts and sizes of the boxes that make up a range of a tensor that was flattened in C order.

    >>> list(flat_boxes(FlatRange(2, 7), (3, 4)))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if not region.length:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    if row == 1:  # also of one dimension
        yield (region.start, *(0,) * (len(shape) - 1)), (region.length, *(1,) * (len(shape) - 1))
        return
    first, before = divmod(region.start, row)
    last, after = divmod(region.start + region.length, row)
    if before:
        length = min(row - before, region.length)
        for starts, sizes in flat_boxes(FlatRange(before, length), shape[1:]):
            yield (first, *starts), (1, *sizes)
        first += 1
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if after and first <= last:
        for starts, sizes in flat_boxes(FlatRange(0, after), shape[1:]):
            yield (last, *starts), (1, *sizes)


def intersections(ours: Sequence[PlacedView], theirs: Sequence[PlacedView]) -> Iterator[Overlap]:
    """Yield every box that one of ours and one of theirs have in common, with the parts of both.

    Cost: of the numbers of views and of pairs that meet in the dimension in which ours are cut most; next to nothing
    for views that are cut as others were before.
    """
    layouts = _layout(ours), _layout(theirs)
    is_kept = max(len(ours), len(theirs)) <= _MAX_KEPT
    for one, two, starts, sizes in _kept_common(*layouts) if is_kept else _common(*layouts):
        mine, other = ours[one], theirs[two]
        if mine.sizes != sizes:
            mine = mine.cut(starts, sizes)
        if other.sizes != sizes:
            other = other.cut(starts, sizes)
        yield Overlap(mine, other)


def _layout(views: Sequence[PlacedView]) -> Layout:
    return tuple([view[:2] for view in views])


def _common(ours: Layout, theirs: Layout) -> Iterator[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    """Yield which box of ours and which of theirs meet, and the box that both have."""
    for one, two in _meeting(ours, theirs):
        (our_starts, our_sizes), (their_starts, their_sizes) = ours[one], theirs[two]
        starts = tuple(map(max, our_starts, their_starts))
        sizes = tuple(
            min(a + n, b + m) - start
            for a, n, b, m, start in zip(our_starts, our_sizes, their_starts, their_sizes, starts, strict=True)
        )
        if all(size > 0 for size in sizes):
            yield one, two, starts, sizes


@lru_cache(maxsize=64)
def _kept_common(ours: Layout, theirs: Layout) -> list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    return list(_common(ours, theirs))


def _meeting(ours: Layout, theirs: Layout) -> Iterator[tuple[int, int]]:
    """Yield the pairs that overlap in one dimension: a sweep along the one in which most boxes begin apart."""
    dims = len(ours[0][0]) if ours else 0
    if not dims:
        yield from ((one, two) for one in range(len(ours)) for two in range(len(theirs)))
        return
    dim = max(range(dims), key=lambda d: len({starts[d] for starts, _ in (*ours, *theirs)}))
    events = sorted(
        [(starts[dim], 0, number, starts[dim] + sizes[dim]) for number, (starts, sizes) in enumerate(ours)]
        + [(starts[dim], 1, number, starts[dim] + sizes[dim]) for number, (starts, sizes) in enumerate(theirs)]
    )
    active: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    for start, side, number, end in events:
        others = active[1 - side]
        others[:] = [other for other in others if other[0] > start]
        yield from ((number, other) if side == 0 else (other, number) for _, other in others)
        active[side].append((end, number))


def cut_out(view: PlacedView, hole: PlacedView | Box) -> Iterator[PlacedView]:
    """Yield what is left of a view without the box of another: at most two boxes per dimension."""
    starts, sizes = list(view.starts), list(view.sizes)
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    if any(start >= h + n or end <= h for start, end, h, n in zip(starts, ends, hole.starts, hole.sizes, strict=True)):
        yield view
        return
    for dim, (h, n) in enumerate(zip(hole.starts, hole.sizes, strict=True)):
        for low, high in ((starts[dim], h), (h + n, ends[dim])):
            if low < high:
                box = (*starts[:dim], low, *starts[dim + 1 :])
                cut = (*(e - s for s, e in zip(starts, ends, strict=True)),)
                yield view.cut(box, (*cut[:dim], high - low, *cut[dim + 1 :]))
        starts[dim], ends[dim] = max(starts[dim], h), min(ends[dim], h + n)


def coverage(views: Iterable[PlacedView], shape: tuple[int, ...]) -> Coverage:
    """Return how views cover a tensor of `shape`: which positions are there once, several times, or not at all."""
    views = tuple(views)
    layout = _layout(views)
    if _is_kept_partition(layout, shape) if len(views) <= _MAX_KEPT else _are_slices(layout, shape):
        return Coverage(views)
    unique: dict[tuple[tuple[int, ...], tuple[int, ...]], PlacedView] = {}
    copies = []
    for view in views:
        if not view.num_elements:
            continue
        first = unique.setdefault((view.starts, view.sizes), view)
        if first is not view:
            copies.append(Overlap(first, view))
    disjoint = list(unique.values())
    if len(disjoint) > 1:
        disjoint, overlaps = _disjoint(disjoint)
        copies += overlaps
    missing = math.prod(shape) - sum(view.num_elements for view in disjoint)
    gap = _gap(disjoint, shape) if missing and len(disjoint) <= _MAX_GAPS else None
    return Coverage(tuple(disjoint), tuple(copies), missing, gap)


@lru_cache(maxsize=64)
def _is_kept_partition(layout: Layout, shape: tuple[int, ...]) -> bool:
    return _are_slices(layout, shape) or _is_partition(layout, shape)


def _are_slices(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of `shape` is cut along one dimension, or not at all, and these are all of its slices."""
    if not shape or not layout or 0 in shape or len(layout[0][1]) != len(shape):
        return False
    cut = [dim for dim, (size, whole) in enumerate(zip(layout[0][1], shape, strict=True)) if size != whole]
    dim = cut[0] if cut else 0
    before, after = shape[:dim], shape[dim + 1 :]
    if any(sizes[:dim] != before or sizes[dim + 1 :] != after or not sizes[dim] for _, sizes in layout):
        return False
    end = 0
    for starts, sizes in sorted(layout):
        if starts[dim] != end or any(starts[:dim]) or any(starts[dim + 1 :]):
            return False
        end += sizes[dim]
    return end == shape[dim]


def _is_partition(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether boxes that are not empty cover each position of a tensor of `shape` once."""
    covered = [math.prod(sizes) for _, sizes in layout]
    return (
        all(covered)
        and sum(covered) == math.prod(shape)
        and all(len(starts) == len(shape) for starts, _ in layout)
        and all(s + n <= end for starts, sizes in layout for s, n, end in zip(starts, sizes, shape, strict=True))
        and all(one == two for one, two, _, _ in _common(layout, layout))
    )


def _disjoint(views: list[PlacedView]) -> tuple[list[PlacedView], list[Overlap]]:
    """Return views cut so that none covers what an earlier one does, and what was cut out."""
    clashes: dict[int, list[PlacedView]] = {}
    overlaps = []
    layout = _layout(views)
    for first, second, starts, sizes in _common(layout, layout):
        if first < second:
            overlaps.append(Overlap(views[first].cut(starts, sizes), views[second].cut(starts, sizes)))
            clashes.setdefault(second, []).append(views[first])
    if not clashes:
        return views, []
    kept: list[PlacedView] = []
    for number, view in enumerate(views):
        parts = [view]
        for hole in clashes.get(number, ()):
            parts = [left for part in parts for left in cut_out(part, hole)]
        kept += parts
    return kept, overlaps


def _gap(views: Iterable[PlacedView], shape: tuple[int, ...]) -> Box | None:
    nothing = StoredArray(Path(), 0, "uint8", shape, (0,) * len(shape))
    left = [PlacedView((0,) * len(shape), shape, nothing, 0, (0,) * len(shape), "")]
    for view in views:
        left = [part for one in left for part in cut_out(one, view)] if shape else []
    return Box(left[0].starts, left[0].sizes) if left else None
