"""What modules keep in plain Python attributes: a counter, a recurrent state, a cache, a generator of their own.

Covered are the attributes themselves, and what can be reached from them through lists, dicts, sets, deques, tuples,
dataclasses and what functions close over (the script's hooks among them): the elements of tensors and arrays, and the
states of generators. Of an object of one of the script's classes its own attributes are covered, and what they hold,
but not what further such objects hold: a module may hold its trainer, and that the whole job. Parameters, buffers and
submodules are left alone. What cannot be put back, an iterator, is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trainermon.replay.state import NotCoveredError, same_bits

# What nn.Module keeps for itself: parameters, buffers, submodules, hooks.
OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Classes whose objects cannot change in a forward, or are no state of the model's.
_NOT_STATE = (nn.Module, type, types.ModuleType, torch.dtype, torch.device, torch.optim.Optimizer)
# Modules of Python whose objects hold what scripts put there.
_PLAIN = frozenset({"argparse", "builtins", "collections", "types"})
# Packages whose objects are theirs to look after: a process group, a logger, a queue that another thread fills.
_FOREIGN = frozenset({"torch", "trainermon", "deepspeed", "megatron", "lightning", "pytorch_lightning"}) | (
    sys.stdlib_module_names - _PLAIN
)
_OF_THREADS = frozenset({"threading", "_thread"})
MAX_COPY_BYTES = 256 << 20


class _FoundValue(NamedTuple):
    """A value to look at, and whether it was reached through an object of a class that we do not know."""

    value: Any
    is_deep: bool = False


class ModuleAttributes:
    """A copy of the attributes of a model's modules (tensors, counters, training flags …) that a replay could change.

    `given` is what forwards were called with, and is covered too; tensors that are given by themselves are not copied.
    Cost: a copy of every tensor and every container that is covered, at most 256 MiB; `put_back` waits for the device
    once per tensor.

    Raises:
        NotCoveredError: An iterator is among it: a replay would move it on, and it cannot be put back. Or there is too
            much to copy.
    """

    def __init__(self, model: nn.Module, given: Iterable[Any] = ()) -> None:
        self._undo = ExitStack()
        self._copied_bytes = 0
        self._known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        for module in model.modules():
            own = {name: value for name, value in vars(module).items() if name not in OF_TORCH}
            self._undo.callback(_set_attributes, module, own)
            hooks = [hook for name in _HOOKS for hook in vars(module)[name].values()]
            self._note_all([_FoundValue(value) for value in (*own.values(), *hooks, *global_generators(type(module)))])
        self._note_all([_FoundValue(value) for value in given if not isinstance(value, Tensor)])

    def put_back(self) -> None:
        """Set the attributes back to the copy, bit for bit; what did not change is not written to.

        One that cannot be put back does not keep the others from it; its error is raised then.
        """
        self._undo.close()

    def _note_all(self, waiting: list[_FoundValue]) -> None:
        while waiting:
            value, is_deep = waiting.pop()
            if id(value) in self._known or isinstance(value, _NOT_STATE):
                continue
            inside = self._note(value)
            if inside is None and not is_deep and has_attributes(value):
                inside, is_deep = self._note_pairs(vars(value)), True
            if inside is not None:
                self._known.add(id(value))  # stays its own: what holds the value is held by the undo functions
                waiting += [_FoundValue(item, is_deep) for item in inside]

    def _count(self, num_bytes: int) -> None:
        self._copied_bytes += num_bytes
        if self._copied_bytes > MAX_COPY_BYTES:
            raise NotCoveredError(
                f"modules keep more than {MAX_COPY_BYTES >> 20} MiB outside of parameters and buffers"
            )

    def _note_pairs(self, pairs: dict[Any, Any]) -> list[Any]:
        self._undo.callback(_set_pairs, pairs, dict(pairs))
        return list(pairs.values())

    def _note_function(self, function: types.FunctionType) -> list[Any]:
        inside = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            self._undo.callback(setattr, cell, "cell_contents", content)
            inside.append(content)
        return inside

    def _note(self, value: Any) -> list[Any] | None:
        """Note how to put `value` back, and return what lies inside; None if it cannot change or is not covered."""
        inside: list[Any] = []
        match value:
            case Tensor():
                if _is_covered(value):
                    self._count(value.numel() * value.element_size())
                    self._undo.callback(_set_elements, value, value.detach().clone())
            case tuple():
                inside = list(value)
            case list() | deque():
                inside = list(value)
                self._undo.callback(_set_items, value, inside.copy())
            case dict():
                inside = self._note_pairs(value)
            case set():
                self._undo.callback(_set_members, value, set(value))
            case _:
                return self._note_other(value)
        return inside

    def _note_other(self, value: Any) -> list[Any] | None:
        inside: list[Any] = []
        match value:
            case np.ndarray() if value.flags.writeable:
                self._count(value.nbytes)
                self._undo.callback(np.copyto, value, value.copy())
            case types.FunctionType() if not _is_foreign(value):
                inside = self._note_function(value)
            case types.MethodType():
                inside = [value.__self__]
            case functools.partial():
                inside = [value.func, *value.args, *value.keywords.values()]
            case _ if (put_back := restore_generator(value)) is not None:
                self._undo.callback(put_back)
            case _ if dataclasses.is_dataclass(value) and hasattr(value, "__dict__"):
                inside = self._note_pairs(vars(value))
            case _ if hasattr(type(value), "__next__"):
                raise NotCoveredError(f"a {type(value).__qualname__} is in use, which a replay would move on for good")
            case _:
                return None
        return inside


def restore_generator(value: Any) -> Callable[[], Any] | None:
    """Return a function that sets a random generator back to its present state; None if `value` is no generator."""
    match value:
        case torch.Generator():
            return functools.partial(value.set_state, value.get_state())
        case random.Random() if not isinstance(value, random.SystemRandom):
            return functools.partial(value.setstate, value.getstate())
        case np.random.RandomState():
            return functools.partial(value.set_state, value.get_state())
        case np.random.Generator():
            return functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
        case _:
            return None


@functools.cache
def _names_used(forward: Callable[..., Any]) -> tuple[str, ...]:
    return forward.__code__.co_names if isinstance(forward, types.FunctionType) and not _is_foreign(forward) else ()


def global_generators(kind: type[nn.Module]) -> list[Any]:
    """Return the random generators that the forward of the module class `kind` uses through global names."""
    found = [kind.forward.__globals__.get(name) for name in _names_used(kind.forward)]
    return [value for value in found if value is not None and restore_generator(value) is not None]


def has_attributes(value: Any) -> bool:
    """Return whether what `value` keeps may be state of the model's: it is an object of some class of the script's.

    What holds a lock or a thread is left alone: another thread may be changing it.
    """
    own = getattr(value, "__dict__", None)
    if type(own) is not dict or _is_foreign(type(value)):
        return False
    return not any(type(item).__module__ in _OF_THREADS for item in own.values())


def _is_foreign(what: Any) -> bool:
    return str(what.__module__).split(".")[0] in _FOREIGN


def _is_covered(tensor: Tensor) -> bool:
    """Return whether a tensor can be copied and compared; a copy of an expanded one could need any amount of memory."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_quantized or tensor.is_nested:
        return False
    return not tensor.is_inference() and tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _set_attributes(module: nn.Module, own: dict[str, Any]) -> None:
    attributes = vars(module)
    for name in attributes.keys() - own.keys() - OF_TORCH:
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
