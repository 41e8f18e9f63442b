"""Finds, while a step is run again, the operations that make a non-finite value from finite ones, and judges them.

Decides which operation is the first bad one, in which module's call and on which line of the script. It only looks: the
replay computes the same bits with it.
"""

from __future__ import annotations

import bisect
import dataclasses
import logging
import operator
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from trainermon.accuracy.calls import OperationCall
from trainermon.dump.facts.stacks import innermost_line
from trainermon.dump.files.records import BACKWARD, FORWARD
from trainermon.dump.files.verdicts import NonfiniteCause, OperationVerdict
from trainermon.hooks.names import plain_name
from trainermon.replay.precise import (
    OperationJudgement,
    TensorHealth,
    floating,
    has_memory,
    health,
    is_finite_number,
    judge,
)

logger = logging.getLogger("trainermon")

MAX_OPERATIONS = 8
MAX_MASKS = 4096
_SENT = OperationJudgement(
    NonfiniteCause.INHERITED, "what this rank gave to it was finite, what another one gave was not"
)
_MADE_SO = OperationJudgement(NonfiniteCause.INHERITED, "the script made a constant that is not finite")
EVIDENCE = "the operation was run again on its inputs in the replay"
# What they return was not computed: it is whatever was in memory.
_UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
# What makes a tensor of a number in the script.
_CONSTANTS = frozenset({"lift_fresh", "lift_fresh_copy"})
# Their result is there when somebody has waited for it.
_COLLECTIVE = frozenset({"c10d", "_c10d_functional", "c10d_functional"})
_OF_OTHERS = _COLLECTIVE | {"fsdp", "inductor", "profiler"}


class RunningCalls:
    """Tracks which module is running during a replay, by the key that its call has in a dump.

    Args:
        roots: The model's roots.
        names: Names of modules, where the path below the root is not what they are to be called.

    Attributes:
        micro_step: Number of the micro step whose forward runs; `stage` is the number of the root. `handed` is not
            looked at.
        gave: The types of the tensors that each call returned, by key; of the root by "".
    """

    def __init__(self, roots: Sequence[nn.Module], names: Mapping[nn.Module, str] | None = None) -> None:
        self.micro_step: int | None = None
        self.stage: int | None = None
        self.handed: Mapping[str, Any] = {}
        self.gave: dict[str, list[torch.dtype]] = {}
        self._roots = list(roots)
        self._names = names or {}
        self._running: list[tuple[nn.Module, str]] = []
        self._calls: Counter[str] = Counter()
        self._begins: list[tuple[int, str]] = []
        self._thread = threading.get_ident()
        self._handles: list[RemovableHandle] = []

    @property
    def current(self) -> str:
        """Key of the innermost call that runs; "" where that is the root's, or none."""
        return self._running[-1][1] if self._running else ""

    def call_of(self, number: int) -> str:
        """Return the key of the call in which autograd made its node `number`; "" for the root's, or none."""
        position = bisect.bisect_right(self._begins, number, key=operator.itemgetter(0))
        return self._begins[position - 1][1] if position else ""

    def attach(self) -> None:
        """Hook the modules."""
        for root in self._roots:
            for path, module in root.named_modules():
                stem = f"Module.{self._names.get(module, plain_name(path))}.{type(module).__name__}"
                self._handles.append(
                    module.register_forward_pre_hook(_EnteredModule(self, "" if module is root else stem))
                )
                self._handles.append(module.register_forward_hook(self._left, always_call=True))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._running.clear()

    def enter(self, module: nn.Module, stem: str) -> None:
        """Note that a call of `module` begins; `stem` is the module's key.

        One recomputed in a backward is not counted.
        """
        is_new = torch._C._current_graph_task_id() == -1
        number = self._calls[stem] if is_new else max(0, self._calls[stem] - 1)
        self._calls[stem] += is_new
        self._running.append((module, f"{stem}.{FORWARD}.{number}" if stem else ""))
        self._note_begin()

    def leave(self, key: str, output: Any) -> Any:
        """Note that the call `key` has ended; return what is to take the place of `output`, None: nothing."""
        self.gave[key] = [leaf.dtype for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]

    def _note_begin(self) -> None:
        """Remember from which node on the current call makes them; other threads number theirs by themselves."""
        if threading.get_ident() == self._thread:
            self._begins.append((torch.autograd._get_sequence_nr(), self.current))  # type: ignore[attr-defined]

    def _left(self, module: nn.Module, _args: Any, output: Any) -> Any:
        for position in range(len(self._running) - 1, -1, -1):
            if self._running[position][0] is module:
                key = self._running[position][1]
                del self._running[position:]
                self._note_begin()
                return self.leave(key, output)
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class _EnteredModule:
    calls: RunningCalls
    stem: str

    def __call__(self, module: nn.Module, _args: Any) -> None:
        self.calls.enter(module, self.stem)


class OperationWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Checks the result of every operation in a block, and explains the first ones with NaN or Inf.

    An operation goes wrong if what it gives is not finite while all that it was given is. Minus infinity alone is taken
    for a mask, until something makes NaN or infinity of it: then the operation counts that it came from. Collectives
    are left out. Cost: a wait for the device and a pass over the result per operation, a copy of what an in-place
    operation overwrites. Whatever goes wrong in here is logged once, and costs that verdict.
    """

    supports_higher_order_operators = True

    def __init__(self, calls: RunningCalls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._harmful: list[OperationVerdict] = []
        self._calls = calls
        self._lines: dict[int, str] = {}
        self._masks: dict[int, OperationVerdict] = {}
        self._received: dict[int, OperationVerdict] = {}
        self._has_bad_input = False
        self._failed = False

    @property
    def found(self) -> list[OperationVerdict]:
        """The verdicts on operations that went wrong, at most 8, in their order.

        Where there are none: those on operations that gave minus infinity, perhaps on purpose.
        """
        masks = list(dict.fromkeys(self._masks.values()))[:MAX_OPERATIONS]
        return self._harmful or [dataclasses.replace(mask, is_mask=True) for mask in masks]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and look at what it gives."""
        kwargs = kwargs or {}
        given = self._contain(self._given, func, args, kwargs)
        result = func(*args, **kwargs)
        if given is not None:
            self._contain(self._look, func, given, result)
        return result

    def _contain(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:  # the border to the replayed model, which must go on
            if not self._failed:
                logger.warning("an operation of a replay could not be judged: %s", error, exc_info=error)
            self._failed = True
            return None

    def _given(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return what the operation is given, with copies of what it will overwrite; None if it is not looked at."""
        schema = getattr(func, "_schema", None)
        if schema is None or func.namespace in _OF_OTHERS or func._opname in _UNINITIALISED:
            self._note_collective(func, args)
            return None
        if func.is_view and func._opname not in _CONSTANTS:
            return None
        if torch.is_grad_enabled():  # the node that autograd has just made: its backward has no line of its own
            self._lines.setdefault(torch.autograd._get_sequence_nr() - 1, innermost_line())  # type: ignore[attr-defined]
        if len(self._harmful) >= MAX_OPERATIONS:
            return None
        if not schema.is_mutable:
            return args, kwargs
        copy: tuple[Any, Any] = pytree.tree_map(self._cloned, (args, kwargs))
        return copy

    def _note_collective(self, func: Any, args: Any) -> None:
        """Remember what a collective writes to, if this rank gives nothing bad to it."""
        if getattr(func, "namespace", "") in _COLLECTIVE:
            tensors = list(floating(args))
            if not any(health(tensor) is TensorHealth.BAD for tensor in tensors):
                verdict = self._verdict_of(str(func), _SENT)
                self._received |= {_address(tensor): verdict for tensor in tensors}

    def _cloned(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not has_memory(value):
            return value
        clone = value.clone()
        if _address(value) in self._masks:
            self._masks[_address(clone)] = self._masks[_address(value)]
        return clone

    def _look(self, func: Any, given: tuple[Any, Any], result: Any) -> None:
        tensors = list(floating(result))
        states = [health(tensor) for tensor in tensors]
        for tensor in tensors if self._masks else ():
            self._masks.pop(_address(tensor), None)  # what is there now is not what was there then
        if all(state is TensorHealth.FINITE for state in states):
            return
        is_constant = func._opname in _CONSTANTS
        masked = [] if is_constant else _masked_inputs(given)
        is_mask = TensorHealth.BAD not in states
        is_filled = is_constant or not all(map(is_finite_number, pytree.tree_leaves(given)))
        if masked is None and not (self._harmful or self._has_bad_input):
            self._has_bad_input = True  # of a weight, or of the batch, if no collective brought it
            self._harmful += self._received_from_others(given)
        if masked is None or (is_mask and is_filled):
            return
        verdict = next((self._masks[address] for address in map(_address, masked) if address in self._masks), None)
        if verdict is None and not (is_mask and masked):  # a mask that is passed on is none of ours
            verdict = self._verdict(func, given, result)
        if is_mask and verdict is not None:  # it may be meant so, or do harm later, as the logarithm of zero
            self._masks |= {_address(tensor): verdict for tensor in tensors if len(self._masks) < MAX_MASKS}
        elif verdict is not None and verdict not in self._harmful:
            self._harmful.append(verdict)

    def _received_from_others(self, given: Any) -> list[OperationVerdict]:
        """Return the verdict on the collective that brought the first bad value, if one did."""
        bad = (tensor for tensor in floating(given) if health(tensor) is TensorHealth.BAD)
        return [self._received[address] for address in map(_address, bad) if address in self._received][:1]

    def _verdict(self, func: Any, given: tuple[Any, Any], result: Any) -> OperationVerdict:
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        judged = (
            _MADE_SO
            if func._opname in _CONSTANTS
            else judge(OperationCall(func, *given, func.namespace not in ("aten", "prims"), is_random), result)
        )
        return self._verdict_of(str(func), judged)

    def _verdict_of(self, operation: str, judged: OperationJudgement) -> OperationVerdict:
        call, direction, source = self._place()
        return OperationVerdict(
            operation=operation,
            cause=judged.cause,
            reason=judged.reason,
            call=call,
            direction=direction,
            micro_step=self._calls.micro_step,
            stage=self._calls.stage or 0,
            source=source,
            evidence=EVIDENCE,
            collect=judged.collect,
        )

    def _place(self) -> tuple[str, str, str]:
        if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():  # or recomputed in a backward
            return self._calls.current, FORWARD, innermost_line()
        number = torch._C._current_autograd_node()._sequence_nr()
        call = self._calls.call_of(number).replace(f".{FORWARD}.", f".{BACKWARD}.")
        return (
            call,
            BACKWARD,
            innermost_line() or self._lines.get(number, ""),
        )  # a Function of the script's has its own line


def _masked_inputs(given: Any) -> list[Tensor] | None:
    """Return what an operation was given with minus infinity in it; None if there was worse."""
    masked = []
    for tensor in floating(given):
        state = health(tensor)
        if state is TensorHealth.BAD:
            return None
        if state is TensorHealth.MASKED:
            masked.append(tensor)
    return masked


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
