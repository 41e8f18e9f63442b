"""Runs chosen modules of a replay in float64, to see whether the step is finite then.

Decides what float64 means for code that was not written for it: every function called inside such a module gets its
floating tensors in float64 and keeps what it gives so, a cast to a narrower type included. What the module returns has
the type that it had before, so that the rest of the step is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from trainermon.dump.files.records import FORWARD
from trainermon.replay.operations import RunningCalls
from trainermon.replay.precise import TensorHealth, health

# These cast; in float64 they are to leave things as they are.
_CASTS = frozenset({"half", "bfloat16", "float", "double"})
# These only read or set an attribute of a tensor.
_ATTRIBUTES = frozenset({"__get__", "__set__", "__delete__"})


class Float64Mode(TorchFunctionMode):
    """Function mode under which torch functions compute in float64: it converts floating arguments and requested types.

    A function that writes to a narrower tensor from before the block still writes to that, in its type.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func` in float64."""
        name = getattr(func, "__name__", "")
        kwargs = dict(kwargs or {})
        if name in _ATTRIBUTES:
            return func(*args, **kwargs)
        if name in _CASTS and len(args) == 1:
            return _widened(args[0])
        if name.endswith("_") and not name.endswith("__") and args and isinstance(args[0], Tensor):
            rest, kwargs = pytree.tree_map(_widened, (args[1:], kwargs))
            return func(args[0], *rest, **kwargs)
        args, kwargs = pytree.tree_map(_widened, (args, kwargs))
        return func(*args, **kwargs)


class Float64Calls(RunningCalls):
    """Runs chosen modules in float64 during a replay, to see whether the step is finite then.

    Args:
        roots: The model's roots.
        names: Names of modules, where the path below the root is not what they are to be called.
        stems: Keys of the modules (`Module.h.0.Block`; "": a root).
        gave: The types that each call gave in another replay, by the call's key; results are converted back to them.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        names: Mapping[nn.Module, str] | None,
        *,
        stems: Collection[str],
        gave: Mapping[str, Sequence[torch.dtype]],
    ) -> None:
        super().__init__(roots, names)
        self._stems = stems
        self._before = gave
        self._modes: list[Float64Mode] = []

    def enter(self, module: nn.Module, stem: str) -> None:
        """Turn float64 on as a call of the module `stem` begins, if that is one of the chosen."""
        super().enter(module, stem)
        if stem in self._stems:
            self._modes.append(Float64Mode())
            self._modes[-1].__enter__()  # type: ignore[no-untyped-call]

    def leave(self, key: str, output: Any) -> Any:
        """Turn float64 off as the call `key` ends; return its output in the types that it had before."""
        if stem_of(key) not in self._stems or not self._modes:
            return None
        self._modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        types = iter(self._before.get(key, ()))
        return pytree.tree_map(lambda value: _narrowed(value, types), output)


class GradientCheck:
    """Context manager that checks whether every gradient that arrives at `leaves` while it is open is finite."""

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self.finite = True
        self._leaves = list(leaves)
        self._handles: list[Any] = []

    def __enter__(self) -> GradientCheck:
        """Begin to look."""
        self._handles = [leaf.register_hook(self._see) for leaf in self._leaves]  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *_error: object) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _see(self, gradient: Tensor) -> None:
        self.finite = self.finite and health(gradient) is TensorHealth.FINITE


def stem_of(key: str) -> str:
    """Return the key of a call without direction and number: `Module.h.0.Linear` of `Module.h.0.Linear.forward.2`.

    It is "" for a root.
    """
    return key.rpartition(f".{FORWARD}.")[0]


def _widened(value: Any) -> Any:
    match value:
        case Tensor() if value.is_floating_point():
            return value.to(torch.float64)
        case torch.dtype() if value.is_floating_point:
            return torch.float64
        case _:
            return value


def _narrowed(value: Any, types: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    dtype = next(types, value.dtype)
    return value.to(dtype) if value.dtype is torch.float64 else value
