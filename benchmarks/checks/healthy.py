"""Sound ways to compute the same: no verdict on any of them may be an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from trainermon.accuracy.calls import OperationCall, RepeatableCall
from trainermon.accuracy.reference import OF_OWN_TYPE

BLOCK = 32
_aten = torch.ops.aten


def eager(call: OperationCall) -> Any:
    """Return what torch gives."""
    args, kwargs = _copied(call)
    with torch.no_grad():
        return call.function(*args, **kwargs)


def decomposed(call: OperationCall) -> Any:
    """Return the same by torch's own decompositions into simpler operations, as compilers take them."""
    args, kwargs = _copied(call)
    with torch.no_grad(), _Decomposed():
        return call.function(*args, **kwargs)


def wide_inside(call: OperationCall) -> Any:
    """Return the same, computed in a wider type and rounded once, as the best kernels do."""
    if getattr(call.function, "__name__", "") in OF_OWN_TYPE:
        raise NotImplementedError("it gives something else in another type")
    made = pytree.tree_map_only(Tensor, lambda tensor: tensor.dtype, eager(call))
    types = [dtype for dtype in pytree.tree_leaves(made) if isinstance(dtype, torch.dtype)]
    is_half = any(tensor.dtype.itemsize == 2 for tensor in call.tensors if tensor.is_floating_point())
    results = RepeatableCall(call).run(torch.float32 if is_half else torch.float64)
    return [result.to(dtype) for result, dtype in zip(results, types, strict=True)]


def in_blocks(call: OperationCall) -> Any:
    """Return the same with sums taken in blocks of 32, in another order, with float32 in between."""
    args, kwargs = _copied(call)
    with torch.no_grad(), _InBlocks() as mode:
        result = call.function(*args, **kwargs)
    if not mode.is_used:
        raise NotImplementedError("it has no sum that is taken in blocks here")
    return result


def compiled(call: OperationCall) -> Any:
    """Return what torch's compiler makes of it."""
    args, kwargs = _copied(call)
    torch._dynamo.reset()
    function = torch.compile(lambda *args, **kwargs: call.function(*args, **kwargs), dynamic=False)
    with torch.no_grad():
        return function(*args, **kwargs)


IMPLEMENTATIONS: Mapping[str, Callable[[OperationCall], Any]] = {
    "torch": eager,
    "decompositions": decomposed,
    "wider inside": wide_inside,
    "sums in blocks": in_blocks,
}


def in_simpler_operations() -> TorchDispatchMode:
    """Return a context in which torch's own decompositions take the place of its kernels."""
    return _Decomposed()


class _Decomposed(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._rules = torch._decomp.decomposition_table
        self._running: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = self._rules.get(func)
        if rule is None or func in self._running:
            return func(*args, **(kwargs or {}))
        self._running.append(func)
        try:
            with self:
                made = rule(*args, **(kwargs or {}))
        finally:
            self._running.pop()
        return func(*args, **(kwargs or {})) if made is NotImplemented else made


class _InBlocks(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.is_used = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        way = _WAYS.get(func)
        if way is None or not args[0].is_floating_point() or kwargs:
            return func(*args, **(kwargs or {}))
        self.is_used = True
        return way(*args)


def _product(one: Tensor, other: Tensor) -> Tensor:
    total = torch.zeros((*one.shape[:-1], other.shape[-1]), dtype=torch.float32)
    for block in _blocks(one.shape[-1]):
        total += one[..., block].float() @ other[..., block, :].float()
    return total.to(one.dtype)


def _product_and_more(added: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return (added.float() + _product(one.float(), other.float())).to(one.dtype)


def _sum(tensor: Tensor, dims: Any = None, keepdim: bool = False) -> Tensor:  # noqa: FBT001, FBT002  # as aten's
    dims = [dim % tensor.dim() for dim in (dims or range(tensor.dim()))] if tensor.dim() else []
    if not dims:
        return tensor.clone()
    flat = tensor.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims)).float()
    total = torch.zeros(flat.shape[:-1], dtype=torch.float32)
    for block in _blocks(flat.shape[-1]):
        total += flat[..., block].sum(-1)
    if keepdim:
        for dim in sorted(dims):
            total = total.unsqueeze(dim)
    return total.to(tensor.dtype)


def _mean(tensor: Tensor, dims: Any = None, keepdim: bool = False) -> Tensor:  # noqa: FBT001, FBT002  # as aten's
    total = _sum(tensor.float(), dims, keepdim)
    return (total * (total.numel() / max(1, tensor.numel()))).to(tensor.dtype)


def _blocks(size: int) -> list[slice]:
    starts = torch.arange(0, size, BLOCK)
    order = torch.randperm(len(starts), generator=torch.Generator().manual_seed(1))
    return [slice(int(start), int(start) + BLOCK) for start in starts[order]]


_WAYS: Mapping[Any, Callable[..., Tensor]] = {
    _aten.mm.default: _product,
    _aten.bmm.default: _product,
    _aten.addmm.default: _product_and_more,
    _aten.baddbmm.default: _product_and_more,
    _aten.sum.default: _sum,
    _aten.sum.dim_IntList: _sum,
    _aten.mean.default: _mean,
    _aten.mean.dim: _mean,
}


def _copied(call: OperationCall) -> tuple[list[Any], dict[str, Any]]:
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (list(call.args), dict(call.kwargs)))
    return args, kwargs
