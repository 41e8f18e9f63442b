"""What is known of one rank that stands still or has died: the value that agents hand to one another.

Everything is plain text and numbers, so that the controller can join the evidence of all nodes (`parse_evidence`) and
ask `verdict` for one answer.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainermon.core.strict import build

RUNNING = "running"
ENDED = "ended"
DEAD = "dead"
STOPPED_STATES = frozenset("Tt")

# Around a call of somebody else's, whose C++ code has no frame of its own.
_HANDS_ON = "/trainermon/hooks/patch.py"
_PEER = re.compile(r"(?:send|recv) \d+(?:->|<-)(\d+)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PendingCall:
    """A collective, or a send or receive, that a rank has begun and that is not complete.

    Attributes:
        op: Its name in torch's flight recorder (`all_reduce`).
        sequence: Its number in its group, from 1; sends and receives have numbers of their own.
        is_p2p: Whether it is a send or a receive.
        shapes: Shapes of the tensors that the rank passed in.
        state: `scheduled`, or `started` where the recorder sees the device begin it.
    """

    op: str
    sequence: int
    is_p2p: bool = False
    shapes: tuple[tuple[int, ...], ...] = ()
    state: str = "scheduled"

    @property
    def peer(self) -> int | None:
        """Number in the group of the rank at the other end, if the recorder tells (NCCL's does)."""
        found = _PEER.fullmatch(self.op) if self.is_p2p else None
        return int(found[1]) if found else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """How far the rank has come in one of its process groups.

    Attributes:
        name: Purpose of the group, the same on all its ranks (`world`, `dp`, `tp-2`).
        ranks: Global ranks of its members in their order; empty if not known.
        entered: Number of the last collective that the rank has entered; 0 before the first.
        in_flight: What it has begun and not completed, oldest first.
        failed: What ended with an exception, if nothing of the group came after that.
    """

    name: str
    ranks: tuple[int, ...] = ()
    entered: int = 0
    in_flight: tuple[PendingCall, ...] = ()
    failed: tuple[PendingCall, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackFrame:
    """One line of a Python stack: the function, its source file, and the number of the line in it."""

    function: str
    file: str
    line: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ThreadStack:
    """A thread's Python stack.

    Attributes:
        thread: Name of the thread.
        is_main: Whether it is the main thread.
        frames: Innermost first.
    """

    thread: str
    is_main: bool
    frames: tuple[StackFrame, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
    """How a process ended: by a signal, or with an exit status; both None if nobody was there to see it."""

    signal: int | None = None
    status: int | None = None

    @property
    def text(self) -> str:
        """How the process ended, in words."""
        if self.signal is not None:
            return f"was killed by {signal_name(self.signal)}"
        if self.status is not None:
            return f"ended with exit status {self.status}"
        return "ended without closing the monitor (exit status not known here)"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankAnswer:
    """What came of one way to look into a rank that hangs.

    Attributes:
        name: The way: flight recorder, py-spy …
        said: "answered" and how, or why not.
        answered: Whether it did.
    """

    name: str
    said: str
    answered: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChildProcess:
    """A process that the rank has started, as a data loader's worker.

    Attributes:
        pid: Its process id.
        name: Its name.
        state: The kernel's letter: R running, S sleeping, D uninterruptible, T stopped, Z ended.
        stacks: Its Python stacks; empty if none could be had.
    """

    pid: int
    name: str
    state: str
    stacks: tuple[ThreadStack, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankEvidence:
    """Everything that is known of one rank.

    Attributes:
        rank: Global rank.
        world_size: Ranks of the job.
        host: Node.
        attempt: Of the run.
        pid: As the agent sees it; 0 if the rank lives in another pid namespace, or has gone.
        life: `running`, `ended` (closed in good order) or `dead`.
        phase: What it said last that it was doing.
        step: On which step.
        silent_s: For how long its heartbeat has not moved, by the agent's clock.
        limit_s: For how long it may be silent in this phase; infinite limits are 0.
        process_state: The kernel's letter: R, S, D (uninterruptible), T (stopped), Z; "" if not known.
        wchan: Where in the kernel its main thread waits, "" if it does not or is not told.
        groups: Its process groups; None if the flight recorder did not answer.
        noted: The same as the rank itself has noted it, from Python's calls alone; None if it keeps no notes.
        stacks: Python stacks, the main thread's first; empty if none could be had.
        children: Processes that it has started.
        exit: How it ended, if it has.
        error: The exception that ended its script, as Python prints it; "" if none is known.
        failed_s: When it was raised, Unix time by the rank's clock; 0: not known.
        rungs: What came of each way to look at it.
    """

    rank: int
    world_size: int = 1
    host: str = ""
    attempt: int = 0
    pid: int = 0
    life: str = RUNNING
    phase: str = "step"
    step: int = -1
    silent_s: float = 0.0
    limit_s: float = 0.0
    process_state: str = ""
    wchan: str = ""
    groups: tuple[GroupState, ...] | None = None
    noted: tuple[GroupState, ...] | None = None
    stacks: tuple[ThreadStack, ...] = ()
    children: tuple[ChildProcess, ...] = ()
    exit: ProcessExit | None = None
    error: str = ""
    failed_s: float = 0.0
    rungs: tuple[RankAnswer, ...] = ()

    @property
    def main_frames(self) -> tuple[StackFrame, ...]:
        """The main thread's Python stack, innermost frame first, without wrappers that only call on.

        Empty if not known.
        """
        frames = next((stack.frames for stack in self.stacks if stack.is_main), ())
        return tuple(itertools.dropwhile(lambda frame: frame.file.endswith(_HANDS_ON), frames))

    @property
    def is_stopped(self) -> bool:
        """Whether the process was stopped by a signal or a debugger."""
        return self.life == RUNNING and self.process_state in STOPPED_STATES


def parse_evidence(plain: Mapping[str, Any]) -> RankEvidence:
    """Parse the evidence on a rank that another agent sent as JSON (made with `as_plain`).

    Raises:
        ConfigError: It is not one.
    """
    return build(RankEvidence, plain)


def signal_name(number: int) -> str:
    """Return the name of a signal.

    >>> signal_name(9), signal_name(63)
    ('SIGKILL', 'signal 63')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def spans(ranks: Iterable[int], *, most: int | None = None) -> str:
    """Return ranks in words, as few as possible; of more than `most` parts the first ones, and how many are left out.

    >>> spans([3]), spans([0, 1]), spans([5, 0, 1, 2, 9]), spans([5, 0, 1, 2, 9], most=1)
    ('rank 3', 'ranks 0–1', 'ranks 0–2, 5, 9', 'ranks 0–2 and 2 more')
    """
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = runs[:most]
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in shown)
    num_left = len(ordered) - sum(map(len, shown))
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {text}{f' and {num_left:,} more' if num_left else ''}"


def innermost_own(frames: Sequence[StackFrame]) -> StackFrame | None:
    """Return the innermost frame that is the user's own code, else the innermost of all; None without frames."""
    own = (frame for frame in frames if not is_library(frame.file))
    return next(own, frames[0] if frames else None)


def is_library(file: str) -> bool:
    """Whether a source file belongs to the standard library or to an installed package."""
    return file.startswith("<") or any(
        part in file
        for part in ("/site-packages/", "/dist-packages/", "/lib/python3", "/lib64/python3", "/trainermon/")
    )
