"""The CRC-32 of tensors, as zlib has it; many times faster where the compiled library and the processor can."""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from trainermon.core.native.library import library
from trainermon.core.values import STATISTICS
from trainermon.statistics.kernel import moments

_FLOAT32 = 0  # as in KINDS of moments.c


def crc32(tensor: Tensor) -> int:
    """Return the CRC-32 of the elements' bytes in memory; 0 of a tensor without elements. Any contiguous CPU tensor."""
    size = tensor.numel() * tensor.element_size()
    found = ctypes.c_uint32(0)
    compiled = _compiled()
    if compiled is not None and compiled.trainermon_crc32(tensor.data_ptr(), size, ctypes.byref(found)):
        return found.value
    return zlib.crc32((ctypes.c_ubyte * size).from_address(tensor.data_ptr()) if size else b"")


def moments_and_crc32(tensors: Sequence[Tensor]) -> tuple[list[list[float]], list[int]]:
    """Return the eight moments of each tensor, in the order of `STATISTICS`, and the CRC-32 of its elements as float32.

    Cost: float32 in the memory of the CPU is read once, without the interpreter lock. Of others the moments are taken
    first; a float32 copy of one tensor at a time is made on the host, which waits for the device.

    Raises:
        ValueError: A tensor has elements but no memory.
    """
    together = _together(tensors)
    if together is not None:
        return together
    rows = torch.empty(
        (len(tensors), len(STATISTICS)), dtype=torch.float64, device=tensors[0].device if tensors else None
    )
    moments(tensors, rows)
    return rows.tolist(), [crc32(tensor.float().contiguous().cpu()) for tensor in tensors]


def _together(tensors: Sequence[Tensor]) -> tuple[list[list[float]], list[int]] | None:
    """Return the same in one pass; None unless the library can, and all are dense float32 on the CPU."""
    compiled = _compiled()
    if compiled is None or not all(
        tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous() and tensor.data_ptr()
        for tensor in tensors
    ):
        return None
    fields = [field for tensor in tensors for field in (tensor.data_ptr(), tensor.numel(), _FLOAT32)]
    rows = torch.empty((len(tensors), len(STATISTICS)), dtype=torch.float64)
    checksums = (ctypes.c_uint32 * len(tensors))()
    table = (ctypes.c_int64 * len(fields))(*fields)
    if not compiled.trainermon_moments_and_crc32(table, len(tensors), rows.data_ptr(), checksums):
        return None
    return rows.tolist(), list(checksums)


@functools.cache
def _compiled() -> ctypes.CDLL | None:
    found = library()
    if found is None or not hasattr(found, "trainermon_moments_and_crc32"):
        return None
    found.trainermon_crc32.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    found.trainermon_crc32.restype = ctypes.c_int
    found.trainermon_moments_and_crc32.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    found.trainermon_moments_and_crc32.restype = ctypes.c_int
    return found
