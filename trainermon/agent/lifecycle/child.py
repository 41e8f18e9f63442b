"""Runs a program beside the agent, for work that needs more memory than the agent may have."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence

NICE = 10
END_LIMIT_S = 2.0


async def output_of(command: Sequence[str], *, limit_s: float) -> bytes:
    """Run a program at low priority and return what it wrote to its standard output.

    It is killed where it takes longer than `limit_s`, and with the task that waits for it.

    Raises:
        asyncio.TimeoutError: It took longer.
        OSError: It could not be started, or its exit status was not 0; the message has its last word.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe)
    try:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
        output, said = await asyncio.wait_for(process.communicate(), limit_s)
    finally:
        if process.returncode is None:
            await _kill(process)
    if process.returncode != 0:
        last = said.decode(errors="replace").strip().rpartition("\n")[2]
        raise OSError(f"it ended with status {process.returncode}: {last}")
    return output


async def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    with contextlib.suppress(asyncio.TimeoutError):  # not even that ends a process that waits for a dead file system
        await asyncio.wait_for(process.wait(), END_LIMIT_S)
