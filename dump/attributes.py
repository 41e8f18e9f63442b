"""What modules keep in plain Python attributes: a counter, a recurrent state, a cache, a generator of their own.

Covered are the attributes themselves, and what can be reached from them through lists, dicts, sets, deques, tuples and
dataclasses: the elements of tensors and the states of generators. Objects of other classes (numpy's arrays among them)
are left alone, and so are parameters, buffers, submodules and hooks.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from trainermon.dump.state import same_bits

# What nn.Module keeps for itself: parameters, buffers, submodules, hooks.
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}


class Attributes:
    """The attributes of the modules of `model` as they are now, training flags among them.

    Cost: a copy of every tensor and every container that is covered; `put_back` waits for the device once per tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        self._undo = ExitStack()
        self._known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        for module in model.modules():
            own = {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
            self._undo.callback(_set_attributes, module, own)
            self._note_all(list(own.values()))

    def put_back(self) -> None:
        """Make the attributes what they were, bit for bit; what did not change is not written to.

        One that cannot be put back does not keep the others from it; its error is raised then.
        """
        self._undo.close()

    def _note_all(self, waiting: list[Any]) -> None:
        while waiting:
            value = waiting.pop()
            if id(value) not in self._known and not isinstance(value, nn.Module | type):
                inside = self._note(value)
                if inside is not None:
                    self._known.add(id(value))  # stays its own: what holds the value is held by the undo functions
                    waiting += inside

    def _note(self, value: Any) -> list[Any] | None:
        """Note how to put `value` back, and return what lies inside; None if it cannot change or is not covered."""
        inside: list[Any] = []
        match value:
            case Tensor():
                if _is_covered(value):
                    self._undo.callback(_set_elements, value, value.detach().clone())
            case tuple():
                inside = list(value)
            case list() | deque():
                inside = list(value)
                self._undo.callback(_set_items, value, inside.copy())
            case dict():
                inside = list(value.values())
                self._undo.callback(_set_pairs, value, dict(value))
            case set():
                self._undo.callback(_set_members, value, set(value))
            case torch.Generator():
                self._undo.callback(value.set_state, value.get_state())
            case random.Random():
                self._undo.callback(value.setstate, value.getstate())
            case _ if dataclasses.is_dataclass(value) and hasattr(value, "__dict__"):
                inside = list(vars(value).values())
                self._undo.callback(_set_pairs, vars(value), dict(vars(value)))
            case _:
                return None
        return inside


def _is_covered(tensor: Tensor) -> bool:
    """Return whether a tensor can be copied and compared; a copy of an expanded one could need any amount of memory."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_quantized or tensor.is_nested:
        return False
    return not tensor.is_inference() and tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _set_attributes(module: nn.Module, own: dict[str, Any]) -> None:
    attributes = vars(module)
    for name in attributes.keys() - own.keys() - _OF_TORCH:
        del attributes[name]
    attributes.update(own)


def _set_elements(tensor: Tensor, elements: Tensor) -> None:
    if tensor.shape != elements.shape or tensor.dtype is not elements.dtype:
        tensor.data = elements
    elif not same_bits(tensor, elements):
        with torch.no_grad():
            tensor.copy_(elements)


def _set_items(value: list[Any] | deque[Any], items: list[Any]) -> None:
    if not _are_same(list(value), items):
        value.clear()
        value.extend(items)


def _set_pairs(value: dict[Any, Any], pairs: dict[Any, Any]) -> None:
    if not (_are_same(list(value), list(pairs)) and _are_same(list(value.values()), list(pairs.values()))):
        value.clear()
        value.update(pairs)


def _set_members(value: set[Any], members: set[Any]) -> None:
    if value != members:
        value.clear()
        value.update(members)


def _are_same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))
