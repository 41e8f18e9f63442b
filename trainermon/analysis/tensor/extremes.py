"""The elements of largest magnitude, or the positions at which two tensors differ most, in one pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainermon.analysis.tensor.dtypes import magnitudes
from trainermon.analysis.tensor.files import StoredTensor
from trainermon.analysis.tensor.profile import position_of
from trainermon.core.errors import DumpError

_Array = npt.NDArray[Any]
_Piece = tuple[tuple[_Array, ...], npt.NDArray[np.float64]]  # the columns to show, and what to order by


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtremeElement:
    """One element of a tensor, or the same element of two.

    Attributes:
        position: Its index in each dimension.
        values: Its value; of two tensors: ours, theirs, magnitude of the difference.
    """

    position: tuple[int, ...]
    values: tuple[Any, ...]


def largest(tensor: StoredTensor, number: int) -> tuple[ExtremeElement, ...]:
    """Return the `number` elements with the largest magnitude.

    NaN and Inf come first, equal ones in order of position.
    """
    pieces = (((chunk,), np.abs(magnitudes(chunk))) for chunk in tensor.chunks())
    return _largest(pieces, number, tensor.shape)


def largest_differences(tensor: StoredTensor, other: StoredTensor, number: int) -> tuple[ExtremeElement, ...]:
    """Return the `number` positions at which two tensors are furthest apart, none where they are equal.

    A value that is not finite on one side only, or another one on each, is furthest.

    Raises:
        DumpError: the shapes differ.
    """
    return _largest(_pairs(tensor, other), number, tensor.shape)


def check_shapes(tensor: StoredTensor, other: StoredTensor) -> None:
    """Raise an error if two tensors have different shapes.

    Raises:
        DumpError: the shapes differ.
    """
    if tensor.shape != other.shape:
        raise DumpError(
            f"{tensor.label} is {list(tensor.shape)}, {other.label} is {list(other.shape)}: expected one shape;"
            " choose a part of each with --index, and --other-index for the second"
        )


def distances(ours: _Array, theirs: _Array) -> npt.NDArray[np.float64]:
    """Return the absolute difference of each element: 0 where both are NaN, NaN where one alone is not finite."""
    if ours.dtype.kind in "iub" and theirs.dtype.kind in "iub":
        gap = np.where(ours == theirs, 0.0, np.abs(ours.astype(np.float64) - theirs.astype(np.float64)))
        return np.where((gap == 0) & (ours != theirs), 1.0, gap)  # integers beyond what float64 tells apart
    with np.errstate(invalid="ignore", over="ignore"):
        apart = _wide(ours) - _wide(theirs)
        gap = np.where((ours == theirs) | (np.isnan(ours) & np.isnan(theirs)), 0.0, np.abs(apart))
        return np.where((gap != 0) & ~(np.isfinite(ours) & np.isfinite(theirs)), np.nan, gap)


def _wide(values: _Array) -> _Array:
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def _pairs(tensor: StoredTensor, other: StoredTensor) -> Iterator[_Piece]:
    check_shapes(tensor, other)
    for ours, theirs in zip(tensor.chunks(), other.chunks(), strict=True):
        gap = distances(ours, theirs)
        yield (ours, theirs, gap), gap


def _largest(pieces: Iterator[_Piece], number: int, shape: tuple[int, ...]) -> tuple[ExtremeElement, ...]:
    best: list[tuple[float, int, tuple[Any, ...]]] = []
    start = 0
    for columns, sizes in pieces:
        order = np.where(np.isnan(sizes), np.inf, sizes)
        keep = np.flatnonzero(order > 0) if len(columns) > 1 else np.arange(order.size)
        keep = _first_largest(order, keep, number)
        best += [(float(order[i]), start + int(i), tuple(column[i].item() for column in columns)) for i in keep]
        best = sorted(best, key=lambda item: (-item[0], item[1]))[:number]
        start += sizes.size
    return tuple(ExtremeElement(position=position_of(flat, shape), values=values) for _, flat, values in best)


def _first_largest(order: npt.NDArray[np.float64], keep: npt.NDArray[np.intp], number: int) -> npt.NDArray[np.intp]:
    """Return the `number` of `keep` with the largest `order`, of equal ones the first; without sorting all of them."""
    if len(keep) <= number:
        return keep
    sizes = order[keep]
    least = np.partition(sizes, -number)[-number]
    above = keep[sizes > least]
    return np.concatenate([above, keep[sizes == least][: number - len(above)]])
