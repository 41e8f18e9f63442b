"""The source text of a call: checked names and plain values, never text of the dump."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainermon.core.errors import DumpError
from trainermon.replay.dumped_calls import set_item

# Where a function is looked for, most usual name first.
_HOMES: Mapping[str, Any] = {
    "torch.nn.functional": functional,
    "torch": torch,
    "torch.Tensor": Tensor,
    "torch.linalg": torch.linalg,
    "torch.special": torch.special,
    "torch.fft": torch.fft,
    "torch._VF": torch._VF,
}
_SET_ITEM = "torch.Tensor.__setitem__"
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)


def function_text(function: Callable[..., Any], operator: str = "") -> str:
    """Return the dotted name by which a script calls a function of torch, `torch.nn.functional.linear`.

    `operator` is the name of a custom operator that it may be, `mylib.scale`.

    Raises:
        DumpError: It has no name that leads to it.
    """
    if function is set_item:
        return _SET_ITEM
    for path, home in _HOMES.items():
        for name in (getattr(function, "__name__", ""), operator.rpartition(".")[2]):
            # linalg_svd is torch.linalg.svd
            for shown in (name, name.removeprefix(f"{path.rpartition('.')[2]}_")):
                if shown.isidentifier() and getattr(home, shown, None) is function:
                    return f"{path}.{shown}"
    if isinstance(function, torch._ops.OpOverloadPacket) and all(map(str.isidentifier, operator.split("."))):
        return f"torch.ops.{operator}"
    raise DumpError(f"{function!r:.200} has no name in torch that a script could call it by")


def call_text(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[Tensor]) -> str:
    """Return the source of a call of the function `name`, and append the tensors that it takes to `tensors`.

    They are `tensors[0]`, `tensors[1]` and so on there, and a device is `device`.

    Raises:
        DumpError: An argument cannot be written as text.
    """
    words = [literal(value, tensors) for value in args]
    for keyword, value in kwargs.items():
        if not keyword.isidentifier():
            raise DumpError(f"an argument has the name {keyword!r:.80}, which no function has")
        words.append(f"{keyword}={literal(value, tensors)}")
    # it returns nothing: what it wrote to is its result
    return f"{name}({', '.join(words)})" + (f" or {words[0]}" if name == _SET_ITEM else "")


def literal(value: Any, tensors: list[Tensor]) -> str:
    """Return the source of an argument; tensors are appended to `tensors`.

    >>> literal([1, float("inf"), None, slice(0, 3)], [])
    "[1, float('inf'), None, slice(0, 3, None)]"

    Raises:
        DumpError: It cannot be written as text.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return f"tensors[{len(tensors) - 1}]"
    text = _scalar(value) or _container(value, tensors)
    if text is None:
        raise DumpError(f"an argument of type {type(value).__name__} cannot be written into a script")
    return text


def _scalar(value: Any) -> str | None:
    if type(value) in (type(None), bool, int, str) or value is Ellipsis:
        return "..." if value is Ellipsis else repr(value)
    if type(value) is float:
        return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
    if type(value) is complex:
        return f"complex({_scalar(value.real)}, {_scalar(value.imag)})"
    if isinstance(value, torch.device):
        return "device"
    return str(value) if isinstance(value, _OF_TORCH) else None


def _container(value: Any, tensors: list[Tensor]) -> str | None:
    if isinstance(value, slice):
        return f"slice({', '.join(literal(part, tensors) for part in (value.start, value.stop, value.step))})"
    if isinstance(value, tuple):
        return f"({''.join(literal(item, tensors) + ', ' for item in value)})"
    if isinstance(value, list):
        return f"[{', '.join(literal(item, tensors) for item in value)}]"
    if isinstance(value, dict):
        items = (f"{literal(key, tensors)}: {literal(item, tensors)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    return None
