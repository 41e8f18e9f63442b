"""Parameters that ranks have parts of: how they are split, and where in the whole the pieces of a part belong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from trainermon.analysis.checkpoint.boxes import views_of
from trainermon.analysis.checkpoint.pieces import Box, Piece, TensorPieces


class Split(NamedTuple):
    """How a parameter is split: in which dimension, and how much of each of its parts each rank has.

    Parts are those that were joined before, such as q, k and v; mostly there is one. No dimension: every rank has all.
    """

    dim: int | None
    widths: Sequence[Sequence[int]] = ()
    note: str = ""


def evenly(shapes: Sequence[tuple[int, ...]], dim: int, num_parts: int) -> Split:
    """Return the split of a parameter that has equal parts; `shapes` are those on each rank.

    Raises:
        ValueError: a rank's rows do not make that many parts.
    """
    if any(shape[dim] % num_parts for shape in shapes):
        raise ValueError(f"{shapes[0][dim]} rows of a rank do not make {num_parts} equal parts")
    return Split(dim, [[shape[dim] // num_parts for shape in shapes]] * num_parts)


def moved(tensor: TensorPieces, rank: int, split: Split) -> Iterator[Piece]:
    """Yield the pieces of a rank's part at their places in the whole."""
    dim = split.dim
    assert dim is not None
    begins = [0, *accumulate(sum(widths) for widths in split.widths)]
    local = [0, *accumulate(widths[rank] for widths in split.widths)]
    for view in views_of(tensor):
        for part, widths in enumerate(split.widths):
            start = max(view.starts[dim], local[part])
            end = min(view.starts[dim] + view.sizes[dim], local[part + 1])
            if start >= end:
                continue
            starts, sizes = list(view.starts), list(view.sizes)
            starts[dim], sizes[dim] = start, end - start
            stored = view.cut(tuple(starts), tuple(sizes)).as_array()
            starts[dim] = begins[part] + sum(widths[:rank]) + start - local[part]
            yield Piece(Box(tuple(starts), tuple(sizes)), stored, view.label)
