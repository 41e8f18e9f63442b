"""The statistics of tensors as JSON text."""

from __future__ import annotations

import ctypes
import enum
import functools
import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trainermon.core.native.library import library_or_none
from trainermon.statistics.pairs import LEAST_SQUARE

NO_NUMBERS = '"Max": null, "Min": null, "Mean": null, "Norm": null'
_FRACTIONS = '"Max": %r, "Min": %r, "Mean": %r, "Norm": %r, "nans": %d, "infs": %d, "zeros": %d'
_LINE_BYTES = 256  # of the library's text of a row, at most
_POWERS = range(-292, 325)  # of ten, that a double may be multiplied by


class ElementKind(enum.Enum):
    """What the elements of a tensor are, which decides how its extremes are written."""

    BOOLEAN = enum.auto()
    INTEGER = enum.auto()
    FRACTION = enum.auto()


def numbers_texts(rows: npt.NDArray[np.float64], kinds: Sequence[ElementKind]) -> list[str]:
    """Return `numbers_text` of each of the `rows`, float64 `[n, 8]`, contiguous; `kinds` are those of their elements.

    Cost: 0.4 µs for each with the compiled library, ten times that without.
    """
    put = _compiled()
    if put is None:
        return [numbers_text(row, kind) for row, kind in zip(rows.tolist(), kinds, strict=True)]
    out = np.empty(_LINE_BYTES * len(kinds), np.uint8)
    are_fractions = bytes([kind is ElementKind.FRACTION for kind in kinds])
    size = put(rows.ctypes.data, are_fractions, len(kinds), _powers_of_ten(), out.ctypes.data)
    texts = str(out.data[:size], "ascii").split("\n")[:-1]
    for number, text in enumerate(texts):
        if not text:  # of other kinds, or beyond what a double holds: they are few
            texts[number] = numbers_text(rows[number].tolist(), kinds[number])
    return texts


def numbers_text(row: Sequence[float], kind: ElementKind) -> str:
    """Return a tensor's statistics as JSON items without braces: `"Max": …, "Min": …, "Mean": …, "Norm": …, "nans": …`.

    `row` are its eight moments (`statistics`), `kind` what its elements are. Without a finite element the first four
    are null. Max and Min of integers and booleans stay integers and booleans; a boolean has no mean and no norm, a
    complex tensor is described by its absolute values.
    """
    count, low, high, total, squares, zeros, nans, infs = row
    finite = count - nans - infs
    if kind is ElementKind.FRACTION and finite:
        mean, norm = total / finite, _norm(squares, low, high)
        if math.isfinite(mean + norm):
            return _FRACTIONS % (high, low, mean, norm, nans, infs, zeros)
    counts = f'"nans": {int(nans)}, "infs": {int(infs)}, "zeros": {int(zeros)}'
    if not finite:
        return f"{NO_NUMBERS}, {counts}"
    if kind is ElementKind.BOOLEAN:
        return f'"Max": {_boolean(high)}, "Min": {_boolean(low)}, "Mean": null, "Norm": null, {counts}'
    if kind is ElementKind.INTEGER:
        low, high = int(low), int(high)
    mean, norm = total / finite, _norm(squares, low, high)
    if not (math.isfinite(mean) and math.isfinite(norm)):  # a sum of float64 values that does not fit float64
        return f'"Max": {high!r}, "Min": {low!r}, "Mean": {_finite(mean)}, "Norm": {_finite(norm)}, {counts}'
    return f'"Max": {high!r}, "Min": {low!r}, "Mean": {mean!r}, "Norm": {norm!r}, {counts}'


def _norm(squares: float, low: float, high: float) -> float:
    """Return the norm; NaN where a sum of squares of float64 numbers says nothing, being below what float64 holds."""
    return math.sqrt(squares) if squares >= LEAST_SQUARE or low == high == 0 else math.nan


@functools.cache
def _compiled() -> Any:
    found = library_or_none()
    if found is None or not hasattr(found, "trainermon_numbers"):
        return None
    put = found.trainermon_numbers
    put.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p)
    put.restype = ctypes.c_int64
    return put


@functools.cache
def _powers_of_ten() -> bytes:
    """Return the upper 128 bits of each power of ten, rounded up, as numbers.c takes them. Cost: 1 ms, once."""
    return b"".join(struct.pack("<2Q", *divmod(_upper_bits(power), 1 << 64)) for power in _POWERS)


def _upper_bits(power: int) -> int:
    scale: int = 10 ** abs(power)
    if power < 0:
        return -(-(1 << scale.bit_length() + 127) // scale)
    excess = scale.bit_length() - 128
    return -(-scale >> excess) if excess > 0 else scale << -excess


def _boolean(value: float) -> str:
    return "true" if value else "false"


def _finite(value: float) -> str:
    return repr(value) if math.isfinite(value) else "null"
