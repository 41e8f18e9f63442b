"""Makes a wrong call smaller while it stays wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainermon.accuracy.calls import OperationCall


def shrink(call: OperationCall, is_wrong: Callable[[OperationCall], bool]) -> OperationCall:
    """Return a call with fewer and simpler numbers for which `is_wrong` holds too; the call itself if there is none.

    All dimensions of one size are halved together, as operations tie them: the first half is tried, then the second.
    When nothing can be halved any more, tensors are replaced by ones or zeros. `is_wrong` runs the call; whatever it
    raises means that the call does not work in that shape. Cost: about four runs for each halving.
    """
    smaller = True
    while smaller:
        smaller = False
        for candidate in _halved(call):
            if _holds(is_wrong, candidate):
                call, smaller = candidate, True
                break
    for number, tensor in enumerate(call.tensors):
        for simple in (torch.zeros_like(tensor), torch.ones_like(tensor)):
            candidate = _with(call, number, simple)
            if not torch.equal(tensor, simple) and _holds(is_wrong, candidate):
                call = candidate
                break
    return call


def _holds(is_wrong: Callable[[OperationCall], bool], call: OperationCall) -> bool:
    try:
        return is_wrong(call)
    except Exception:  # noqa: BLE001  # whatever torch raises for shapes that do not fit together
        return False


def _halved(call: OperationCall) -> Iterator[OperationCall]:
    """Yield the call with all dimensions of one size halved, the largest size first."""
    sizes = sorted({size for tensor in call.tensors for size in tensor.shape if size > 1}, reverse=True)
    for size in sizes:
        for start in (0, size - size // 2):

            def cut(value: Any, size: int = size, start: int = start) -> Any:
                if not isinstance(value, Tensor):
                    return value
                for dim, found in enumerate(value.shape):
                    if found == size:
                        value = value.narrow(dim, start, size // 2)
                return value.clone()

            args, kwargs = pytree.tree_map(cut, (list(call.args), dict(call.kwargs)))
            yield call._replace(args=args, kwargs=kwargs)


def _with(call: OperationCall, number: int, tensor: Tensor) -> OperationCall:
    """Return the call with another tensor in the place `number` among those that it takes."""
    leaves, spec = pytree.tree_flatten((list(call.args), dict(call.kwargs)))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    leaves[places[number]] = tensor
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return call._replace(args=args, kwargs=kwargs)
