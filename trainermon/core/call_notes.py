"""What a rank notes of each process group: how far it has come, and in which call it is.

The notes lie in 4096 bytes of memory that the rank holds as a file (`rank00000.about` says under which descriptor), so
that the agent reads them as /proc/<pid>/fd/<descriptor> also while the rank stands still. A mark stands at their
beginning while they are kept; each group has 64 bytes from byte 64 on, in the order of their first calls. There are no
check bits, as they are read while nothing changes them. Standard library only; the rank writes, the agent reads.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

# A note holds the place of an operation in this list, so it only grows at its end.
OPERATIONS = (
    "all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "all_gather", "all_gather_coalesced",
    "all_gather_into_tensor", "all_gather_into_tensor_coalesced", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "all_to_all_single", "all_to_all", "send", "recv",
    "barrier",
)  # fmt: skip
SEND, RECV = "send", "recv"
SAME_SIZE = frozenset({"all_reduce", "all_reduce_coalesced", "broadcast", "reduce"})
"""Operations to which every rank hands in the same number of elements."""

NOTES_BYTES = 4096
MAX_NOTES = 63
MARK = b"TMONCALL"

_NOTE_BYTES = 64
# check sum of torch's name of the group, collectives begun, sends and receives begun
_BEGUN = struct.Struct("@QQQ")
# place of the operation in `OPERATIONS`, from 1; number; number of the other rank in the group, -1; elements
_CALL = struct.Struct("@QQqQ")

NOTE = struct.Struct("@QQQQQqQ")
"""Both parts of a note, for a rank that writes them at once."""

IN_NO_CALL = bytes(_CALL.size)
_FAILED = 1 << 63  # beside the place of an operation


class CallNote(NamedTuple):
    """What a rank has noted, for the agent to read in a hang, on the collectives of one process group.

    Attributes:
        group: Check sum of the name that torch gives the group; see `check_sum`.
        collectives: How many collectives the rank has begun in it since it is watched.
        p2p: Sends and receives, likewise.
        operation: Which the rank is in or waits for, or was in when it failed; "" in none.
        number: Number of that call among the collectives, or among the sends and receives.
        peer: Number in the group of the rank at the other end of a send or receive, -1 where that is not known.
        elements: Elements that the rank passed in, where all ranks must pass in as many; else 0.
        failed: The call has ended with an exception, and no other of the group has begun since.
    """

    group: int
    collectives: int
    p2p: int
    operation: str
    number: int
    peer: int
    elements: int
    failed: bool = False


def check_sum(torch_name: str) -> int:
    """Return the number, never 0, that stands for a process group in the notes, computed from torch's name of it."""
    return zlib.crc32(torch_name.encode()) + 1


def note_offset(place: int) -> int:
    """Return the offset in bytes, in a rank's notes, of the note on the group with number `place`."""
    return (place + 1) * _NOTE_BYTES


def call_offset(place: int) -> int:
    """Return the offset in bytes, in a rank's notes, of the second part (the call) of the note with number `place`."""
    return note_offset(place) + _BEGUN.size


def pack_begun(group: int, *, collectives: int, p2p: int) -> bytes:
    """Return the bytes of the first part of a note: the group, and how many calls were begun in it."""
    return _BEGUN.pack(group, collectives, p2p)


def pack_call(operation: str, number: int, *, peer: int = -1, elements: int = 0) -> bytes:
    """Return the bytes of the second part of a note: the call that the rank is in."""
    return _CALL.pack(operation_place(operation), number, peer, elements)


def as_failed(call: bytes) -> bytes:
    """Return the bytes of the second part of a note once the call, which it has been about, has failed."""
    operation, *rest = _CALL.unpack(call)
    return _CALL.pack(operation | _FAILED, *rest) if operation else call


def operation_place(name: str) -> int:
    """Return the number, from 1, that stands in a note for the operation `name`, one of `OPERATIONS`."""
    return _PLACES[name]


def parse_notes(content: bytes) -> tuple[CallNote, ...] | None:
    """Return the notes in the bytes `content` of a rank's shared memory; None where they are none."""
    if not content.startswith(MARK) or len(content) < NOTES_BYTES:
        return None
    found = []
    for place in range(MAX_NOTES):
        group, collectives, p2p = _BEGUN.unpack_from(content, note_offset(place))
        operation, number, peer, elements = _CALL.unpack_from(content, call_offset(place))
        failed, operation = bool(operation & _FAILED), operation & ~_FAILED
        if group and operation <= len(OPERATIONS):
            name = OPERATIONS[operation - 1] if operation else ""
            found.append(CallNote(group, collectives, p2p, name, number, peer, elements, failed))
    return tuple(found)


_PLACES = {name: place for place, name in enumerate(OPERATIONS, 1)}
