"""Tensors of every dtype in every layout that torch makes of it, of the same numbers, sound and damaged."""

import contextlib
import warnings
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor
from torch.utils import _pytree as pytree

from tests.tensor_kinds import all_dtypes, cast

_MASK = torch.arange(64).view(8, 8) % 3 == 0
_ROWS = torch.arange(8)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Named(Tensor):
    """A subclass that holds the elements itself."""


class Wrapped(Tensor):
    """A subclass that holds no elements, and keeps those of another tensor."""

    kept: Tensor

    @staticmethod
    def __new__(cls, inner):
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.kept = inner
        return made

    def __repr__(self, *, tensor_contents=None):
        return f"Wrapped({self.kept})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[override]
        args, kwargs = pytree.tree_map_only(cls, lambda wrapped: wrapped.kept, (args, kwargs or {}))
        return pytree.tree_map_only(Tensor, cls, function(*args, **kwargs))


def _blocks(tensor):
    return torch.stack([tensor[2 * place : 2 * place + 2, :2] for place in range(4)])


_ALIKE = {f"torch.{sign}int{bits}" for sign in ("", "u") for bits in (1, 2, 3, 5, 6, 7)}
DTYPES = [dtype for dtype in all_dtypes() if str(dtype) not in _ALIKE]  # as torch stores them, one is as another
LAYOUTS = {
    "strided": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.t()[::2],
    "expanded": lambda tensor: tensor[:1].expand(4, 8),
    "overlapping": lambda tensor: tensor.as_strided((7, 4), (8, 2)),
    "scalar": lambda tensor: tensor[0, 0],
    "empty": lambda tensor: tensor[:0],
    "conjugate": lambda tensor: tensor.conj(),
    "negative": lambda tensor: torch.view_as_complex(torch.stack((tensor, tensor), -1)).conj().imag,
    "meta": lambda tensor: tensor.to("meta"),
    "fake": lambda tensor: FakeTensorMode().from_tensor(tensor),
    "subclass": lambda tensor: tensor.as_subclass(Named),
    "parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "wrapped": Wrapped,
    "coo": lambda tensor: torch.sparse_coo_tensor(torch.stack([_ROWS, 7 - _ROWS]), tensor[:, 0], (8, 8)),
    "coo of rows": lambda tensor: torch.sparse_coo_tensor(_ROWS[None, :3], tensor[:3], (8, 8)),
    "csr": lambda tensor: torch.sparse_csr_tensor(torch.arange(9), 7 - _ROWS, tensor[:, 0], (8, 8)),
    "csc": lambda tensor: torch.sparse_csc_tensor(torch.arange(9), 7 - _ROWS, tensor[:, 0], (8, 8)),
    "bsr": lambda tensor: torch.sparse_bsr_tensor(torch.arange(5), 3 - _ROWS[:4], _blocks(tensor), (8, 8)),
    "bsc": lambda tensor: torch.sparse_bsc_tensor(torch.arange(5), 3 - _ROWS[:4], _blocks(tensor), (8, 8)),
    "jagged": lambda tensor: torch.nested.nested_tensor([tensor[:3], tensor[3:]], layout=torch.jagged),
    "nested": lambda tensor: torch.nested.nested_tensor([tensor[:3], tensor[3:]]),
    "masked": lambda tensor: masked_tensor(tensor, _MASK),
}


SIDES = {
    "sound": lambda values: values,
    "again": lambda values: values,
    "zeroed": lambda values: values * 0,
    "negated": lambda values: -values,
}
"""What is done to the numbers, by name."""

_PARTS: dict[str, Any] = {
    "meta": lambda _: [],
    "fake": lambda _: [],
    "expanded": lambda tensor: [tensor[:1]],
    "wrapped": lambda tensor: [tensor.kept],
    "masked": lambda tensor: [tensor.get_data()[_MASK]],
    "nested": Tensor.unbind,
    "jagged": Tensor.unbind,
    "coo": lambda tensor: [tensor._values()],
    "coo of rows": lambda tensor: [tensor._values()],
    **dict.fromkeys(("csr", "csc", "bsr", "bsc"), lambda tensor: [tensor.values()]),
}
"""What gives the parts of a tensor that hold its elements; of others it is the tensor itself."""


def is_equal(one, other, layout):
    """Return whether two tensors have equal bits in memory."""
    parts = _PARTS.get(layout, lambda tensor: [tensor])
    sides = [[_bits(part) for part in parts(tensor)] for tensor in (one, other)]
    return sides[0] == sides[1]


def _bits(tensor):
    if tensor.is_quantized:
        return tensor.dequantize().tolist()  # two elements may share a byte
    tensor = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.dtype is torch.complex128 else tensor
    return tensor.view(_INTEGERS[tensor.element_size()]).tolist()


def pairs(values):
    """Return tensors of `values`, float32 [8, 8], by their dtype and layout: all that torch makes."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in DTYPES:
            for layout, make in LAYOUTS.items():
                with contextlib.suppress(RuntimeError, TypeError):  # torch does not make them all
                    plain = cast(values, dtype)
                    if (made := make(plain)) is not plain or layout == "strided":
                        found[f"{str(dtype).removeprefix('torch.')} {layout}"] = made
    return found
