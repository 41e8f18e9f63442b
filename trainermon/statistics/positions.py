"""The positional hash of a tensor: equal for equal bits in equal places, and a sum over the parts of a whole.

Of each element the bits count, as an unsigned integer, and its index in the flattened whole tensor:

    sum of mix64(bits + (index + 1) * 0x9E3779B97F4A7C15), modulo 2^64

So a tensor that is split over ranks, in whichever way, has the hash of the whole one once those of its parts are added.
Unlike a checksum it sees elements that have changed places. Other bits go unseen with a probability of about 2^-64.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainermon.core.native.library import library
from trainermon.statistics.layout import no_memory, plain

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GOLDEN, _FIRST, _SECOND = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_PIECE = 1 << 20
_MASK = (1 << 64) - 1


class WholeRegion(NamedTuple):
    """Where the elements of a tensor stand in a whole one.

    Attributes:
        shape: The shape of the whole tensor.
        starts: Where the part begins in each dimension; for a `flat` part one number, the index of its first element.
        flat: The part is a range of the flattened whole tensor.
    """

    shape: tuple[int, ...]
    starts: tuple[int, ...]
    flat: bool = False


@torch.no_grad()
def positional_hash(tensor: Tensor, region: WholeRegion | None = None) -> int:
    """Return the hash of a tensor that stands at `region` of a whole one (None: it is whole itself); 0 if empty.

    Of a complex tensor real and imaginary parts count as elements along a last dimension. Waits for the device. Cost: a
    pass over the elements; a copy where they do not lie side by side; on an accelerator a piece of 8 MiB at a time.

    Raises:
        ValueError: The tensor has elements but no memory.
    """
    bits = _bits(tensor)
    if region is None:
        region = WholeRegion(tuple(bits.shape), (0,) * bits.dim())
    elif tensor.is_complex():
        region = _with_parts(region)
    if not bits.numel():
        return 0
    length, indices = _runs(tuple(bits.shape), region)
    kernel = _compiled()
    if bits.is_cpu and kernel is not None:
        array = (ctypes.c_int64 * len(indices))(*indices)
        return int(kernel(bits.data_ptr(), bits.element_size(), len(indices), length, array))
    return _by_torch(bits.reshape(len(indices), length), indices)


@torch.no_grad()
def samples_hash(tensor: Tensor) -> int:
    """Return the sum of a mix of the hashes of a tensor's parts along its first dimension: their order does not matter.

    0 for a scalar, or without elements. Waits for the device, whose tensor is copied to the host.

    Raises:
        ValueError: The tensor has elements but no memory.
    """
    if not tensor.dim() or not tensor.numel():
        return 0
    bits = _bits(tensor.cpu())
    length = bits[0].numel()
    kernel = _compiled()
    if kernel is None:
        hashes = [_by_torch(row[None], [0]) for row in bits.reshape(len(bits), length)]
    else:
        begin, size, zero = bits.data_ptr(), bits.element_size(), ctypes.c_int64(0)
        at_zero = ctypes.byref(zero)
        hashes = [kernel(begin + number * length * size, size, 1, length, at_zero) for number in range(len(bits))]
    return sum(map(_mixed_number, hashes)) & _MASK


def _mixed_number(bits: int) -> int:
    x = (bits + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _bits(tensor: Tensor) -> Tensor:
    """Return the elements' bits as integers that lie side by side, in the shape of the tensor."""
    elements = plain(tensor)
    if elements.numel() and not elements.data_ptr():
        raise no_memory(tensor)
    elements = elements.contiguous()
    return elements.byte() if elements.dtype is torch.bool else elements.view(_INTEGERS[elements.element_size()])


def _with_parts(region: WholeRegion) -> WholeRegion:
    if region.flat:
        return region._replace(shape=(*region.shape, 2), starts=(region.starts[0] * 2,))
    return WholeRegion((*region.shape, 2), (*region.starts, 0))


def _runs(shape: tuple[int, ...], region: WholeRegion) -> tuple[int, list[int]]:
    """Return how many elements lie side by side in the whole tensor, too, and the index at which each run begins."""
    if region.flat:
        return math.prod(shape), [region.starts[0]]
    strides = [math.prod(region.shape[dim + 1 :]) for dim in range(len(shape))]
    outer = len(shape)
    length = 1
    while outer and (outer == len(shape) or shape[outer] == region.shape[outer]):
        outer -= 1
        length *= shape[outer]
    base = sum(start * stride for start, stride in zip(region.starts, strides, strict=True))
    indices = [base]
    for size, stride in zip(shape[:outer], strides[:outer], strict=True):
        indices = [index + place * stride for index in indices for place in range(size)]
    return length, indices


def _by_torch(rows: Tensor, indices: Sequence[int]) -> int:
    total = 0
    for row, index in zip(rows, indices, strict=True):
        for begin in range(0, len(row), _PIECE):
            piece = row[begin : begin + _PIECE]
            total += int(_mixed(piece, index + begin).sum())
    return total % (1 << 64)


def _mixed(piece: Tensor, index: int) -> Tensor:
    bits = piece.to(torch.int64)
    if piece.element_size() < 8:
        bits &= (1 << 8 * piece.element_size()) - 1
    places = torch.arange(index + 1, index + 1 + len(piece), device=piece.device, dtype=torch.int64)
    mixed = bits + places * _GOLDEN
    mixed = (mixed ^ _shifted(mixed, 30)) * _FIRST
    mixed = (mixed ^ _shifted(mixed, 27)) * _SECOND
    return mixed ^ _shifted(mixed, 31)


def _shifted(values: Tensor, places: int) -> Tensor:
    """Return `values`, taken as unsigned, shifted to the right."""
    return (values >> places) & ((1 << (64 - places)) - 1)


@functools.cache
def _compiled() -> Callable[..., int] | None:
    loaded = library()
    if loaded is None or not hasattr(loaded, "trainermon_positions"):
        return None
    found = loaded.trainermon_positions
    found.argtypes = (ctypes.c_void_p, *(ctypes.c_int64,) * 3, ctypes.c_void_p)
    found.restype = ctypes.c_uint64
    function: Callable[..., int] = found
    return function
