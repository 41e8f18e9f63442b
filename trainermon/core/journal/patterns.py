"""What follows from which series a block shows, worked out once: a rank shows a few combinations, over and over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar

from numpy.typing import NDArray

Rows: TypeAlias = slice | NDArray[Any]
T = TypeVar("T")

_MAX_PATTERNS = 16  # kinds that are collected at different intervals give a few patterns of series, not many


class ByPattern(Generic[T]):
    """Keeps what was made of the ids of a block's series, for as many combinations of them as there usually are.

    Cost: about 0.5 us for 3 000 series that are those of the block before.

    Args:
        make: Given the ids, [n], returns what follows from them.
    """

    def __init__(self, make: Callable[[NDArray[Any]], T]) -> None:
        self._make = make
        self._made: dict[bytes, T] = {}
        self._last: tuple[bytes, T] | None = None

    def of(self, series: NDArray[Any]) -> T:
        """Return what follows from the ids `series`, of one integer type."""
        name = series.tobytes()
        last = self._last
        if last is None or last[0] != name:
            last = self._last = name, self._find(name, series)
        return last[1]

    def _find(self, name: bytes, series: NDArray[Any]) -> T:
        if name not in self._made:
            if len(self._made) >= _MAX_PATTERNS:
                self._made.clear()
            self._made[name] = self._make(series)
        return self._made[name]

    def clear(self) -> None:
        """Forget everything: the ids are about to mean something else."""
        self._made.clear()
        self._last = None


def compact(indices: NDArray[Any]) -> Rows:
    """Return ascending indices as a slice if they are consecutive, else unchanged: slices copy nothing.

    None at all are an empty slice.
    """
    if not len(indices):
        return slice(0, 0)
    first, last = int(indices[0]), int(indices[-1])
    if last - first + 1 == len(indices) and (indices[1:] > indices[:-1]).all():
        return slice(first, last + 1)
    return indices
