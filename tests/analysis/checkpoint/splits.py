"""Random splits of tensors, written as raw files: what readers of checkpoints hand over, without a format."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from trainermon.analysis.checkpoint.boxes import dense_strides
from trainermon.analysis.checkpoint.pieces import (
    Box,
    Checkpoint,
    FlatRange,
    Piece,
    StoredArray,
    TensorPieces,
)

SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box | FlatRange]:
    """Return regions that cover a tensor of `shape` once: boxes, or flat ranges."""
    total = math.prod(shape)
    if draw(st.booleans()):
        cuts = sorted({0, total, *draw(st.lists(st.integers(0, total), max_size=5))})
        return [FlatRange(start, end - start) for start, end in itertools.pairwise(cuts)]
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        low = draw(st.integers(0, box.sizes[dim]))
        for start, size in ((0, low), (low, box.sizes[dim] - low)):
            if size:
                starts = (*box.starts[:dim], box.starts[dim] + start, *box.starts[dim + 1 :])
                boxes.append(Box(starts, (*box.sizes[:dim], size, *box.sizes[dim + 1 :])))
    return draw(st.permutations(boxes))


def pieces_in(path: Path, array: NDArray[Any], parts: list[Box | FlatRange], dtype: str | None = None) -> TensorPieces:
    """Write an array into one file, cut into `parts`, and return it as pieces; `dtype` if numpy has no name for it."""
    dtype = dtype or array.dtype.name
    written, pieces = 16, []  # bytes; nothing begins at 0, so that an offset that is left out shows
    with path.open("wb") as file:
        file.write(b"\xff" * written)
        for number, region in enumerate(parts):
            part = part_of(array, region)
            file.write(part.tobytes())
            stored = StoredArray(path, written, dtype, part.shape, dense_strides(part.shape))
            pieces.append(Piece(region, stored, f"rank {number}"))
            written += part.nbytes
    return TensorPieces(path.stem, array.shape, dtype, tuple(pieces))


def part_of(array: NDArray[Any], region: Box | FlatRange) -> NDArray[Any]:
    """Return the elements of a region."""
    if isinstance(region, FlatRange):
        return array.reshape(-1)[region.start : region.start + region.length]
    ends = zip(region.starts, region.sizes, strict=True)
    index = tuple(slice(start, start + size) for start, size in ends)
    return np.asarray(array[index]) if index else array


def checkpoint_of(folder: Path, arrays: dict[str, NDArray[Any]], **others: Any) -> Checkpoint:
    """Return a checkpoint of whole tensors, written below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: pieces_in(folder / f"{name}.raw", array, [Box((0,) * array.ndim, array.shape)])
        for name, array in arrays.items()
    }
    return Checkpoint(path=folder, format="folder", tensors=tensors, **others)
