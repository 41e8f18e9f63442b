"""Climbs the evidence ladder for one rank, from what costs it nothing to what it could notice; every rung is bounded.

control page → own notes of calls → flight recorder → /proc → py-spy → a signal, only if py-spy gave no stacks
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from trainermon.agent.hang.evidence import ChildProcess, GroupState, RankAnswer, RankEvidence, ThreadStack
from trainermon.agent.hang.process import child_pids, read_process
from trainermon.agent.hang.recorder import RankGroups, read_about, read_recorder
from trainermon.agent.hang.sources import noted_groups, read_notes
from trainermon.agent.hang.stacks import find_py_spy, parse_faulthandler, stacks_by_py_spy, stacks_by_signal
from trainermon.core.config import HangConfig
from trainermon.core.spool import rank_path

RECORDER_LIMIT_S = 3.0
PY_SPY_LIMIT_S = 5.0
SIGNAL_LIMIT_S = 2.0
MAX_CHILD_STACKS = 4
MAX_TOGETHER = 16

T = TypeVar("T")


class EvidenceLadder:
    """Collects evidence on ranks that hang, from cheap ways to costly ones: flight recorder, stacks, child processes.

    Args:
        spool: Where the ranks are.
        settings: Which ways are allowed.
    """

    def __init__(self, spool: Path, settings: HangConfig) -> None:
        self._spool = spool
        self._settings = settings
        self._py_spy = find_py_spy() if settings.py_spy else None
        self._together = asyncio.Semaphore(MAX_TOGETHER)

    async def climb(self, known: RankEvidence) -> RankEvidence:
        """Ask a living rank in every allowed way; return `known` with what it answered added.

        Takes 10 s at most; sixteen ranks are asked at a time.
        """
        async with self._together:
            return await self._climb(known)

    async def _climb(self, known: RankEvidence) -> RankEvidence:
        rungs = [RankAnswer(name="control page", said=f"phase {known.phase}, step {known.step}", answered=True)]
        about = read_about(self._spool, known.rank)
        process = read_process(known.pid) if known.pid else None
        state = process.state if process else ""
        evidence = dataclasses.replace(known, process_state=state, wchan=process.wchan if process else "")
        rungs.append(_process_rung(evidence))
        noted = noted_groups(read_notes(known.pid, about), about, known.rank)
        rungs.append(_notes_rung(known, noted))
        groups = None
        if evidence.is_stopped:  # no thread of it can answer; a signal would only wait for it to go on
            rungs.append(RankAnswer(name="flight recorder", said="not asked: the process is stopped"))
        elif self._settings.recorder:
            asked = read_recorder(self._spool, known.rank, about, limit_s=RECORDER_LIMIT_S)
            groups = await _try(rungs, "flight recorder", asked, lambda found: f"{len(found)} groups")
        stacks = await self._stacks(evidence, about, rungs)
        children = await self._children(known.pid)
        return dataclasses.replace(
            evidence, groups=groups, noted=noted, stacks=stacks, children=children, rungs=tuple(rungs)
        )

    def last_words(self, known: RankEvidence, notes: bytes) -> RankEvidence:
        """Return `known` with the stacks added that the rank wrote when a fatal error killed it, and what it noted.

        `notes` are its notes of collectives, empty if there are none.
        """
        about = read_about(self._spool, known.rank)
        text = ""
        with contextlib.suppress(OSError):
            text = rank_path(self._spool, known.rank, "stacks").read_text(encoding="utf-8", errors="replace")
        stacks: tuple[ThreadStack, ...] = ()
        if "Fatal Python error" in text:
            stacks = parse_faulthandler(text, about.main_thread)
        said = f"{len(stacks)} threads" if stacks else "nothing written"
        rungs = (RankAnswer(name="fatal error handler", said=said, answered=bool(stacks)),)
        noted = noted_groups(notes, about, known.rank)
        return dataclasses.replace(known, stacks=stacks, noted=noted, rungs=rungs)

    async def _stacks(self, known: RankEvidence, about: RankGroups, rungs: list[RankAnswer]) -> tuple[ThreadStack, ...]:
        if not known.pid:
            return ()
        if self._py_spy:
            asked = stacks_by_py_spy(self._py_spy, known.pid, limit_s=PY_SPY_LIMIT_S)
            found = await _try(rungs, "py-spy", asked, _count_threads)
            if found and found[0].frames:
                return found
        elif self._settings.py_spy:
            rungs.append(RankAnswer(name="py-spy", said="not installed"))
        if known.is_stopped or not about.signal or not self._settings.stacks:
            return ()
        signalled = stacks_by_signal(
            known.pid,
            number=about.signal,
            path=rank_path(self._spool, known.rank, "stacks"),
            main_thread=about.main_thread,
            limit_s=SIGNAL_LIMIT_S,
        )
        return await _try(rungs, "signal", signalled, _count_threads) or ()

    async def _children(self, pid: int) -> tuple[ChildProcess, ...]:
        found: list[ChildProcess] = []
        for child in child_pids(pid) if pid else ():
            process = read_process(child)
            if process is None:
                continue
            stacks: tuple[ThreadStack, ...] = ()
            if self._py_spy and len(found) < MAX_CHILD_STACKS:
                with contextlib.suppress(OSError, asyncio.TimeoutError):
                    stacks = await stacks_by_py_spy(self._py_spy, child, limit_s=1.0)
            found.append(ChildProcess(pid=child, name=process.name, state=process.state, stacks=stacks))
        return tuple(found)


async def _try(rungs: list[RankAnswer], name: str, asked: Awaitable[T], tell: Callable[[T], str]) -> T | None:
    began_s = time.monotonic()
    try:
        found = await asked
    except asyncio.TimeoutError:
        rungs.append(RankAnswer(name=name, said=f"no answer within {time.monotonic() - began_s:.1f} s"))
        return None
    except OSError as error:
        rungs.append(RankAnswer(name=name, said=str(error) or type(error).__name__))
        return None
    took_ms = 1e3 * (time.monotonic() - began_s)
    rungs.append(RankAnswer(name=name, said=f"{tell(found)}, {took_ms:.0f} ms", answered=True))
    return found


def _count_threads(stacks: tuple[ThreadStack, ...]) -> str:
    return f"{len(stacks)} threads"


def _process_rung(known: RankEvidence) -> RankAnswer:
    if not known.pid:
        return RankAnswer(name="/proc", said="the rank lives in another pid namespace")
    if not known.process_state:
        return RankAnswer(name="/proc", said=f"pid {known.pid} cannot be seen")
    where = f" in {known.wchan}" if known.wchan else ""
    return RankAnswer(name="/proc", said=f"pid {known.pid}, state {known.process_state}{where}", answered=True)


def _notes_rung(known: RankEvidence, noted: tuple[GroupState, ...] | None) -> RankAnswer:
    if noted is not None:
        return RankAnswer(name="own notes", said=f"{len(noted)} groups", answered=True)
    return RankAnswer(
        name="own notes", said="none to be read" if known.pid else "the rank lives in another pid namespace"
    )
