"""Hooks on cells and tensors of MindSpore: contained, and without effect where MindSpore compiles them.

A cell that is compiled has its hooks compiled with it, from their source: one that calls anything of ours would end the
training with an error of the compiler. What a compiler makes of appending to an empty list whose value nobody uses is
nothing. So a hook appends what it saw to a list, whose `append` looks at it: in Python, and only there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from mindspore import Tensor, nn

from trainermon.hooks.containment import PlainContainedCall


class HookHandle(Protocol):
    """Interface of a hook that can be removed again."""

    def remove(self) -> None:
        """Remove the hook."""


class _Deliveries(list[Any]):
    """A list that stays empty: what is appended is handed to a contained function."""

    def __init__(self, see: PlainContainedCall) -> None:
        super().__init__()
        self._see = see

    def append(self, seen: Any) -> None:
        self._see(*seen)

    def __deepcopy__(self, _memo: object) -> list[Any]:
        return []  # the hooks of a copied cell see nothing

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return list, ()


def before(cell: nn.Cell, see: PlainContainedCall) -> HookHandle:
    """Have `see(cell, args)` called before each call of a cell in Python; return the hook."""
    deliveries = _Deliveries(see)

    def hook(of: Any, args: Any) -> None:
        deliveries.append((of, args))

    handle: HookHandle = cell.register_forward_pre_hook(hook)
    return handle


def before_with_kwargs(cell: nn.Cell, see: PlainContainedCall) -> HookHandle:
    """Have `see(cell, args, kwargs)` called before each call of a cell in Python; return the hook."""
    deliveries = _Deliveries(see)

    def hook(of: Any, args: Any, kwargs: Any = None) -> None:  # compiled code gives no kwargs
        deliveries.append((of, args, kwargs))

    handle: HookHandle = cell.register_forward_pre_hook(hook, with_kwargs=True)
    return handle


def behind(cell: nn.Cell, see: PlainContainedCall) -> HookHandle:
    """Have `see(cell, args, output)` called after each call of a cell in Python; return the hook."""
    deliveries = _Deliveries(see)

    def hook(of: Any, args: Any, output: Any) -> None:
        deliveries.append((of, args, output))

    handle: HookHandle = cell.register_forward_hook(hook)
    return handle


def on_gradient(tensor: Tensor, see: PlainContainedCall) -> HookHandle:
    """Have `see(gradient)` called with the gradient of a tensor or parameter; return the hook."""
    deliveries = _Deliveries(see)

    def hook(gradient: Any) -> None:
        deliveries.append((gradient,))

    handle: HookHandle = tensor.register_hook(hook)
    return handle
