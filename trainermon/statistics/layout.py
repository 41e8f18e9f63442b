"""How the elements of any tensor lie in memory: which are its own, in which runs they are read, what they mean.

To the moments the order of elements does not matter, so a permuted tensor needs no copy, and of an expanded one each
element in memory is read once.

Source of float4: OCP Microscaling Formats (MX) Specification v1.0, section 5.3.3 (E2M1).
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

PLAIN_TYPES = {Tensor, torch.nn.Parameter}
# Whether a tensor wraps another one inside a function transform; and that other one.
_is_transformed: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
_behind: Callable[[Tensor], Tensor] = torch._C._functorch.get_unwrapped
# Inside a function transform torch changes no tensor from outside in place; rows are such ones.
outside_transforms: Callable[[], AbstractContextManager[None]] = torch._C._DisableFuncTorch

_FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)
_QUANTIZED = frozenset([torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4])
_SHORT = [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)]

UNCOUNTED = frozenset(getattr(torch, name) for name in _SHORT if hasattr(torch, name))
"""Integers of less than a byte, of which torch does not say how many stand in one."""

_BITS = UNCOUNTED | {torch.bits8, torch.bits1x8, torch.bits2x4, torch.bits4x2, torch.bits16}

CODED = _QUANTIZED | _BITS | ({_FLOAT4} if _FLOAT4 is not None else set())
"""Dtypes of which `decoded` gives another one."""


class ElementRuns(NamedTuple):
    """How the elements of a strided tensor lie in memory.

    Attributes:
        num_runs: Number of runs of consecutive elements.
        length: Elements per run.
        stride: Distance between the beginnings of runs, in elements.
        repeats: How many elements of the tensor each of them stands for (expanded dimensions).
    """

    num_runs: int
    length: int
    stride: int
    repeats: int


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory holds the elements of `tensor` with a real dtype; often `tensor` itself.

    It is `readable`; a complex tensor stands for its real and imaginary parts, so that its norm, zeros and non-finite
    values are seen; its count is twice the number of elements. A sparse tensor stays one: see `stored_elements`.

    Raises:
        RuntimeError, ValueError: As of `readable`.
    """
    tensor = readable(tensor)
    if tensor.is_complex() and tensor.layout is torch.strided:
        tensor = torch.view_as_real(tensor.detach().resolve_conj())
    return untransformed(tensor.detach().resolve_neg() if tensor.is_neg() else tensor)


def readable(tensor: Tensor) -> Tensor:
    """Return a tensor with the elements of `tensor` in a layout and dtype that torch computes with; often itself.

    A DTensor stands for its local shard, which costs no communication; a nested tensor for the elements of its
    components; a masked one has zeros where it is masked; one inside vmap or grad stands for the whole batch; a
    quantized one for the numbers that it means; and see `decoded`. A sparse tensor stays one, of its dtype. A result of
    a functional collective that is still in flight is waited for.

    Raises:
        RuntimeError: torch cannot read the tensor (its own error).
        ValueError: The tensor has elements but no memory: torch would read at address zero, and end the process.
    """
    if type(tensor) not in PLAIN_TYPES or tensor.is_nested:
        tensor = _unwrap(tensor)
    tensor = untransformed(tensor)
    if tensor.layout is not torch.strided:
        return tensor
    if not has_memory(tensor):
        raise no_memory(tensor)
    return decoded(tensor) if tensor.dtype in CODED else tensor


def dense(tensor: Tensor) -> Tensor:
    """Return a `readable` tensor with an element in memory for each position, zeros of a sparse one among them.

    Raises:
        RuntimeError, ValueError: As of `readable`.
    """
    tensor = readable(tensor.detach())
    if tensor.layout is torch.strided:
        return tensor
    tensor = _coalesced(tensor) if tensor.layout is torch.sparse_coo else tensor
    try:
        return tensor.to_dense()
    except RuntimeError:  # not all types can be laid out as they are
        return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).to_dense()


def untransformed(tensor: Tensor) -> Tensor:
    """Return the tensor in memory that stands behind one inside torch.func's vmap or grad; others as they are. 0.1 us.

    Inside vmap it holds the whole batch, so that it has a dimension more.
    """
    while _is_transformed(tensor):
        tensor = _behind(tensor)
    return tensor


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Return whether all are of the very classes Tensor or Parameter, and of no subclass. 15 ns each."""
    return set(map(type, tensors)) <= PLAIN_TYPES


def are_contiguous(tensors: Sequence[Tensor]) -> bool:
    """Return whether the elements of each follow one another in memory, in order. 50 ns each."""
    return all(map(Tensor.is_contiguous, tensors))


class OtherDeviceError(ValueError):
    """Raised if a tensor is not on the device of the rows that its moments are written to."""

    def __init__(self, found: torch.device, expected: torch.device) -> None:
        super().__init__(f"tensor is on {found}, expected the device of the rows: {expected}")


def has_memory(tensor: Tensor) -> bool:
    """Return whether a strided tensor has no element, or memory that holds them, or is a meta tensor. 0.1 us.

    A wrapper subclass has none, nor has a parameter whose storage FSDP has freed.
    """
    return not tensor.numel() or tensor.is_meta or bool(tensor.data_ptr())


def no_memory(tensor: Tensor) -> ValueError:
    """Return the error for a tensor that has elements, but no memory that holds them."""
    return ValueError(
        f"{type(tensor).__name__} of shape {tuple(tensor.shape)} has no memory of its own, expected a tensor whose "
        "storage is allocated: read a sharded parameter while it is gathered, or its local shard"
    )


@functools.lru_cache(maxsize=4096)
def runs(shape: tuple[int, ...], strides: tuple[int, ...]) -> ElementRuns | None:
    """Return how the elements of a strided tensor lie in memory, or None if that is more than runs at one distance.

    >>> runs((6, 4), (1, 6))  # transposed
    ElementRuns(num_runs=1, length=24, stride=24, repeats=1)
    >>> runs((5, 4, 2), (0, 6, 1))  # columns of a matrix, expanded
    ElementRuns(num_runs=4, length=2, stride=6, repeats=5)
    """
    if 0 in shape:
        return ElementRuns(num_runs=1, length=0, stride=0, repeats=1)
    repeats = math.prod(size for size, stride in zip(shape, strides, strict=True) if stride == 0)
    blocks = [[1, 1]]
    for stride, size in sorted((b, a) for a, b in zip(shape, strides, strict=True) if a != 1 and b != 0):
        if stride == blocks[-1][0] * blocks[-1][1]:
            blocks[-1][1] *= size
        else:
            blocks.append([stride, size])
    if len(blocks) > 2:
        return None
    length = blocks[0][1]
    stride, num_runs = blocks[1] if len(blocks) == 2 else (length, 1)
    return ElementRuns(num_runs, length, stride, repeats)


def is_strided(tensor: Tensor) -> bool:
    """Return whether `tensor` has one size and one stride per dimension: it is neither sparse nor nested. 60 ns."""
    return tensor.layout is torch.strided and not tensor.is_nested


def stored_elements(tensor: Tensor) -> Tensor:
    """Return the elements that a sparse or nested tensor keeps in memory, as a dense tensor without its indices.

    Elements that a COO tensor has twice are added up.
    """
    if tensor.is_nested:
        return nested_elements(tensor)
    return _coalesced(tensor).values() if tensor.layout is torch.sparse_coo else tensor.values()


def _coalesced(tensor: Tensor) -> Tensor:
    """Return a COO tensor with each position once; float64 of types whose elements torch does not add up."""
    try:
        return tensor.coalesce()
    except NotImplementedError:
        values = tensor._values()
        values = (
            decoded(values.unsqueeze(-1) if values.dtype is _FLOAT4 else values) if values.dtype in CODED else values
        )
        sizes = (*tensor.shape[: tensor.sparse_dim()], *values.shape[1:])
        return torch.sparse_coo_tensor(tensor._indices(), values.double(), sizes).coalesce()


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the dense tensors that say together what `tensor` is: itself, or its elements and where they stand.

    Of a sparse tensor these are the indices that it keeps, of a nested one the sizes or offsets of its components.
    """
    if is_strided(tensor):
        return (tensor,)
    if tensor.is_nested:
        sizes = tensor.offsets() if tensor.layout is torch.jagged else tensor._nested_tensor_size()  # type: ignore[attr-defined]
        return nested_elements(tensor), sizes
    if tensor.layout is torch.sparse_coo:
        tensor = _coalesced(tensor)
        return tensor.values(), tensor.indices()
    is_by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    if is_by_row:
        return tensor.values(), tensor.crow_indices(), tensor.col_indices()
    return tensor.values(), tensor.ccol_indices(), tensor.row_indices()


def nested_elements(tensor: Tensor) -> Tensor:
    """Return the elements of a nested tensor, jagged or strided, one component after the other, as one dense tensor.

    What lies between the components is left out. A jagged tensor without such gaps is not copied, and keeps the sizes
    that all components share.
    """
    with torch.no_grad():
        tensor = tensor.detach()
        elements: Tensor = (tensor if tensor.is_contiguous() else tensor.contiguous()).values()
    return elements


def _unwrap(tensor: Tensor) -> Tensor:
    if tensor.is_nested:
        return nested_elements(tensor)
    # Looked up, not imported: a process that never loaded these modules has no such tensor, and loading them is slow.
    for module in ("torch.distributed.tensor", "torch.distributed._tensor"):
        kind = getattr(sys.modules.get(module), "DTensor", None)
        if kind is not None and isinstance(tensor, kind):
            with torch.no_grad():
                local: Tensor = tensor.to_local()
            return readable(local)
    if is_masked(tensor):
        with torch.no_grad():
            unmasked: Tensor = tensor.detach().to_tensor(0)  # type: ignore[attr-defined]
        return unmasked
    pending = getattr(sys.modules.get("torch.distributed._functional_collectives"), "AsyncCollectiveTensor", None)
    if pending is not None and isinstance(tensor, pending):
        result: Tensor = tensor.wait()
        return result
    return tensor


def is_masked(tensor: Tensor) -> bool:
    """Return whether `tensor` is one of torch.masked, some of whose elements are not there."""
    kind = getattr(sys.modules.get("torch.masked.maskedtensor.core"), "MaskedTensor", None)
    return kind is not None and isinstance(tensor, kind)


def is_whole(dtype: torch.dtype) -> bool:
    """Return whether the elements of one of the `CODED` types are whole numbers, of which no two are close."""
    return dtype in _BITS


@torch.no_grad()
def decoded(tensor: Tensor) -> Tensor:
    """Return the numbers that a tensor of one of the `CODED` types means.

    Of a quantized one these are float32, and of float4 too, two from each byte: the last dimension is twice as long.
    Of bits, and of integers of less than a byte, it is not known how many stand in a byte: the bytes are the numbers,
    as uint8 (int16 of `bits16`), without a copy.

    Raises:
        RuntimeError: torch does not know how the tensor is quantized.
    """
    tensor = tensor.detach()
    if tensor.dtype in _QUANTIZED:
        return tensor.dequantize()
    if tensor.dtype is not _FLOAT4:
        return tensor.view(torch.int16 if tensor.dtype is torch.bits16 else torch.uint8)
    codes = tensor.view(torch.uint8)
    pairs = _float4(tensor.device)[torch.stack((codes & 15, codes >> 4), -1).long()]
    return pairs.flatten(-2) if tensor.dim() else pairs


@functools.cache
def _float4(device: torch.device) -> Tensor:
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=device)
    return torch.cat((sizes, -sizes))
