"""Notes which collective, send or receive this rank is in, where its agent can read that while the rank stands still.

A second source beside torch's flight recorder, which some versions lack, and which does not note gloo's sends and
receives. Wrapped are the methods of `ProcessGroup` and `Work.wait`; what C++ calls, as DDP's reducer does, and the
functional collectives are not seen. Nothing is held: neither a tensor nor a handle, nor a group.

The notes are stores into memory, as a system call for each would cost more than all the rest.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from trainermon.core.call_notes import (
    IN_NO_CALL,
    MARK,
    MAX_NOTES,
    NOTE,
    NOTES_BYTES,
    RECV,
    SAME_SIZE,
    SEND,
    as_failed,
    call_offset,
    check_sum,
    note_offset,
    operation_place,
)
from trainermon.hooks.guard import FaultGuard
from trainermon.hooks.patch import CallPatch, with_subclasses
from trainermon.monitor.taps.operands import METHODS, tensors_in

MAX_PENDING = 4096
"""Handles whose calls are known: more are only there where nobody waits for them."""

# Of linux/include/uapi/linux/fcntl.h.
_ADD_SEALS, _SEAL_SHRINK, _SEAL_GROW = 1033, 0x0002, 0x0004
_P2P = frozenset({SEND, RECV})
_write_note = NOTE.pack_into


class NotedCalls:
    """Writes down which collectives each process group has begun, in shared memory where the agent reads it in a hang.

    Calls of all threads, while attached; costs 2 µs a call, 15 µs from a cold cache. Contained: a fault of its own ends
    the notes, and nothing else. Groups beyond the first 63 are left out.

    Attributes:
        descriptor: File descriptor under which an agent finds the notes; -1 when they are not kept any more.

    Raises:
        AttachError: This version of torch lacks one of the methods.
        OSError: There is no memory for a file.
    """

    def __init__(self) -> None:
        self._guard = FaultGuard(lambda _: self.detach())
        self._groups: dict[str, _NotedGroup] = {}
        self._pending: dict[int, _NotedCall] = {}
        self._patches = list(self._make_patches())
        self.descriptor, self._notes = _make_notes()

    def attach(self) -> None:
        """Begin to write down collective calls."""
        self._notes[: len(MARK)] = MARK
        for patch in self._patches:
            patch.attach()

    def detach(self) -> None:
        """Put torch's functions back, and release the notes, which are no longer updated. May be called again."""
        for patch in self._patches:
            patch.detach()
        self._groups.clear()
        self._pending.clear()
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1
        mapped, self._notes = self._notes, bytearray(NOTES_BYTES)  # a call may still be on its way in another thread
        if isinstance(mapped, mmap.mmap):
            mapped.close()

    def stop_in_child(self) -> None:
        """Stop writing notes in a forked child: they are the parent's."""
        self._guard.tripped = True

    def _make_patches(self) -> Iterator[CallPatch]:
        for name, op in METHODS.items():
            if name in vars(dist.ProcessGroup):
                place, counted = operation_place(op.name), int(op.name in SAME_SIZE)
                is_message = op.name in _P2P
                begins = partial(self._message_begins, place) if is_message else partial(self._begins, place, counted)
                yield self._patch(dist.ProcessGroup, name, begins, self._ends)
        for work in with_subclasses(dist.Work):
            if "wait" in vars(work):
                yield self._patch(work, "wait", self._wait_begins, self._is_over)

    def _patch(self, owner: Any, name: str, begins: Callable[..., Any], ends: Callable[..., Any]) -> CallPatch:
        return CallPatch(owner, name, begins=begins, ends=ends, fails=self._fails, border=self._guard)

    # What follows runs beside every collective, from a cold cache: it makes as few calls as it can.

    def _begins(self, place: int, counted: int, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> _NotedCall | None:
        """Note the operation number `place`, and how many elements the argument number `counted` has; 0: of none."""
        name = args[0].group_name  # not the group itself, which would be kept alive
        group = self._groups.get(name) or self._add(name)
        if group.place >= MAX_NOTES:
            return None
        number = group.last_collective = next(group.collectives)
        elements = 0
        if 0 < counted < len(args):
            tensors = args[counted]
            is_one = type(tensors) is list and len(tensors) == 1 and isinstance(tensors[0], Tensor)
            elements = tensors[0].numel() if is_one else sum(tensor.numel() for tensor in tensors_in(tensors))
        _write_note(self._notes, group.offset, group.check_sum, number, group.last_p2p, place, number, -1, elements)
        if getattr(args[-1], "asyncOp", True) is False:
            return group.at_once
        return _NotedCall(group.call, self._notes[group.call])

    def _message_begins(self, place: int, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> _NotedCall | None:
        name = args[0].group_name
        group = self._groups.get(name) or self._add(name)
        if group.place >= MAX_NOTES:
            return None
        peer = args[2] if len(args) > 3 else -1  # a receive from anybody is given no number
        number = group.last_p2p = next(group.p2p)
        begun = group.last_collective
        _write_note(self._notes, group.offset, group.check_sum, begun, number, place, number, peer, 0)
        return _NotedCall(group.call, self._notes[group.call])

    def _ends(self, noted: _NotedCall, result: Any) -> None:
        if result is None or noted.content is not None:
            self._notes[noted.place] = IN_NO_CALL
        if result is not None:
            if len(self._pending) >= MAX_PENDING:
                self._pending.clear()
            self._pending[id(result)] = noted

    def _wait_begins(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> _NotedCall | None:
        noted = self._pending.pop(id(args[0]), None)
        if noted is not None and noted.content is not None:
            self._notes[noted.place] = noted.content
        return noted

    def _is_over(self, noted: _NotedCall, _result: Any = None) -> None:
        self._notes[noted.place] = IN_NO_CALL

    def _fails(self, noted: _NotedCall) -> None:
        self._notes[noted.place] = as_failed(bytes(self._notes[noted.place]))

    def _add(self, torch_name: str) -> _NotedGroup:
        added = self._groups[torch_name] = _NotedGroup(len(self._groups), check_sum(torch_name))
        return added


class _NotedCall(NamedTuple):
    """Where a call stands in the notes, and what does; None if its caller waits for it before anything else."""

    place: slice
    content: bytes | bytearray | None


class _NotedGroup:
    """A group's place in the notes, and what was begun in it; counters are whole even where two threads call."""

    __slots__ = (
        "at_once", "call", "check_sum", "collectives", "last_collective", "last_p2p", "offset", "p2p", "place",
    )  # fmt: skip

    def __init__(self, place: int, check_sum: int) -> None:
        self.place = place
        self.check_sum = check_sum
        self.offset = note_offset(place)
        self.call = slice(call_offset(place), call_offset(place) + len(IN_NO_CALL))
        self.at_once = _NotedCall(self.call, None)
        self.collectives, self.p2p = itertools.count(1), itertools.count(1)
        self.last_collective = self.last_p2p = 0


def _make_notes() -> tuple[int, mmap.mmap | bytearray]:
    """Return memory that another process can read as a file, and that nobody can make shorter under our feet."""
    descriptor = os.memfd_create("trainermon-calls", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, NOTES_BYTES)
        fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW)
        return descriptor, mmap.mmap(descriptor, NOTES_BYTES)
    except OSError:
        os.close(descriptor)
        raise
