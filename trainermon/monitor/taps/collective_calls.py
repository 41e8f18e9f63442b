"""Watches the methods of `ProcessGroup` and `Work.wait`: every collective that Python code asks for, by whatever name.

Wrapped are the methods of the classes, so that aliases taken at import, `*_base` and coalesced forms, batches of
point-to-point calls and the layers of frameworks all come by. C++ callers (DDP's reducer) do not, nor do the functional
collectives, which have taps of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import Any

import torch.distributed as dist

from trainermon.hooks.guard import FaultGuard
from trainermon.hooks.patch import CallPatch, with_subclasses
from trainermon.monitor.taps.call_rows import Arguments, CallRows, CollectiveCall
from trainermon.monitor.taps.micro_steps import in_backward
from trainermon.monitor.taps.operands import METHODS, CollectiveOp, OperandRanks, keeps, read_by, tensors_in, written_by
from trainermon.monitor.taps.process_groups import WatchedGroup, WatchedGroups


class MethodTaps:
    """Records the statistics of what `ProcessGroup`'s methods (collectives) read, and of their results once waited for.

    A handle and what its call writes are held from the call to the wait, or to the end of the step.

    Raises:
        AttachError: This version of torch lacks one of these methods.
    """

    def __init__(self, rows: CallRows, groups: WatchedGroups, guard: FaultGuard) -> None:
        self._rows = rows
        self._groups = groups
        self._guard = guard
        self._blocks: dict[WatchedGroup, list[CollectiveCall]] = {}
        self._pending: dict[int, tuple[dist.Work, list[CollectiveCall]]] = {}

    def patches(self) -> Iterator[CallPatch]:
        """Yield the replacements, not yet in place, of torch's methods for collectives, coalescing blocks and waits."""
        owner = dist.ProcessGroup
        for name, op in METHODS.items():
            if name in vars(owner) or name == "allreduce":
                yield self._patch(owner, name, partial(self._begins, op), self._ends)
        yield self._patch(owner, "_start_coalescing", self._block_begins, self._ends)
        yield self._patch(owner, "_end_coalescing", self._block_closes, self._block_ends)
        for work in with_subclasses(dist.Work):
            if "wait" in vars(work):
                yield self._patch(work, "wait", self._wait_begins, self._wait_ends)

    def _patch(self, owner: Any, name: str, begins: Callable[..., Any], ends: Callable[..., Any]) -> CallPatch:
        return CallPatch(owner, name, begins=begins, ends=ends, border=self._guard)

    def new_step(self) -> None:
        """Release handles and tensors of collectives that nobody waited for, and of coalescing blocks left open."""
        self._blocks.clear()
        self._pending.clear()

    def step_ended(self) -> None:
        """Count the calls whose results nobody has waited for.

        They are not read although some may be there: which ones is a matter of chance, and what is in their tensors by
        now may be something else.
        """
        for _, calls in self._pending.values():
            for call in calls:
                call.group.unfinished += bool(call.written)
        self._pending.clear()

    # What follows runs beside every collective, from a cold cache: it makes as few calls as it can.

    def _begins(self, op: CollectiveOp, args: Arguments, kwargs: dict[str, Any]) -> CollectiveCall | None:
        rows = self._rows
        if get_ident() != rows.thread and not in_backward():
            return None
        operation = rows.operations.get((args[0], op.name)) or rows.add(args[0], op.name)
        group = operation.group
        if op.is_in_place and len(args) > 1:
            read = written = tensors_in(args[1])
        else:
            read, written = read_by(op, args, kwargs, group.rank), written_by(op, args, kwargs, group.rank)
        may_keep = group.is_alone or (group.is_plain and op.only is OperandRanks.READ_AT_ROOT)
        return rows.open(operation, read, written, is_kept=may_keep and keeps(args[-1], read, written))

    def _ends(self, call: CollectiveCall, result: Any) -> None:
        group = call.group
        group.accounted += group.sequence() - call.sequence
        group.size_bytes += call.size_bytes
        if call.rows is None:
            return
        block = self._blocks.get(group) if self._blocks else None
        if block is not None:
            call.kept = -1  # whoever called it goes on before the block is waited for
            block.append(call)
        elif isinstance(result, dist.Work):
            self._pending[id(result)] = (result, [call])
        else:
            self._rows.take_after(call)

    def _block_begins(self, args: Arguments, _kwargs: dict[str, Any]) -> None:
        if self._rows.is_training_thread():
            self._blocks[self._groups.of(args[0])] = []

    def _block_closes(self, args: Arguments, _kwargs: dict[str, Any]) -> CollectiveCall | None:
        return CollectiveCall(self._groups.of(args[0]), None, (), 0) if self._rows.is_training_thread() else None

    def _block_ends(self, call: CollectiveCall, result: Any) -> None:
        self._rows.account(call)
        calls = self._blocks.pop(call.group, [])
        if calls and isinstance(result, dist.Work):
            self._pending[id(result)] = (result, calls)
        else:
            for each in calls:
                self._rows.take_after(each)

    def _wait_begins(self, args: Arguments, _kwargs: dict[str, Any]) -> tuple[list[CollectiveCall], float] | None:
        if get_ident() != self._rows.thread and not in_backward():
            return None
        expected = self._pending.pop(id(args[0]), None)
        return None if expected is None else (expected[1], perf_counter())

    def _wait_ends(self, token: tuple[list[CollectiveCall], float], _result: Any) -> None:
        calls, begin_s = token
        self._rows.put_wait(calls[0], perf_counter() - begin_s)  # the calls of a block were waited for at once
        for call in calls:
            self._rows.take_after(call)
