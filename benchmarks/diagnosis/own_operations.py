"""The operations of a module's own code, as distinct from those of the modules in it, in any model as it is."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.diagnosis.model import Change


class _OwnResults(TorchFunctionMode):
    """Calls `see` with what each operation returns that a gradient will flow through, while `is_own` is true."""

    def __init__(self, see: Change) -> None:
        super().__init__()
        self.see = see
        self.depth = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_made = isinstance(result, Tensor) and result.requires_grad and result.is_floating_point()
        if self.depth or not is_made or any(result is arg for arg in args):
            return result
        return self.see(result)


@contextlib.contextmanager
def seen(module: nn.Module, see: Change) -> Iterator[None]:
    """Put `see(result)` in the place of what each operation of the module's own code returns, as long as this lasts."""
    mode = _OwnResults(see)
    inner = [child for child in module.modules() if child is not module]
    forward = module.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    vars(module)["forward"] = watched
    for child in inner:  # its hooks are not of the module's own code either
        vars(child)["_call_impl"] = functools.partial(_within, mode, child._call_impl)
    try:
        yield
    finally:
        del vars(module)["forward"]
        for child in inner:
            del vars(child)["_call_impl"]


def _within(mode: _OwnResults, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    mode.depth += 1
    try:
        return call(*args, **kwargs)
    finally:
        mode.depth -= 1


@contextlib.contextmanager
def changed(module: nn.Module, change: Change, place: int) -> Iterator[None]:
    """Have `change` happen to the result of the module's operation number `place` in each forward."""
    count = -1

    def see(result: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return change(result) if count == place else result

    def restart(*_: Any) -> None:
        nonlocal count
        count = -1

    handle = module.register_forward_pre_hook(restart)
    try:
        with seen(module, see):
            yield
    finally:
        handle.remove()


def count(module: nn.Module, run: Callable[[], Tensor]) -> int:
    """Return how many operations of its own a module has in `run`."""
    found = 0

    def see(result: Tensor) -> Tensor:
        nonlocal found
        found += 1
        return result

    with seen(module, see), torch.enable_grad():
        run()
    return found
