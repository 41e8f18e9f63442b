"""Hashes of arrays that add up over parts of a whole one; what `statistics.positions` is for torch, by numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_GOLDEN, _FIRST, _SECOND = (np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_PIECE = 1 << 20
_MASK = (1 << 64) - 1


def positional_hash_of(array: npt.NDArray[Any]) -> int:
    """Return the hash of an array that is whole: the sum over its elements of a mix of bits and index; 0 if empty.

    Real and imaginary parts of complex numbers count as elements along a last dimension.
    """
    bits, total = _bits(array).reshape(-1), 0
    for begin in range(0, bits.size, _PIECE):
        piece = bits[begin : begin + _PIECE].astype(np.uint64)
        places = np.arange(begin + 1, begin + 1 + piece.size, dtype=np.uint64)
        total += int(_mixed(piece + places * _GOLDEN).sum(dtype=np.uint64))
    return total & _MASK


def samples_hash_of(array: npt.NDArray[Any]) -> int:
    """Return the sum of a mix of the hashes of an array's parts along its first dimension: their order does not matter.

    0 for a scalar, or without elements.
    """
    if not array.ndim or not array.size:
        return 0
    hashes = np.array([positional_hash_of(part) for part in array], np.uint64)
    return int(_mixed(hashes + _GOLDEN).sum(dtype=np.uint64))


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    mixed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


def _bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the elements' bits as unsigned integers, in the shape of the array."""
    array = np.ascontiguousarray(array)
    if array.dtype.kind == "c":
        array = array.view(array.real.dtype)
    return array.view(f"u{array.dtype.itemsize}")
