"""`handler_type: fix`: chosen calls compute in higher precision, forward and backward, to see what mends."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainermon.accuracy.calls import OperationCall, cast_dtype
from trainermon.accuracy.families import Family, family_of
from trainermon.dump.debugger_config import DebuggerConfig
from trainermon.dump.function_names import unreplaced
from trainermon.dump.online.chosen_calls import ChosenCalls
from trainermon.dump.online.findings import FindingsFile
from trainermon.dump.online.observed_calls import UNNOTICED, ObservedCall, reason_to_skip, unautocast
from trainermon.dump.online.options import Perturbation

logger = logging.getLogger("trainermon")

_HIGHER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}


class FixedCalls(ChosenCalls):
    """Runs each chosen call in a higher precision: 16 bits in float32, float32 in float64; autograd goes through it.

    So the backward is that of the higher precision, too. Results have the types that the call itself would have given.
    A call that an activation checkpoint repeats is chosen by names without numbers. Others run as they are.

    Args:
        config: The debugger's configuration.
        findings: What was fixed is listed in its summary.
    """

    def __init__(self, config: DebuggerConfig, findings: FindingsFile) -> None:
        super().__init__(config, findings)
        self._options = config.free_benchmark
        self._types: dict[Any, tuple[torch.dtype, ...]] = {}
        self._fixes = self.contain(self._fix)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return what `func` gives in higher precision, if it is to be fixed; else what it gives."""
        kwargs = kwargs or {}
        caller = sys._getframe(1)
        func = unreplaced(func, caller)
        fixed = self._fixes(func, args, kwargs, caller)
        return func(*args, **kwargs) if fixed is None else fixed.result

    def _fix(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], caller: Any
    ) -> _FixedResult | None:
        chosen = self.chosen(function, args, caller)
        if chosen is None:
            return None
        key, named = chosen
        call = OperationCall(function, args, kwargs, not named.is_torchs)
        leaves = pytree.tree_leaves((args, kwargs))
        reason = reason_to_skip(named.name, function, leaves, self._options.max_elements)
        if family_of(named.name) is Family.EXACT:
            reason = "it rounds nothing"
        if kwargs.get("out") is not None:
            reason = "it writes to out="
        types = () if reason else self._types_of(key, named.name, call, leaves)
        higher = next((_HIGHER[dtype] for dtype in types if dtype in _HIGHER), None)
        if higher is None:
            self._findings.skipped[reason or "no type of 16 or 32 bits"] += 1
            return None
        is_on_cpu = self._options.pert_mode is Perturbation.TO_CPU
        result = _RaisedCall(call, higher, is_on_cpu=is_on_cpu, writes=named.name in UNNOTICED).run(types)
        self._note(f"{named.stem} {_short(types[0])} in {_short(higher)}")
        return _FixedResult(result)

    def _types_of(self, key: str, name: str, call: OperationCall, leaves: list[Any]) -> tuple[torch.dtype, ...]:
        """Return the types of what the call gives, learned by a run on copies for each combination of inputs' types."""
        kinds = tuple(leaf.dtype if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)
        devices = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
        autocast = tuple(_autocast_of(device) for device in sorted(devices))
        given = tuple(leaf for leaf in leaves if isinstance(leaf, torch.dtype))
        place = (call.function, kinds, given, autocast)
        if place not in self._types:
            result = ObservedCall.begin(key, name, call).again()
            self._types[place] = tuple(leaf.dtype for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
        return self._types[place]

    def _note(self, text: str) -> None:
        if not self._findings.fixed[text]:
            logger.info("free_benchmark: fixed %s", text)
        self._findings.fixed[text] += 1


@dataclasses.dataclass(frozen=True, slots=True)
class _FixedResult:
    """What a fixed call gave, which may be None."""

    result: Any


class _RaisedCall:
    """One run of a call in the floating type `higher`, on the CPU or where it is, with gradients through the casts."""

    def __init__(self, call: OperationCall, higher: torch.dtype, *, is_on_cpu: bool, writes: bool) -> None:
        self._call, self._higher, self._is_on_cpu, self._writes_unnoticed = call, higher, is_on_cpu, writes
        self._copies: list[tuple[Tensor, Tensor]] = []

    def run(self, types: tuple[torch.dtype, ...]) -> Any:
        """Return the call's results in `types`; what it wrote to its arguments has been written to the real ones.

        Raises:
            Exception: Whatever the function raises in that type; nothing has been written then.
        """
        device = self._call.tensors[0].device
        args, kwargs = pytree.tree_map(self._raised, (tuple(self._call.args), dict(self._call.kwargs)))
        with unautocast("cpu" if self._is_on_cpu else device.type):
            result = self._call.function(*args, **kwargs)
        leaves, form = pytree.tree_flatten(result)
        number = sum(isinstance(leaf, Tensor) for leaf in leaves)
        if number != len(types):
            raise ValueError(f"{number} results in higher precision, {len(types)} without")
        for original, copy in self._copies:
            if copy._version or (self._writes_unnoticed and not torch.equal(copy, original)):
                original.copy_(copy)
        own, kept = {id(copy): original for original, copy in self._copies}, iter(types)
        back = [
            own[id(leaf)] if id(leaf) in own else leaf.to(device, next(kept)) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        return pytree.tree_unflatten(back, form)

    def _raised(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return cast_dtype(value, self._higher)
        if isinstance(value, torch.device) and self._is_on_cpu:
            return torch.device("cpu")
        if not isinstance(value, Tensor):
            return value
        is_float = value.is_floating_point() or value.is_complex()
        copy = value.to("cpu" if self._is_on_cpu else value.device, cast_dtype(value.dtype, self._higher))
        if is_float and copy is not value:
            self._copies.append((value, copy))
        return copy


def _autocast_of(device: str) -> torch.dtype | None:
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
