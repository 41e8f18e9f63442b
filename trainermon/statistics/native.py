"""How the compiled library reads elements by their address; without torch.

No tensor of any framework is known here.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from trainermon.core.native.library import library
from trainermon.core.values import STATISTICS

KINDS = MappingProxyType(
    {
        "float32": 0,
        "bfloat16": 1,
        "float16": 2,
        "float64": 3,
        "int8": 4,
        "int16": 5,
        "int32": 6,
        "int64": 7,
        "uint8": 8,
        "bool": 8,
        "uint16": 9,
        "uint32": 10,
        "uint64": 11,
    }
)
"""The number of each dtype that can be read, as in KINDS of moments.c. A bool is an integer of one byte, 0 or 1."""

ROW_BYTES = 8 * len(STATISTICS)

Lies = tuple[int, int, int]
"""Where a tensor's elements lie, one after the other: address, number of elements, number of the dtype in `KINDS`."""

PARALLEL = 1 << 22
"""Elements, of all tensors of a call, from which the library starts threads: PARALLEL of moments.c."""

_BFLOAT16 = KINDS["bfloat16"]
_NAMES = {kind: name for name, kind in KINDS.items() if name != "bool"}
_CHUNK = 65536  # elements that numpy widens to float64 at a time


class NativeMoments:
    """The library's two functions that write rows of moments, with the arguments that they take.

    Attributes:
        write: Takes what `pack` has packed of tensors, their number, the address at which their rows are to be written,
            float64, one after the other, and how many threads may read. Returns 0, or 1 + the number of a tensor that
            has elements but no memory: then nothing is written. Other threads of the interpreter run meanwhile.
        strided: Takes the address of one tensor, its kind, number, length and stride of its runs, and that of its row.
    """

    def __init__(self, found: ctypes.CDLL) -> None:
        moments = found.trainermon_moments
        moments.argtypes = (ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
        moments.restype = ctypes.c_int64
        self.write: Callable[[bytes, int, int, int], int] = moments
        self.strided = found.trainermon_moments_strided
        self.strided.argtypes = (ctypes.c_void_p, *[ctypes.c_int64] * 4, ctypes.c_void_p)
        self.strided.restype = None


def pack(fields: Iterable[int], num_tensors: int) -> bytes:
    """Return addresses, counts and kinds of tensors, three numbers each, in the form that the library reads."""
    return _packer(3 * num_tensors)(*fields)


def native() -> NativeMoments | None:
    """Return the library's functions; None if it is not used, see `library`.

    Raises:
        ValueError: TRAINERMON_KERNEL has an unknown value.
    """
    found = library()
    return None if found is None else NativeMoments(found)


def write_by_numpy(tensors: Iterable[Lies], out: npt.NDArray[np.float64]) -> int:
    """Write the rows of tensors into the first rows of `out`, as `NativeMoments.write` does where there is a library.

    `out` is float64 `[rows, 8]`, its columns those of `values.STATISTICS`. Takes ten times as long. Returns 0, or 1 +
    the number of a tensor that has elements but no memory.
    """
    for number, (address, count, kind) in enumerate(tensors):
        if count and not address:
            return 1 + number
        out[number] = _row_by_numpy(address, count, kind)
    return 0


def _row_by_numpy(address: int, count: int, kind: int) -> npt.NDArray[np.float64]:
    stored = np.dtype(np.uint16) if kind == _BFLOAT16 else np.dtype(_NAMES[kind])
    row = np.array([count, np.inf, -np.inf, 0, 0, 0, 0, 0], np.float64)
    for begin in range(0, count, _CHUNK):
        size = min(_CHUNK, count - begin) * stored.itemsize
        buffer = (ctypes.c_char * size).from_address(address + begin * stored.itemsize)
        elements: npt.NDArray[Any] = np.frombuffer(memoryview(buffer), stored)
        if kind == _BFLOAT16:
            elements = (elements.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            values = elements.astype(np.float64)
            finite = values[np.isfinite(values)]
            row[1] = min(row[1], finite.min(initial=np.inf))
            row[2] = max(row[2], finite.max(initial=-np.inf))
            nans = np.count_nonzero(np.isnan(values))
            zeros = values.size - np.count_nonzero(values)
            row[3:] += (finite.sum(), finite @ finite, zeros, nans, values.size - finite.size - nans)
    return row


@functools.lru_cache(maxsize=256)
def _packer(num_fields: int) -> Callable[..., bytes]:
    return struct.Struct(f"{num_fields}q").pack
