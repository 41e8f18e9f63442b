"""Asks a rank's flight recorder through the socket that its `Witness` has opened.

The answer comes from a native thread of the rank's, without the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainermon.agent.hang.evidence import GroupState, PendingCall
from trainermon.core.flight_recorder import RecordedCall, RecorderReading, parse
from trainermon.core.spool import rank_path

# That of an accelerator's backend, and that of every other one. Torch's CUDA build answers both in every process, and
# neither knows of the other's collectives.
HANDLERS = ("dump_nccl_trace_json", "fr_trace_json")
MAX_ANSWER = 32 << 20
MAX_CALLS = 64

_REQUEST = "POST /handler/{} HTTP/1.1\r\nHost: rank\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """What a rank wrote about its process groups in the file `rank00000.about`.

    Attributes:
        main_thread: Identifier of its main thread.
        signal: The signal that makes it write its stacks; 0: none.
        calls: File descriptor of its notes of calls; -1: it keeps none.
        groups: By torch's name of a process group: its purpose (`dp`) and its global ranks.
        mixed: Those groups that use one backend for tensors on the CPU and another one for the device's.
    """

    main_thread: int = 0
    signal: int = 0
    calls: int = -1
    groups: Mapping[str, tuple[str, tuple[int, ...]]] = dataclasses.field(default_factory=dict)
    mixed: frozenset[str] = frozenset()


def read_about(spool: Path, rank: int) -> RankGroups:
    """Return the process groups, main thread and signal that a rank wrote down; empty where they cannot be read."""
    try:
        plain = json.loads(rank_path(spool, rank, "about").read_text(encoding="utf-8"))
        groups = {
            str(group["torch_name"]): (str(group["name"]), tuple(map(int, group["ranks"]))) for group in plain["groups"]
        }
        mixed = frozenset(str(group["torch_name"]) for group in plain["groups"] if group.get("is_mixed"))
        return RankGroups(
            main_thread=int(plain["main_thread"]),
            signal=int(plain["signal"]),
            calls=int(plain.get("calls", -1)),
            groups=groups,
            mixed=mixed,
        )
    except (OSError, ValueError, TypeError, KeyError):
        return RankGroups()


async def read_recorder(spool: Path, rank: int, about: RankGroups, *, limit_s: float) -> tuple[GroupState, ...]:
    """Ask the rank's flight recorder (torch's log of collectives) how far the rank has come in each of its groups.

    Raises:
        OSError: There is no socket, nobody answers, or it is no recorder's answer.
        asyncio.TimeoutError: There was no whole answer within `limit_s`.
    """
    return await asyncio.wait_for(_read(spool, rank, about), limit_s)


async def _read(spool: Path, rank: int, about: RankGroups) -> tuple[GroupState, ...]:
    problems, readings = [], []
    for handler in HANDLERS:
        status, body = await _ask(spool, rank, handler)
        if status == 200:
            recording = await asyncio.to_thread(_parsed, body)
            readings.append(group_states(recording, about if handler == HANDLERS[0] else _on_cpu(about)))
        else:
            problems.append(f"{handler}: HTTP status {status}")
    if not readings:
        raise OSError("; ".join(problems))
    return joined(readings)


def _on_cpu(about: RankGroups) -> RankGroups:
    """Name the groups that both recorders know apart: each backend numbers its own collectives."""
    groups = {
        torch_name: (f"{name} on CPU", ranks) if torch_name in about.mixed else (name, ranks)
        for torch_name, (name, ranks) in about.groups.items()
    }
    return dataclasses.replace(about, groups=groups)


def joined(readings: Sequence[Sequence[GroupState]]) -> tuple[GroupState, ...]:
    """Merge what several flight recorders of one rank (one per backend) say into one state per process group.

    For each group the one counts that knows anything of it.
    """
    found: dict[tuple[str, tuple[int, ...]], GroupState] = {}
    for state in (state for reading in readings for state in reading):
        before = found.get((state.name, state.ranks))
        if before is None or not (before.entered or before.in_flight):
            found[state.name, state.ranks] = state
    return tuple(found.values())


def _parsed(body: bytes) -> RecorderReading:
    try:
        return parse(body)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise OSError(f"the flight recorder's answer is not understood: {error!r}") from error


async def _ask(spool: Path, rank: int, handler: str) -> tuple[int, bytes]:
    folder = os.open(spool, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # a socket's name has at most 107 bytes
    try:
        name = rank_path(spool, rank, "sock").name
        reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{folder}/{name}")
    finally:
        os.close(folder)
    try:
        writer.write(_REQUEST.format(handler).encode())
        answer = bytearray()
        while chunk := await reader.read(1 << 16):
            answer += chunk
            if len(answer) > MAX_ANSWER:
                raise OSError(f"the answer has more than {MAX_ANSWER} bytes")
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    words = head.split(maxsplit=2)
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0, body


def group_states(recording: RecorderReading, about: RankGroups) -> tuple[GroupState, ...]:
    """Return how far a rank has come in each process group by its flight recorder, under names equal on all ranks."""
    entries: dict[str, list[RecordedCall]] = {}
    for entry in recording.entries:
        entries.setdefault(entry.group, []).append(entry)
    progress = {recording.names.get(number, ""): at for number, at in recording.progress.items()}
    states = []
    for torch_name in dict.fromkeys([*about.groups, *entries, *progress]):
        of_group = entries.get(torch_name, [])
        fallback = of_group[-1].description if of_group else torch_name
        name, ranks = about.groups.get(torch_name, (fallback, recording.members.get(torch_name, ())))
        known = [entry.sequence for entry in of_group if not entry.is_p2p]
        # Without entries (overwritten since) the group's own count is all there is; gloo's counts sends and receives.
        entered = max(known) if known else max(0, progress[torch_name].enqueued) if torch_name in progress else 0
        in_flight = [_call(entry) for entry in of_group if entry.is_in_flight][:MAX_CALLS]
        if torch_name:
            states.append(GroupState(name=name, ranks=ranks, entered=entered, in_flight=tuple(in_flight)))
    return tuple(states)


def _call(entry: RecordedCall) -> PendingCall:
    return PendingCall(
        op=entry.op, sequence=entry.sequence, is_p2p=entry.is_p2p, shapes=entry.input_shapes, state=entry.state
    )
