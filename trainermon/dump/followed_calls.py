"""Calls that no function mode sees: collectives, messages between two ranks, replaced functions and the user's own.

Each is followed by a patch that is taken back. A collective that is not waited for at once is recorded when it was.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from trainermon.dump.function_names import FunctionName
from trainermon.hooks.guard import ContainedCall
from trainermon.hooks.patch import CallPatch

DISTRIBUTED, FUNCTIONAL = "Distributed", "Functional"
COLLECTIVES = [
    "broadcast",
    "all_reduce",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all_single",
    "all_to_all",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "batch_isend_irecv",
]
# Methods of a process group: P2POp refuses functions that were replaced.
POINT_TO_POINT = ("send", "recv", "recv_anysource")
MESSAGES = frozenset(["send", "recv", "isend", "irecv"])
# Between the function that calls a method of a process group and what follows the method.
MAX_FRAMES_BETWEEN = 8


class CallRecorder(Protocol):
    """Interface of what writes calls of replaced functions into a dump; `FollowedCalls` calls it around each call."""

    def open(self, named: FunctionName, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the inputs of a call that begins.

        Return an object for it, which `end` takes, or None: it is not recorded. In a backward a call may be one of a
        recomputation; then nothing is recorded but its gradients.
        """

    def end(self, call: Any, result: Any, *, readable: bool = True) -> None:
        """Record the result of a call that `open` returned.

        Where it is not `readable`, only type and shape of the result.
        """

    def reread(self, tensors: Sequence[Tensor]) -> None:
        """Drop the statistics remembered for these tensors: a function has changed them and torch has not noticed."""


@dataclasses.dataclass(slots=True, eq=False)
class _FollowedCall:
    """A call that runs, or is to be waited for. `call` is None if it is not recorded."""

    call: Any
    operands: tuple[Any, ...] = ()
    works: list[Any] = dataclasses.field(default_factory=list)


class FollowedCalls:
    """Replaces functions by ones that record their calls, between `attach` and `detach`.

    For what torch's function modes do not see: collectives, and functions that the user registered. What such a
    function calls itself is part of its call and not recorded (`running`).

    Args:
        recorder: Takes inputs and results.
        contain: Makes, of a function and its first arguments, a callable that never raises into training.
    """

    def __init__(self, recorder: CallRecorder, contain: Callable[..., ContainedCall]) -> None:
        self.running = False
        self._recorder = recorder
        self._contain = contain
        self._thread = threading.get_ident()
        self._waiting: dict[int, _FollowedCall] = {}
        self._patches = list(self._replaced_functions())
        if dist.is_available() and dist.is_initialized():
            self._patches += self._communication()

    def follow(self, owner: Any, name: str, prefix: str) -> None:
        """Add the function `name` of `owner` to those recorded, as `<prefix>.<name>`; before `attach`."""
        self._patches.append(self._patch(owner, name, self._contain(self._begins, FunctionName(prefix, name))))

    def attach(self) -> None:
        """Replace the functions by ones that record their calls, from now on."""
        for patch in self._patches:
            patch.attach()

    def detach(self) -> None:
        """Put the original functions back.

        Results of collectives that nobody has waited for are recorded if they have arrived.
        """
        for patch in self._patches:
            patch.detach()
        for followed in {id(each): each for each in self._waiting.values()}.values():
            self._contain(self._finish)(followed, None)
        self._waiting.clear()

    def _patch(self, owner: Any, name: str, begins: ContainedCall) -> CallPatch:
        return CallPatch(owner, name, begins=begins, ends=self._contain(self._ends), fails=self._contain(self._fails))

    def _replaced_functions(self) -> Iterator[CallPatch]:
        """Yield those that a framework has put in the place of torch's: they may not announce themselves to a mode."""
        for name, function in vars(functional).items():
            if type(function) is FunctionType and not function.__module__.startswith("torch") and name[0] != "_":
                yield self._patch(functional, name, self._contain(self._begins, FunctionName(FUNCTIONAL, name)))

    def _communication(self) -> Iterator[CallPatch]:
        for name in COLLECTIVES:
            if name in vars(dist):
                yield self._patch(dist, name, self._contain(self._begins, FunctionName(DISTRIBUTED, name)))
        for name in POINT_TO_POINT:
            if name in vars(dist.ProcessGroup):
                yield self._patch(dist.ProcessGroup, name, self._contain(self._begins_message, name))
        for work in subclasses(dist.Work):
            if "wait" in vars(work):
                waits = self._contain(lambda args, _kwargs: self._waiting.pop(id(args[0]), None))
                yield CallPatch(work, "wait", begins=waits, ends=self._contain(self._waited))

    def _begins(self, named: FunctionName, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _FollowedCall | None:
        if self.running or torch.compiler.is_compiling():
            return None
        if threading.get_ident() != self._thread and torch._C._current_graph_task_id() == -1:
            return None
        with torch._C.DisableTorchFunction():
            call = self._recorder.open(named, args, kwargs)
        self.running = True
        return _FollowedCall(call, (*args, *kwargs.values()) if named.prefix == DISTRIBUTED else ())

    def _begins_message(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _FollowedCall | None:
        group, tensors, *rest = args
        peer = dist.get_global_rank(group, rest[0]) if method != "recv_anysource" else None
        tag = rest[-1] if rest else kwargs.get("tag", 0)
        named = FunctionName(DISTRIBUTED, _sender(method.partition("_")[0]))
        return self._begins(named, (*tensors, peer), {"group": group, "tag": tag})

    def _ends(self, followed: _FollowedCall, result: Any) -> None:
        self.running = False
        works = [result] if isinstance(result, dist.Work) else result if _are_works(result) else []
        if followed.call is None:
            return
        if not works:
            self._finish(followed, result)
        followed.works = list(works)
        for work in works:
            self._waiting[id(work)] = followed

    def _fails(self, _followed: _FollowedCall) -> None:
        self.running = False

    def _waited(self, followed: _FollowedCall, _result: Any) -> None:
        if not any(id(work) in self._waiting for work in followed.works):
            self._finish(followed, None)

    def _finish(self, followed: _FollowedCall, result: Any) -> None:
        """Record what is in the operands of a collective now; of any other function its result."""
        operands = tuple(item for item in followed.operands if isinstance(item, Tensor | list))
        self._recorder.reread([tensor for operand in operands for tensor in _tensors(operand)])
        readable = all(work.is_completed() for work in followed.works if id(work) in self._waiting)
        with torch._C.DisableTorchFunction():
            self._recorder.end(followed.call, operands or result, readable=readable)


def subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    """Yield `cls` and every class that inherits from it, directly or not."""
    yield cls
    for subclass in cls.__subclasses__():
        yield from subclasses(subclass)


def _sender(method: str) -> str:
    """Return the name of the function of torch.distributed that was called for a message, or the method's."""
    name, frame = method, sys._getframe(1)
    for _ in range(MAX_FRAMES_BETWEEN):
        if frame.f_code.co_name in MESSAGES and frame.f_code.co_filename == dist.distributed_c10d.__file__:
            name = frame.f_code.co_name  # `send` calls `isend`
        if frame.f_back is None:
            break
        frame = frame.f_back
    return name


def _are_works(result: Any) -> bool:
    return isinstance(result, list) and bool(result) and all(isinstance(item, dist.Work) for item in result)


def _tensors(operand: Any) -> list[Tensor]:
    items = operand if isinstance(operand, list) else [operand]
    return [tensor for item in items if isinstance(tensor := getattr(item, "tensor", item), Tensor)]
