"""The one entrance to the histograms of tensors: counts by sign and power of two, as `core.values.BIN_BOUNDS` says.

Counts are exact, and those of the parts of a tensor add up to those of the whole one. It is a pass of its own over the
tensors, since few steps have one: within that of the moments it would be spared the reading alone, a third of its cost.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainermon.core.native.library import library
from trainermon.core.values import ZERO_BIN
from trainermon.statistics.histograms import torch_counts
from trainermon.statistics.layout import no_memory, plain, runs, stored_elements
from trainermon.statistics.native import KINDS, pack

logger = logging.getLogger("trainermon")

_KIND_OF = {getattr(torch, name): kind for name, kind in KINDS.items()}

Way = Callable[[Tensor, Tensor], None]
"""Writes the counts of a flat tensor that has elements into a row of zeros, int64 `[128]` on the same device."""


class _Stored(NamedTuple):
    """The elements of a tensor that lie in memory, one after the other; each stands for `repeats` elements.

    `num_zeros` are those of a sparse tensor that do not.
    """

    flat: Tensor
    repeats: int = 1
    num_zeros: int = 0


@torch.no_grad()
def count(tensors: Sequence[Tensor], out: Tensor, first_row: int = 0) -> None:
    """Count the elements of each tensor by bin, into the rows of `out` from `first_row` on.

    Everything is read before this returns (CPU) or in the order of the current stream (accelerators); nothing is copied
    to the host, no communication takes place, and no tensor is changed. A tensor that is neither dense nor expanded is
    copied first. Cost: about that of two reads of the elements, see README.

    Args:
        tensors: As for `kernel.moments`: real or complex dtypes, any strides; a DTensor stands for its local shard, a
            sparse COO tensor for all its elements. One on another device than `out` is read there.
        out: int64 `[rows, 128]`, contiguous. The rows of tensors without elements are zeros.
        first_row: Row of the first tensor.

    Raises:
        TypeError: A tensor is quantized.
        RuntimeError: A tensor is sparse in a layout other than COO (torch's own error).
        ValueError: A tensor has elements but no memory.
    """
    stored = [_stored(tensor) for tensor in tensors]
    rows = out[first_row : first_row + len(tensors)]
    compiled = _compiled() if out.is_cpu else None
    if compiled is not None and all(each.flat.is_cpu and each.flat.dtype in _KIND_OF for each in stored):
        compiled([each.flat for each in stored], rows)
    else:
        rows.zero_()
        for each, row in zip(stored, rows, strict=True):
            _count_one(each.flat, row)
    for each, row in zip(stored, rows, strict=True):
        if each.repeats > 1:
            row.mul_(each.repeats)
        if each.num_zeros:
            row[ZERO_BIN].add_(each.num_zeros)


def _stored(tensor: Tensor) -> _Stored:
    elements = plain(tensor)
    if elements.layout is not torch.strided:
        values = plain(stored_elements(elements))
        count = elements.numel() * (2 if elements.is_complex() else 1)
        return _Stored(values.contiguous().view(-1), num_zeros=count - values.numel())
    if elements.numel() and not elements.data_ptr():
        raise no_memory(tensor)
    lies = runs(elements.shape, elements.stride())
    if lies is not None and lies.num_runs == 1:
        return _Stored(elements.as_strided((lies.length,), (1,)), lies.repeats)
    return _Stored(elements.contiguous().view(-1))


def _count_one(flat: Tensor, row: Tensor) -> None:
    if not flat.numel():
        return
    way = _way_of(flat.device)
    if flat.device == row.device:
        way(flat, row)
        return
    there = torch.zeros_like(row, device=flat.device)
    way(flat, there)
    row.copy_(there, non_blocking=True)


@functools.cache
def _way_of(device: torch.device) -> Way:
    if device.type == "cpu":
        return torch_counts.count_on_cpu
    if device.type == "cuda" and os.environ.get("TRAINERMON_KERNEL") != "torch":
        return _TritonCounts()
    return torch_counts.count_by_sorting


class _TritonCounts:
    """The Triton kernel, loaded at the first call; torch calls from its first failure on."""

    def __init__(self) -> None:
        self._launch: Way | None = None
        self._is_used = True

    def __call__(self, flat: Tensor, row: Tensor) -> None:
        if self._is_used:
            try:
                if self._launch is None:
                    from trainermon.statistics.histograms.triton_counts import count_chunks

                    self._launch = count_chunks
                with torch.cuda.device(flat.device):
                    self._launch(flat, row)
            except Exception as error:  # noqa: BLE001  # of a compiler, a linker or a driver: there is no common type
                self._is_used = False
                row.zero_()
                logger.warning(
                    "histograms of CUDA tensors are taken by torch calls: %s: %s", type(error).__name__, error
                )
            else:
                return
        torch_counts.count_by_sorting(flat, row)


class _CompiledCounts:
    """The compiled function, see counts.c."""

    def __init__(self, found: ctypes.CDLL) -> None:
        self._count = found.trainermon_histograms
        self._count.argtypes = (ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p)
        self._count.restype = None

    def __call__(self, flats: Sequence[Tensor], rows: Tensor) -> None:
        """Write the counts of flat CPU tensors of dtypes in `_KIND_OF`, one row of `rows` each."""
        fields = [field for flat in flats for field in (flat.data_ptr(), flat.numel(), _KIND_OF[flat.dtype])]
        self._count(pack(fields, len(flats)), len(flats), rows.data_ptr())


@functools.cache
def _compiled() -> _CompiledCounts | None:
    found = library()
    return None if found is None or not hasattr(found, "trainermon_histograms") else _CompiledCounts(found)
