"""How the elements of any tensor lie in memory: which are a tensor's own, and in which runs they can be read.

To the moments the order of elements does not matter, so a permuted tensor needs no copy, and of an expanded one each
element in memory is read once.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PLAIN_TYPES = {Tensor, torch.nn.Parameter}


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

    A DTensor stands for its local shard, which costs no communication. A complex tensor stands for its real and
    imaginary parts, so that its norm, zeros and non-finite values are seen; its count is twice the number of elements.
    A nested tensor stands for the elements of its components.
    A result of a functional collective that is still in flight is waited for.

    Raises:
        TypeError: the tensor is quantized.
    """
    if type(tensor) not in PLAIN_TYPES or tensor.is_nested:
        tensor = _unwrap(tensor)
    if tensor.is_quantized:
        raise TypeError(f"tensor is quantized ({tensor.dtype}), expected a real dtype: watch its dequantized form")
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach().resolve_conj())
    return tensor.detach().resolve_neg() if tensor.is_neg() else tensor


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
    """Return the elements that a sparse or nested tensor keeps in memory, as a dense tensor without its indices."""
    if tensor.is_nested:
        return nested_elements(tensor)
    return tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()


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
        tensor = tensor.coalesce()
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
            return plain(local)
    pending = getattr(sys.modules.get("torch.distributed._functional_collectives"), "AsyncCollectiveTensor", None)
    if pending is not None and isinstance(tensor, pending):
        result: Tensor = tensor.wait()
        return result
    return tensor
