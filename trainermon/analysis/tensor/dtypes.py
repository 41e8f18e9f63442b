"""What the stored elements of a dtype are as numbers, numpy's own or not. Needs no torch.

bfloat16 and the 8-bit floats are not known to numpy: their bits are kept as unsigned integers, and become float32,
which holds each of them exactly.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainermon.core.errors import DumpError

Raw = npt.NDArray[Any]
"""Elements as they are stored: of numpy's own dtypes as they are, else the bits."""


class _Float8(NamedTuple):
    """A format of 8 bits: exponent and mantissa widths, bias, and what its special codes mean."""

    exponent: int
    mantissa: int
    bias: int
    infinities: bool
    nans: frozenset[int]


# Source: OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2); Noune et al., "8-bit Numerical Formats for Deep
# Neural Networks" (2022), for the `fnuz` forms, which have one NaN, at negative zero.
_FLOAT8 = {
    "float8_e4m3fn": _Float8(4, 3, 7, infinities=False, nans=frozenset((0x7F, 0xFF))),
    "float8_e4m3fnuz": _Float8(4, 3, 8, infinities=False, nans=frozenset((0x80,))),
    "float8_e5m2": _Float8(5, 2, 15, infinities=True, nans=frozenset((0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF))),
    "float8_e5m2fnuz": _Float8(5, 2, 16, infinities=False, nans=frozenset((0x80,))),
}
_E8M0 = "float8_e8m0fnu"
BITS: dict[str, npt.DTypeLike] = {"bfloat16": np.uint16, **dict.fromkeys((*_FLOAT8, _E8M0), np.uint8)}
"""The dtypes that numpy does not know, and in what their bits are kept."""

_NATIVE = (
    *("float64", "float32", "float16", "complex128", "complex64", "bool"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
)
DTYPES = (*_NATIVE, *BITS)
"""Every dtype that can be read and written, by torch's names."""


@functools.cache
def storage_dtype(dtype: str) -> np.dtype[Any]:
    """Return the little-endian numpy dtype in which elements of `dtype` are stored.

    For bfloat16 and float8, unsigned integers.

    Raises:
        DumpError: such elements cannot be read.
    """
    if dtype not in DTYPES:
        raise DumpError(f"elements of type {dtype} cannot be read: expected one of {', '.join(DTYPES)}")
    stored: np.dtype[Any] = np.dtype(BITS.get(dtype, dtype)).newbyteorder("<")
    return stored


def numbers(raw: Raw, dtype: str) -> npt.NDArray[Any]:
    """Return stored elements as numbers, exactly: float32 for what numpy does not know, else the dtype itself.

    >>> numbers(np.array([0x3F80, 0x7F80], np.uint16), "bfloat16").tolist()
    [1.0, inf]
    """
    if dtype == "bfloat16":
        bits: npt.NDArray[np.uint32] = raw.astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)
    if dtype in BITS:
        return _table(dtype)[raw]
    return raw if raw.dtype.isnative else raw.astype(raw.dtype.newbyteorder("="))


def rounded(values: npt.NDArray[Any], dtype: str) -> Raw:
    """Return numbers as stored elements of `dtype`, rounded to the nearest one.

    What is too large becomes infinite, or what torch makes of it where the dtype has no infinity.

    Raises:
        DumpError: numpy does not know the dtype, and torch, which rounds to it, is not installed.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype not in BITS:
            return values.astype(storage_dtype(dtype))
    try:
        import torch
    except ImportError as error:
        raise DumpError(
            f"rounding to {dtype} needs torch: install it, or choose one of {', '.join(_NATIVE)}"
        ) from error
    copy = np.array(values)  # torch wants to own, or be able to write
    tensor = torch.from_numpy(copy).to(getattr(torch, dtype))
    return np.asarray(tensor.view(getattr(torch, np.dtype(BITS[dtype]).name)).numpy())


def magnitudes(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the numbers as float64, complex ones as their magnitudes; the shape stays."""
    return np.asarray(np.abs(values) if values.dtype.kind == "c" else values, dtype=np.float64)


def parts(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the numbers as a flat float64 array; of complex ones, real and imaginary part in turn."""
    flat = np.ascontiguousarray(values).reshape(-1)
    return np.asarray(flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat, dtype=np.float64)


@functools.cache
def _table(dtype: str) -> npt.NDArray[np.float32]:
    """Return the number that each code of 8 bits stands for."""
    if dtype == _E8M0:  # Source: OCP Microscaling Formats 1.0, section 5.4.1
        return np.array([*(2.0 ** (code - 127) for code in range(255)), math.nan], np.float32)
    return np.array([_decode(code, _FLOAT8[dtype]) for code in range(256)], np.float32)


def _decode(code: int, form: _Float8) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code & 0x7F) >> form.mantissa, code & ((1 << form.mantissa) - 1)
    if code in form.nans:
        return math.nan
    if form.infinities and exponent == (1 << form.exponent) - 1:
        return sign * math.inf
    whole = mantissa + (1 << form.mantissa if exponent else 0)
    return sign * math.ldexp(whole, max(exponent, 1) - form.bias - form.mantissa)
