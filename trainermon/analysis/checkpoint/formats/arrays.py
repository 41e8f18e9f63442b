"""Parts of arrays in files, without reading them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from trainermon.analysis.checkpoint.pieces import FlatRange, Piece, StoredArray
from trainermon.analysis.tensor.dtypes import storage_dtype


def rows(stored: StoredArray, dim: int, start: int, size: int) -> StoredArray:
    """Return the part of an array from `start` on in one dimension."""
    shape = (*stored.shape[:dim], size, *stored.shape[dim + 1 :])
    return replace(stored, offset=_moved(stored, start * stored.strides[dim]), shape=shape)


def item(stored: StoredArray, index: int) -> StoredArray:
    """Return what an array has at an index of its first dimension, which goes away."""
    offset = _moved(stored, index * stored.strides[0])
    return replace(stored, offset=offset, shape=stored.shape[1:], strides=stored.strides[1:])


def viewed(stored: StoredArray, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> StoredArray:
    """Return another view of an array's elements, from its `start`-th on."""
    return replace(stored, offset=_moved(stored, start), shape=shape, strides=strides)


def _moved(stored: StoredArray, num_elements: int) -> int:
    return stored.offset + num_elements * storage_dtype(stored.dtype).itemsize


def cut(parts: Sequence[tuple[str, StoredArray]], start: int, length: int) -> Iterator[Piece]:
    """Yield the pieces that elements `start` to `start + length` of one-dimensional parts, end to end, lie in.

    `parts` are labels and arrays; the pieces are flat ranges of what begins at `start`. If the parts end before, so
    do the pieces.
    """
    begin = 0
    for label, stored in parts:
        size = stored.shape[0]
        first, last = max(start, begin), min(start + length, begin + size)
        if first < last:
            yield Piece(FlatRange(first - start, last - first), rows(stored, 0, first - begin, last - first), label)
        begin += size
