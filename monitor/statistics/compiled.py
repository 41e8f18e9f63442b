"""The binding of moments.c: finds the compiled library, and tells it where the elements of CPU tensors lie."""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import logging
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from trainermon.monitor.statistics import fallback
from trainermon.monitor.statistics.layout import PLAIN_TYPES, no_memory, plain, runs

# In the order of KINDS in moments.c. A bool is an integer of one byte that is 0 or 1.
_KIND_OF = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float64: 3,
    torch.int8: 4,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.uint8: 8,
    torch.bool: 8,
    torch.uint16: 9,
    torch.uint32: 10,
    torch.uint64: 11,
}
_ROW_BYTES = 64

_logger = logging.getLogger(__name__)


def load() -> Callable[[Sequence[Tensor], Tensor, int], None] | None:
    """Return the function that computes moments with the compiled library, or None if it is not there.

    It is missing where there was no compiler when the package was built, and is passed over if TRAINERMON_KERNEL is
    `torch`.

    Raises:
        ValueError: TRAINERMON_KERNEL is neither `c`, `torch` nor unset, or is `c` while there is no library.
    """
    wanted = os.environ.get("TRAINERMON_KERNEL", "")
    if wanted not in ("", "c", "torch"):
        raise ValueError(f"TRAINERMON_KERNEL is {wanted!r}, expected 'c', 'torch' or nothing")
    library = None if wanted == "torch" else _open_library()
    if library is not None:
        return _Kernel(library).moments
    if wanted == "c":
        raise ValueError("TRAINERMON_KERNEL is 'c', but the library was not built: install a C compiler and reinstall")
    return None


def _open_library() -> ctypes.CDLL | None:
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_moments{suffix}")
        if path.exists():
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:  # built for another machine or C library
                _logger.warning("statistics are computed by torch calls: cannot load %s: %s", path, error)
                return None
    return None


class _Kernel:
    """The library's two functions, with the arguments that they take."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._moments = library.trainermon_moments
        self._moments.argtypes = (ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
        self._moments.restype = ctypes.c_int64
        self._strided = library.trainermon_moments_strided
        self._strided.argtypes = (ctypes.c_void_p, *[ctypes.c_int64] * 4, ctypes.c_void_p)
        self._strided.restype = None

    def moments(self, tensors: Sequence[Tensor], out: Tensor, first_row: int) -> None:
        """Write the moments of CPU tensors into the rows of `out` from `first_row` on; see `kernel.moments`."""
        fields: list[int] = []
        others: list[tuple[int, Tensor, bool]] = []  # also keeps alive what `plain` made, until it has been read
        for row, tensor in enumerate(tensors, start=first_row):
            kind = _KIND_OF.get(tensor.dtype)
            if type(tensor) in PLAIN_TYPES and kind is not None and tensor.is_cpu and tensor.is_contiguous():
                fields += (tensor.data_ptr(), tensor.numel(), kind)
            else:
                elements = plain(tensor)
                dense = _dense(elements)
                fields += dense or (0, 0, 0)
                others.append((row, elements, dense is not None))
        missing = self._moments(
            _packer(len(fields))(*fields),
            len(tensors),
            out.data_ptr() + first_row * _ROW_BYTES,
            torch.get_num_threads(),
        )
        if missing:
            raise no_memory(tensors[missing - 1])
        for row, elements, is_dense in others:
            if not is_dense:
                self._write_row(elements, out, row)

    def _write_row(self, tensor: Tensor, out: Tensor, row: int) -> None:
        """Write the row of a tensor that is on the CPU, but not dense or of no dtype that the library knows."""
        kind = _KIND_OF.get(tensor.dtype)
        if kind is None or tensor.layout is not torch.strided:
            out[row] = fallback.row_of(tensor.detach())
            return
        lies = runs(tensor.shape, tensor.stride())
        if lies is None:
            self.moments([tensor.detach().contiguous()], out, row)
            return
        if tensor.numel() and not tensor.data_ptr():
            raise no_memory(tensor)
        address = out.data_ptr() + row * _ROW_BYTES
        self._strided(tensor.data_ptr(), kind, lies.num_runs, lies.length, lies.stride, address)
        if lies.repeats > 1:
            fallback.repeat_row(out[row], lies.repeats)


def _dense(tensor: Tensor) -> tuple[int, int, int] | None:
    """Return pointer, count and kind of a tensor that is dense in memory, in any order; None for any other."""
    if not tensor.is_cpu:
        raise ValueError(f"tensor is on {tensor.device}, expected the device of the rows: cpu")
    kind = _KIND_OF.get(tensor.dtype)
    if kind is None or tensor.layout is not torch.strided:
        return None
    lies = runs(tensor.shape, tensor.stride())
    if lies is None or lies.num_runs > 1 or lies.repeats > 1:
        return None
    return tensor.data_ptr(), lies.length, kind


@functools.lru_cache(maxsize=256)
def _packer(num_fields: int) -> Callable[..., bytes]:
    return struct.Struct(f"{num_fields}q").pack
