"""Tensors as boxes of the whole, renamed and regrouped without being read: rows moved, halves and layers taken out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from trainermon.analysis.checkpoint.boxes import PlacedView, views_of
from trainermon.analysis.checkpoint.pieces import TensorPieces


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor as boxes of the whole, wherever they lie in files.

    Attributes:
        name: Its name, in the checkpoint or after translation.
        shape: Of the whole.
        dtype: As `StoredArray` has it.
        views: Its boxes; replicas among them.
        notes: What a reader should know.
        ranks: As `TensorPieces` has them: of each box, which rank has it, if copies and parts cannot be told apart.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    views: Iterable[PlacedView]
    notes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def num_elements(self) -> int:
        """The product of the sizes."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class RowMove:
    """Rows of a tensor (positions in its first dimension) that stand elsewhere in another.

    Attributes:
        start: The first of them.
        length: How many.
        to: Where the first stands in the other.
    """

    start: int
    length: int
    to: int


class _Views(Iterable[PlacedView]):
    """The boxes of a tensor as it is in the checkpoint, made whenever they are looked at: there may be many."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: TensorPieces) -> None:
        self._tensor = tensor

    def __iter__(self) -> Iterator[PlacedView]:
        return iter(views_of(self._tensor))


def placed(tensor: TensorPieces) -> PlacedTensor:
    """Return a tensor of a checkpoint as boxes."""
    return PlacedTensor(tensor.name, tensor.shape, tensor.dtype, _Views(tensor), tensor.notes, tensor.ranks)


def with_ranks_placed(ours: PlacedTensor, theirs: PlacedTensor) -> tuple[PlacedTensor, PlacedTensor]:
    """Return two tensors that are one, where the ranks' parts of each are known: what ranks have is parts or copies.

    The sizes on the other side tell, and the dimension. If both sides have as many ranks and the same sizes, nothing
    tells: parts are put one after the other then, so that each rank is compared with its like.
    """
    counts = [1 + max(side.ranks, default=0) for side in (ours, theirs)]
    if counts == [1, 1]:
        return ours, theirs
    dim, said = _split_of((ours.shape, theirs.shape), counts)
    if dim is None:
        return replace(ours, ranks=()), replace(theirs, ranks=())
    first, second = (
        _side_by_side(side, dim, count, said) if count > 1 else side
        for side, count in zip((ours, theirs), counts, strict=True)
    )
    return first, second


def _split_of(shapes: tuple[tuple[int, ...], tuple[int, ...]], counts: Sequence[int]) -> tuple[int | None, str]:
    """Return in which dimension two tensors are split over so many ranks, None if all have the whole; and why."""
    one, other = shapes
    if one == other:
        return (0, "each rank is compared with its like") if one and counts[0] == counts[1] else (None, "")
    if len(one) != len(other):
        return None, ""
    apart = [dim for dim, sizes in enumerate(zip(one, other, strict=True)) if sizes[0] != sizes[1]]
    if len(apart) > 1 or (apart[0] and one[apart[0]] * counts[0] != other[apart[0]] * counts[1]):
        return None, ""
    return apart[0], f"taken as split in dimension {apart[0]}, as its sizes on both sides say"


def _side_by_side(tensor: PlacedTensor, dim: int, count: int, said: str) -> PlacedTensor:
    """Return a tensor of what each rank has, one after the other in a dimension."""
    size = tensor.shape[dim]
    views = [
        view._replace(starts=(*view.starts[:dim], view.starts[dim] + rank * size, *view.starts[dim + 1 :]))
        for view, rank in zip(tensor.views, tensor.ranks, strict=True)
    ]
    shape = (*tensor.shape[:dim], size * count, *tensor.shape[dim + 1 :])
    return replace(tensor, shape=shape, views=tuple(views), notes=(*tensor.notes, said), ranks=())


def moved(tensor: PlacedTensor, moves: Sequence[RowMove]) -> list[PlacedView]:
    """Return the views of a tensor with rows moved; rows that no move names are left out."""
    found = []
    views = list(tensor.views)
    for move in moves:
        for view in views:
            low = max(view.starts[0], move.start)
            high = min(view.starts[0] + view.sizes[0], move.start + move.length)
            if low < high:
                part = view.cut((low, *view.starts[1:]), (high - low, *view.sizes[1:]))
                found.append(part._replace(starts=(low - move.start + move.to, *part.starts[1:])))
    return found


def joined(name: str, sources: Sequence[tuple[PlacedTensor, Sequence[RowMove]]]) -> PlacedTensor:
    """Return one tensor made of rows of several, whose other dimensions are those of the first."""
    views = [view for tensor, moves in sources for view in moved(tensor, moves)]
    first = sources[0][0]
    rows = sum(move.length for _, moves in sources for move in moves)
    notes = tuple(note for tensor, _ in sources for note in tensor.notes)
    return PlacedTensor(name, (rows, *first.shape[1:]), first.dtype, tuple(views), notes)


def rows_of(tensor: PlacedTensor, name: str, moves: Sequence[RowMove]) -> PlacedTensor:
    """Return a tensor of some rows of another."""
    return joined(name, [(tensor, moves)])


def element_of(tensor: PlacedTensor, name: str, index: int) -> PlacedTensor:
    """Return one entry of a tensor's first dimension as a tensor without that dimension: a layer, an expert."""
    views = [
        view._replace(starts=view.starts[1:], sizes=view.sizes[1:], strides=view.strides[1:])
        for view in moved(tensor, [RowMove(index, 1, 0)])
    ]
    return PlacedTensor(name, tensor.shape[1:], tensor.dtype, tuple(views), tensor.notes)


def transposed(tensor: PlacedTensor) -> PlacedTensor:
    """Return a tensor of two dimensions with both exchanged."""
    views = [
        view._replace(starts=view.starts[::-1], sizes=view.sizes[::-1], strides=view.strides[::-1])
        for view in tensor.views
    ]
    return replace(tensor, shape=tensor.shape[::-1], views=tuple(views))
