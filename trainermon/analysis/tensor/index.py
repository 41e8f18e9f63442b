"""Index expressions like `3, :, 10:20`: parsed, never evaluated, and led back from a part to the whole tensor."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trainermon.core.errors import DumpError

_NUMBER = re.compile(r"[+-]?\d{1,18}")


@dataclass(frozen=True, slots=True)
class IndexPart:
    """The part of a tensor that an index such as `[3, :, 10:20]` selects.

    Attributes:
        shape: Shape of the whole tensor.
        dims: For each dimension the selected position, or the range of positions.
    """

    shape: tuple[int, ...]
    dims: tuple[int | range, ...]

    @property
    def index(self) -> tuple[int | slice, ...]:
        """The part as a numpy index (integers and slices), without negative numbers where possible."""
        return tuple(dim if isinstance(dim, int) else _as_slice(dim) for dim in self.dims)

    @property
    def text(self) -> str:
        """The part as text, as one would write it: `[3, :, 10:20]`."""
        sizes = zip(self.dims, self.shape, strict=True)
        return f"[{', '.join(str(dim) if isinstance(dim, int) else _range_text(dim, size) for dim, size in sizes)}]"

    def whole(self, position: Sequence[int]) -> tuple[int, ...]:
        """Return the position in the whole tensor of the element at `position` of the part.

        >>> parse_index("2, 10::5", (4, 30)).whole((1,))
        (2, 15)
        """
        inner = iter(position)
        return tuple(dim if isinstance(dim, int) else dim[next(inner)] for dim in self.dims)


def parse_index(text: str, shape: Sequence[int]) -> IndexPart:
    """Return the part of a tensor that `text` selects, in numpy's notation: integers, slices and one `...`.

    Raises:
        DumpError: it is no such expression, has too many dimensions, or a position outside of the tensor.
    """
    words = [word.strip() for word in text.strip().removeprefix("[").removesuffix("]").split(",")]
    words = [] if words == [""] else words
    if words.count("...") > 1:
        raise DumpError(f"index {text!r} has more than one ...")
    if "..." in words:
        place = words.index("...")
        words[place : place + 1] = [":"] * (len(shape) - len(words) + 1)
    if len(words) > len(shape):
        raise DumpError(f"index {text!r} has {len(words)} dimensions, the tensor has {len(shape)}: {list(shape)}")
    words += [":"] * (len(shape) - len(words))
    dims = tuple(_parse_dim(word, size, text) for word, size in zip(words, shape, strict=True))
    return IndexPart(tuple(shape), dims)


def _parse_dim(word: str, size: int, text: str) -> int | range:
    pieces = [piece.strip() for piece in word.split(":")]
    if len(pieces) > 3 or not all(_NUMBER.fullmatch(piece) for piece in pieces if piece or len(pieces) == 1):
        raise DumpError(f"{word!r} in index {text!r} is neither a number nor a slice such as 3:10 or ::2")
    if len(pieces) > 1:
        first, last, step = ([int(piece) if piece else None for piece in pieces] + [None])[:3]
        if step == 0:
            raise DumpError(f"{word!r} in index {text!r} has a step of zero")
        return range(size)[slice(first, last, step)]
    position = int(word)
    if not -size <= position < size:
        raise DumpError(f"position {position} in index {text!r} is outside of a dimension of {size}")
    return position % size


def _range_text(dim: range, size: int) -> str:
    if dim == range(size):
        return ":"
    return f"{dim.start}:{dim.stop if dim.stop >= 0 else ''}{f':{dim.step}' if dim.step != 1 else ''}"


def _as_slice(dim: range) -> slice:
    if dim.step < 0 and dim.stop < 0:  # a slice would take a negative end for one from the back
        return slice(dim.start, None, dim.step)
    return slice(dim.start, dim.stop, dim.step)
