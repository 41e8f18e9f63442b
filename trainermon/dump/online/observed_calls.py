"""A call of a function while training runs: kept so that it can be run again, changed or not, without a trace."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from trainermon.accuracy.calls import OperationCall, mapped
from trainermon.accuracy.families import Family, family_of
from trainermon.accuracy.reference import unit_roundoff
from trainermon.dump.online.generators import GeneratorStates
from trainermon.dump.statistics import has_elements

RANDOM = "random or undefined"
# They write to arguments, and torch does not count that as a write.
UNNOTICED = frozenset(["batch_norm", "instance_norm"])
_OPERATORS_IN_PLACE = (
    "__setitem__",
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
    "__imod__",
    "__ipow__",
    "__ifloordiv__",
)
# What a copy may take of what lies between the elements, and the elements after which alignment repeats.
_MOST_BETWEEN, _ALIGNMENT = 64, 64
# They talk to other ranks: a repetition would wait for them for ever.
_COLLECTIVE = ("c10d", "_c10d_functional", "c10d_functional", "symm_mem", "fsdp")


@dataclasses.dataclass(frozen=True, slots=True)
class ObservedCall:
    """A call with its inputs as they were before it.

    Attributes:
        key: The call's key in a dump, `Functional.linear.0.forward`.
        name: The function's name, by which its family is found: `linear`.
        call: The call; tensors that the function may write to are copies, the others the training's own.
        generators: The state of the generators before the call.
        versions: How often each tensor that is the training's own had been written to.
    """

    key: str
    name: str
    call: OperationCall
    generators: GeneratorStates
    versions: tuple[tuple[Tensor, int], ...]

    @classmethod
    def begin(cls, key: str, name: str, call: OperationCall, *, is_written: bool = False) -> ObservedCall:
        """Keep `call`, which has not run yet; copies its inputs if it is known or said to write to some of them."""
        leaves = pytree.tree_leaves((call.args, call.kwargs))
        generators = GeneratorStates.current(leaves)
        if is_written or writes(name, call.kwargs):
            args, kwargs = mapped(_cloned, (tuple(call.args), dict(call.kwargs)))
            return cls(key, name, call._replace(args=args, kwargs=kwargs), generators, ())
        versions = tuple((leaf, leaf._version) for leaf in leaves if isinstance(leaf, Tensor))
        return cls(key, name, call, generators, versions)

    @property
    def device(self) -> str:
        """The kind of the device of its first tensor."""
        return device_of(self.call)

    @property
    def is_intact(self) -> bool:
        """Whether the inputs are still what the call was given."""
        return all(tensor._version == version for tensor, version in self.versions)

    def again(self) -> Any:
        """Return what the function gives for copies of its inputs.

        It draws the same random numbers; generators and everything of the training stay as they are.

        Raises:
            Exception: Whatever the function raises.
        """
        return self.of(self.call)

    def of(self, call: OperationCall) -> Any:
        """Return what the function gives for the inputs of `call`, copies of which it takes; likewise."""
        args, kwargs = mapped(_cloned, (tuple(call.args), dict(call.kwargs)))
        with self.generators.repeated(), torch.no_grad():
            return call.function(*args, **kwargs)

    def moved(self, move: Callable[[Any], Any]) -> OperationCall:
        """Return the call with `move`, which writes to nothing, applied to each leaf of its arguments."""
        args, kwargs = mapped(
            lambda leaf: move(leaf.detach() if isinstance(leaf, Tensor) else leaf),
            (tuple(self.call.args), dict(self.call.kwargs)),
        )
        return self.call._replace(args=args, kwargs=kwargs)


def writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Return whether the function `name`, called so, may write to its arguments, as far as can be told beforehand."""
    is_method = name.endswith("_") and not name.endswith("__")
    return (
        is_method
        or name in UNNOTICED
        or name in _OPERATORS_IN_PLACE
        or kwargs.get("out") is not None
        or bool(kwargs.get("inplace"))
    )


def reason_to_skip(name: str, function: Any, leaves: Sequence[Any], max_elements: int) -> str:
    """Return why a call cannot be tried; "" if it can. `leaves` are those of its arguments."""
    namespace = getattr(function, "namespace", "")
    if namespace in _COLLECTIVE:
        return "it communicates"
    if getattr(function, "__module__", "") == "torch.nn.init" or family_of(name) in (Family.RANDOM, Family.UNDEFINED):
        return RANDOM
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not any(tensor.is_floating_point() for tensor in tensors):
        return "no number of a floating type"
    if not all(map(_is_plain, tensors)) or torch._C._functorch.peek_interpreter_stack() is not None:
        return "a tensor that is not plain"
    if sum(tensor.numel() for tensor in tensors) > max_elements:
        return "more than max_elements"
    return ""


def device_of(call: OperationCall) -> str:
    """Return the kind of the device of a call's first tensor; `cpu` if it has none."""
    return next((tensor.device.type for tensor in call.tensors), "cpu")


def as_seen(call: OperationCall, result: Any) -> tuple[OperationCall, torch.dtype | None]:
    """Return a call as its kernel saw it, and the type it computed in where that is coarser than its inputs.

    Under autocast inputs are rounded first: then the result is narrower than some of them.
    """
    made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    given = [unit_roundoff(tensor.dtype) for tensor in call.tensors if tensor.is_floating_point()]
    if not made or not given or min(given) >= unit_roundoff(made[0].dtype):
        return call, None
    if not _autocasts_to(made[0]):
        return call, None
    narrow = made[0].dtype
    args, kwargs = pytree.tree_map(lambda value: _rounded(value, narrow), (tuple(call.args), dict(call.kwargs)))
    return call._replace(args=args, kwargs=kwargs), narrow


@contextlib.contextmanager
def unobserved(device: str) -> Iterator[None]:
    """Compute in a block in the types that are given, on the CPU and on `device`, and past all dispatch modes.

    What counts or changes the training's operations is to see nothing of those that only judge them.
    """
    with contextlib.ExitStack() as stack:
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        stack.enter_context(unautocast(device))
        yield


@contextlib.contextmanager
def unautocast(device: str) -> Iterator[None]:
    """Compute in a block in the types that are given, on the CPU and on `device`."""
    with contextlib.ExitStack() as stack:
        for kind in {"cpu", device}:
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _autocasts_to(result: Tensor) -> bool:
    device = result.device.type
    return (
        torch.amp.is_autocast_available(device)
        and torch.is_autocast_enabled(device)
        and torch.get_autocast_dtype(device) == result.dtype
    )


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    return value.detach().to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _cloned(value: Any) -> Any:
    return twin_of(value.detach()) if isinstance(value, Tensor) else value


def twin_of(tensor: Tensor, factor: float = 1.0) -> Tensor:
    """Return a copy, times `factor`, that lies in memory as the tensor does: kernels sum slices in another order.

    Of a slice of a much larger tensor the copy is dense.
    """
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    is_wide = extent > _MOST_BETWEEN * tensor.numel()
    if not tensor.numel() or is_wide or extent == tensor.numel() or tensor.is_conj() or tensor.is_neg():
        return tensor.clone().mul_(factor) if factor != 1 else tensor.clone()
    start = tensor.storage_offset()
    offset = start % _ALIGNMENT
    memory = torch.empty(offset + extent, dtype=tensor.dtype, device=tensor.device)
    memory[offset:].copy_(tensor.as_strided((extent,), (1,), start))
    if factor != 1:
        memory.mul_(factor)
    return memory.as_strided(tensor.shape, tensor.stride(), offset)


def _is_plain(tensor: Tensor) -> bool:
    kind = type(tensor)
    return (
        has_elements(tensor)
        and kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
        and not tensor.is_inference()
        and tensor.layout is torch.strided
    )
