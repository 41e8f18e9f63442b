"""Where the elements of torch's CPU tensors lie, for the compiled library."""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainermon.core.native.builtins import bound_library, builtin
from trainermon.statistics import fallback
from trainermon.statistics.layout import (
    PLAIN_TYPES,
    OtherDeviceError,
    no_memory,
    outside_transforms,
    plain,
    runs,
    untransformed,
)
from trainermon.statistics.native import KINDS, PARALLEL, ROW_BYTES, NativeMoments, native, pack

_DenseWriter = Callable[[Sequence[Tensor], int], bool]
_KIND_OF = {getattr(torch, name): kind for name, kind in KINDS.items()}
_pack_one = struct.Struct("3q").pack
_STRIDED = torch.strided
_MOST_KINDS = 16  # of builtins.c
_LISTS_KEPT = 64
_WORTH_KEEPING = 4  # tensors; shorter lists are packed as fast as they are found again

# Called by `map`, which saves the interpreter's share of the time.
_is_cpu, _dtype_of = operator.attrgetter("is_cpu"), operator.attrgetter("dtype")
_address_of, _count_of, _is_contiguous = Tensor.data_ptr, Tensor.numel, Tensor.is_contiguous
# What builtins.c asks of tensors, and which answers it knows, in its order; it keeps no reference.
_FACTS = (
    *(True, False),
    *(Tensor, torch.nn.Parameter),
    *("dtype", "is_cpu"),
    *(Tensor.is_contiguous, Tensor.is_neg, Tensor.numel, Tensor.data_ptr),
)


def load() -> Callable[[Sequence[Tensor], Tensor, int], None] | None:
    """Return the compiled C function that computes moments; None if it is not used, see `library`.

    Raises:
        ValueError: TRAINERMON_KERNEL has an unknown value.
    """
    found = native()
    return None if found is None else _MomentsKernel(found).moments


def load_single() -> Callable[[Tensor, int], bool]:
    """Return the function that `kernel.write_single` is; one that writes nothing where there is no library."""
    found = native()
    return _writes_nothing if found is None else functools.partial(_write_single, found, _dense_writer())


def _writes_nothing(_tensor: Tensor, _address: int) -> bool:
    return False


def _write_single(found: NativeMoments, write_dense: _DenseWriter | None, tensor: Tensor, address: int) -> bool:
    if not tensor.numel():
        return False
    return (write_dense is not None and write_dense((tensor,), address)) or _write_runs(found, tensor, address)


def _write_runs(found: NativeMoments, tensor: Tensor, address: int) -> bool:
    kind = _KIND_OF.get(tensor.dtype)
    if kind is None or type(tensor) not in PLAIN_TYPES or not tensor.is_cpu or tensor.layout is not _STRIDED:
        return False
    if tensor.is_neg():
        return False
    if not tensor.is_contiguous():
        lies = runs(tensor.shape, tensor.stride())
        if lies is None or lies.repeats > 1:
            return False
        if lies.num_runs > 1:
            elements = tensor.data_ptr()
            if elements:
                found.strided(elements, kind, lies.num_runs, lies.length, lies.stride, address)
            return bool(elements)
    count = tensor.numel()
    num_threads = 1 if count < PARALLEL else torch.get_num_threads()
    return not found.write(_pack_one(tensor.data_ptr(), count, kind), 1, address, num_threads)


@functools.cache
def _dense_writer() -> _DenseWriter | None:
    """Return the function `write_dense` of builtins.c; None: there is none.

    It is given tensors and the address of their rows, and returns whether it has written these; if not, the tensors
    need a closer look, or are worth threads.
    """
    found, library = builtin("write_dense"), bound_library()
    if found is None or library is None:
        return None
    kinds = (ctypes.c_int64 * _MOST_KINDS)(*_KIND_OF.values())
    library.trainermon_bind_tensors((ctypes.c_void_p * len(_FACTS))(*map(id, _FACTS)), _addresses(_KIND_OF), kinds)
    return found


def _addresses(objects: Iterable[object]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * _MOST_KINDS)(*map(id, objects))


class _MomentsKernel:
    """The library's functions for tensors of torch, and what was packed for lists seen last."""

    def __init__(self, found: NativeMoments) -> None:
        self._native = found
        self._write_dense = _dense_writer()
        self._packed: dict[int, tuple[tuple[list[int], ...], bytes]] = {}

    def moments(self, tensors: Sequence[Tensor], out: Tensor, first_row: int) -> None:
        """Write the moments of CPU tensors into the rows of `out` from `first_row` on; see `kernel.moments`."""
        address = out.data_ptr() + first_row * ROW_BYTES
        packed = None
        try:
            # both take little where nothing of what they need is in the cache, as between two steps
            if self._write_dense is not None and self._write_dense(tensors, address):
                return
            if len(tensors) == 1 and _write_single(self._native, None, tensors[0], address):
                return
            if len(tensors) >= _WORTH_KEEPING:
                packed = self._pack_dense(tensors)
        except RuntimeError:  # one has no place in memory, being sparse or inside vmap
            packed = None
        others: list[tuple[int, Tensor, bool]] = []  # also keeps alive what `plain` made, until it has been read
        if packed is None:
            packed = _pack(tensors, first_row, others)
        missing = self._native.write(packed, len(tensors), address, torch.get_num_threads())
        if missing:
            raise no_memory(tensors[missing - 1])
        for row, elements, was_dense in others:
            if not was_dense:
                with outside_transforms():
                    self._write_row(elements, out, row)

    def _pack_dense(self, tensors: Sequence[Tensor]) -> bytes | None:
        """Return address, count and kind of each tensor, packed; None if one needs a closer look.

        A list whose addresses, counts and dtypes are those of an earlier one is not looked at further: they are on the
        CPU then, for no address belongs to two devices.
        """
        if not all(map(_is_contiguous, tensors)):
            return None
        lies = [*map(_address_of, tensors)], [*map(_count_of, tensors)], [*map(_dtype_of, tensors)]
        known = self._packed.get(lies[0][0])
        if known is not None and known[0] == lies:
            return known[1]
        kinds = [*map(_KIND_OF.get, lies[2])]
        if None in kinds or not ({*map(type, tensors)} <= PLAIN_TYPES and all(map(_is_cpu, tensors))):
            return None
        fields: list[Any] = [0] * (3 * len(tensors))
        fields[::3], fields[1::3], fields[2::3] = lies[0], lies[1], kinds
        packed = pack(fields, len(tensors))
        if len(self._packed) >= _LISTS_KEPT:
            self._packed.clear()
        self._packed[lies[0][0]] = lies, packed
        return packed

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
        address = out.data_ptr() + row * ROW_BYTES
        self._native.strided(tensor.data_ptr(), kind, lies.num_runs, lies.length, lies.stride, address)
        if lies.repeats > 1:
            fallback.repeat_row(out[row], lies.repeats)


def _pack(tensors: Sequence[Tensor], first_row: int, others: list[tuple[int, Tensor, bool]]) -> bytes:
    """Return address, count and kind of each tensor, packed; append to `others` those that are not simply dense."""
    fields: list[int] = []
    for row, tensor in enumerate(tensors, start=first_row):
        kind = _KIND_OF.get(tensor.dtype)
        if kind is not None and _lies_in_memory(tensor) and tensor.is_cpu and tensor.is_contiguous():
            fields += (tensor.data_ptr(), tensor.numel(), kind)
        else:
            elements = plain(tensor)
            dense = _dense(elements)
            fields += dense or (0, 0, 0)
            others.append((row, elements, dense is not None))
    return pack(fields, len(tensors))


def _lies_in_memory(tensor: Tensor) -> bool:
    return type(tensor) in PLAIN_TYPES and tensor.layout is _STRIDED and untransformed(tensor) is tensor


def _dense(tensor: Tensor) -> tuple[int, int, int] | None:
    """Return pointer, count and kind of a tensor that is dense in memory, in any order; None for any other."""
    if not tensor.is_cpu:
        raise OtherDeviceError(tensor.device, torch.device("cpu"))
    kind = _KIND_OF.get(tensor.dtype)
    if kind is None or tensor.layout is not torch.strided:
        return None
    lies = runs(tensor.shape, tensor.stride())
    if lies is None or lies.num_runs > 1 or lies.repeats > 1:
        return None
    return tensor.data_ptr(), lies.length, kind
