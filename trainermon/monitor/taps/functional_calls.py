"""Watches the functional collectives, which reach the dispatcher without a method of `ProcessGroup`.

Wrapped are the functions of `torch.distributed._functional_collectives` that call the dispatcher, not the operators: a
kernel of our own would have to take part in autograd. So DTensor is seen, and what a compiled graph or the backward of
such a function issues is not: it is counted as unseen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh

from trainermon.hooks.guard import FaultGuard
from trainermon.hooks.patch import CallPatch
from trainermon.monitor.taps.call_rows import Arguments, CallRows, CollectiveCall, size_bytes
from trainermon.monitor.taps.operands import FUNCTIONS, CollectiveOp, read_by, tensors_in


class _AwaitedTensor(NamedTuple):
    """A tensor that a call will have filled when it is waited for, and its number among the results."""

    tensor: Tensor
    call: CollectiveCall
    number: int


class FunctionTaps:
    """Records the statistics of what functional collectives read, and of their results once `wait_tensor` has returned.

    What is returned as a tensor to be waited for is held until then, or to the end of the step.

    Raises:
        AttachError: This version of torch waits for the results in another way.
    """

    def __init__(self, rows: CallRows, guard: FaultGuard) -> None:
        self._rows = rows
        self._guard = guard
        self._awaited: dict[int, _AwaitedTensor] = {}

    def patches(self) -> Iterator[CallPatch]:
        """Yield a replacement, not yet in place, for each functional collective that this version of torch has."""
        from torch.distributed import _functional_collectives as module

        border = self._guard
        is_tracing = getattr(module, "_are_we_tracing", torch.compiler.is_compiling)
        for names, op in FUNCTIONS:
            name = next((name for name in names if hasattr(module, name)), None)
            if name is not None:
                position = list(inspect.signature(getattr(module, name)).parameters).index("group")
                begins = partial(self._begins, op, position, is_tracing)
                yield CallPatch(module, name, begins=begins, ends=self._ends, border=border)
        yield CallPatch(module, "wait_tensor", begins=self._wait_begins, ends=self._wait_ends, border=border)

    def new_step(self) -> None:
        """Release calls and results that were never waited for."""
        self._awaited.clear()

    def step_ended(self) -> None:
        """Count the calls whose results nobody has waited for: their tensors must not be read yet."""
        for call in {awaited.call for awaited in self._awaited.values()}:
            call.group.unfinished += 1
        self._awaited.clear()

    def _begins(
        self, op: CollectiveOp, position: int, is_tracing: Callable[[], bool], args: Arguments, kwargs: dict[str, Any]
    ) -> CollectiveCall | None:
        group = _process_group(args[position] if position < len(args) else kwargs.get("group"))
        if group is None or not self._rows.is_training_thread() or is_tracing():
            return None
        return self._rows.open(self._rows.operation(group, op.name), read_by(op, args, kwargs, -1), ())

    def _ends(self, call: CollectiveCall, result: Any) -> None:
        results = tensors_in(result)
        call.size_bytes = max(call.size_bytes, size_bytes(results))
        self._rows.account(call)
        if call.rows is None:
            return
        for index, tensor in enumerate(results):
            inner = getattr(tensor, "elem", None)  # of an AsyncCollectiveTensor
            if inner is None:
                self._rows.take_one_after(call, index, tensor)
            else:
                self._awaited[_storage_of(inner)] = _AwaitedTensor(inner, call, index)

    def _wait_begins(self, args: Arguments, _kwargs: dict[str, Any]) -> tuple[_AwaitedTensor, float] | None:
        if not args or not self._awaited or not self._rows.is_training_thread():
            return None
        awaited = self._awaited.pop(_storage_of(args[0]), None)
        return None if awaited is None else (awaited, perf_counter())

    def _wait_ends(self, token: tuple[_AwaitedTensor, float], _result: Any) -> None:
        awaited, begin_s = token
        if awaited.number == 0:
            self._rows.put_wait(awaited.call, perf_counter() - begin_s)
        self._rows.take_one_after(awaited.call, awaited.number, awaited.tensor)


def _storage_of(tensor: Any) -> int:
    """Return the number of the memory by which torch knows what to wait for: views of a result stand for it, too."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (AttributeError, NotImplementedError, RuntimeError):  # no tensor, or of a kind without memory of its own
        return id(tensor)


def _process_group(given: Any) -> dist.ProcessGroup | None:
    """Return the group that a functional collective was given in one of its forms; None for a bare list of ranks."""
    if isinstance(given, dist.ProcessGroup):
        return given
    if isinstance(given, str):
        return _resolve_process_group(given)  # type: ignore[arg-type]  # a name is a str
    if isinstance(given, DeviceMesh):
        return given.get_group()
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], DeviceMesh):
        return given[0].get_group(given[1])
    return None
