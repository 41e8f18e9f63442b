"""Python stacks of a rank: from py-spy, or as faulthandler writes them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainermon.agent.hang.evidence import StackFrame, ThreadStack
from trainermon.agent.hang.process import handles_signal
from trainermon.agent.lifecycle.child import output_of

MAX_THREADS = 64
MAX_FRAMES = 100
MAX_TEXT = 1 << 20
POLL_S = 0.02

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[([^\]]*)\])? \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def find_py_spy() -> str | None:
    """Return the path of the program py-spy (which reads Python stacks of other processes); None if not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


async def stacks_by_py_spy(program: str, pid: int, *, limit_s: float) -> tuple[ThreadStack, ...]:
    """Read the Python stacks of all threads of process `pid` with py-spy, without stopping it; never local variables.

    Raises:
        OSError: Not allowed, or the process is no Python.
        asyncio.TimeoutError: It took longer than `limit_s` seconds.
    """
    output = await output_of([program, "dump", "--nonblocking", "--json", "--pid", str(pid)], limit_s=limit_s)
    return parse_py_spy(output, pid)


def parse_py_spy(output: bytes, pid: int) -> tuple[ThreadStack, ...]:
    """Return the stacks in what `py-spy dump --json` writes, the main thread's first.

    Raises:
        OSError: It is something else.
    """
    try:
        stacks = [_stack_of(thread, pid) for thread in json.loads(output)]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise OSError(f"py-spy wrote something else than stacks: {error!r}") from error
    return _ordered(stacks)


async def stacks_by_signal(
    pid: int, *, number: int, path: Path, main_thread: int, limit_s: float
) -> tuple[ThreadStack, ...]:
    """Make a process write its stacks by sending it a signal, and return them.

    The signal goes only to a process that handles it. faulthandler asks for interrupted system calls to go on; a few,
    such as a sleep in C, end early all the same: this is for processes of which it is certain that they stand still.

    Raises:
        OSError: The process does not handle the signal, is gone, or has written nothing within `limit_s`.
    """
    descriptor = os.pidfd_open(pid)  # from here on nobody else can be meant
    try:
        if not handles_signal(pid, number):
            raise OSError(f"the process does not handle signal {number}")
        written = path.stat().st_size
        signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)
    deadline_s = asyncio.get_running_loop().time() + limit_s
    text = ""
    while asyncio.get_running_loop().time() < deadline_s:
        await asyncio.sleep(POLL_S)
        before, text = text, _read_from(path, written)
        if text and text == before:
            return parse_faulthandler(text, main_thread)
    raise OSError(f"nothing was written within {limit_s:g} s")


def parse_faulthandler(text: str, main_thread: int) -> tuple[ThreadStack, ...]:
    """Return the stacks in the last traceback that faulthandler wrote, the main thread's first.

    `main_thread` is its identifier in the process; where it does not appear, the last thread is taken for it.
    """
    stacks: list[tuple[int, str, list[StackFrame]]] = []
    for line in text.splitlines():
        thread, frame = _THREAD.match(line), _FRAME.match(line)
        if line.startswith("Fatal Python error") and stacks:
            stacks = []
        elif thread:
            stacks.append((int(thread[1], 16), thread[2] or f"0x{int(thread[1], 16):x}", []))
        elif frame and stacks and len(stacks[-1][2]) < MAX_FRAMES:
            stacks[-1][2].append(StackFrame(function=frame[3], file=frame[1], line=int(frame[2])))
    identifiers = [identifier for identifier, _, _ in stacks]
    main = main_thread if main_thread in identifiers else identifiers[-1] if identifiers else 0
    return _ordered(
        [
            ThreadStack(thread=name, is_main=identifier == main, frames=tuple(frames))
            for identifier, name, frames in stacks
        ]
    )


def _stack_of(thread: dict[str, Any], pid: int) -> ThreadStack:
    frames = tuple(
        StackFrame(function=str(frame["name"]), file=str(frame["filename"]), line=int(frame["line"]))
        for frame in thread["frames"][:MAX_FRAMES]
    )
    name = thread.get("thread_name") or f"0x{int(thread['thread_id']):x}"
    return ThreadStack(
        thread=str(name), is_main=thread.get("os_thread_id") == pid or name == "MainThread", frames=frames
    )


def _ordered(stacks: Sequence[ThreadStack]) -> tuple[ThreadStack, ...]:
    return tuple(sorted(stacks, key=lambda stack: not stack.is_main)[:MAX_THREADS])


def _read_from(path: Path, offset: int) -> str:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(MAX_TEXT).decode(errors="replace")
