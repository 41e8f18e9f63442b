"""The CRC-32 of a buffer, as zlib has it; many times faster where the compiled library and the processor can."""

from __future__ import annotations

import ctypes
import functools
import zlib
from typing import Any

from trainermon.core.native.library import library_or_none

WORTH = 8192
"""Bytes from which the compiled library is called: below, the call through ctypes costs more than it saves."""


def crc32(data: Any, value: int = 0) -> int:
    """Return the CRC-32 of a C-contiguous buffer, continued from `value`, that of all before it; copies nothing."""
    compiled = _compiled() if memoryview(data).nbytes >= WORTH else None
    if compiled is None:
        return zlib.crc32(data, value)
    try:
        address = data if isinstance(data, bytes) else ctypes.addressof(ctypes.c_char.from_buffer(data))
    except TypeError:  # a buffer that may not be written to tells no address
        return zlib.crc32(data, value)
    found = ctypes.c_uint32(value)
    if not compiled.trainermon_crc32(address, memoryview(data).nbytes, ctypes.byref(found)):
        return zlib.crc32(data, value)
    return found.value


@functools.cache
def _compiled() -> ctypes.CDLL | None:
    found = library_or_none()
    if found is None or not hasattr(found, "trainermon_crc32"):
        return None
    found.trainermon_crc32.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    found.trainermon_crc32.restype = ctypes.c_int
    return found
