"""Which of several ranks that have ended without a good-bye is the cause, and which only followed."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from trainermon.agent.hang.evidence import DEAD, Exit, RankEvidence, spans
from trainermon.agent.hang.verdict import Culprit, Hang, Kind

# What a communication library says when the rank at its other end has gone.
_PEER_IS_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "connection was closed",
    "remote process exited",
    "NCCL communicator was aborted",
    "Socket Timeout",
    "Timed out waiting",
    "Connection refused",
)
_MEMORY = ("out of memory", "OutOfMemoryError", "MemoryError", "bad_alloc")


def crash_verdict(evidence: Sequence[RankEvidence], order: Sequence[int]) -> Hang:
    """Return whose end was the cause: the first of those that ended for a reason of their own.

    `order` lists the dead ranks as they were seen to die. Killed by a signal other than the launcher's SIGTERM, or an
    exception that does not speak of a lost peer, is a reason of its own. Where a SIGTERM came before any of those, the
    ranks were stopped from outside, and none is to blame.
    """
    dead = [one for rank in order for one in evidence if one.rank == rank]
    worst = min(map(_class, dead), default=0)
    waiting = tuple(one.rank for one in evidence if one.life != DEAD)
    if dead and worst >= _FOLLOWED and _class(dead[0]) == _STOPPED:
        text = f"{spans(order)} ended by SIGTERM from outside (an operator, a scheduler, the launcher)"
        text += f" at step {dead[0].step} (phase {dead[0].phase})"
        return Hang(kind=Kind.DEAD, waiting=waiting, text=text)
    causes = [one for one in dead if _class(one) == worst]
    first = [one for one in causes if _same_end(one, causes[0])] if worst < _FOLLOWED else causes[:1]
    first.sort(key=lambda one: one.rank)
    culprits = tuple(Culprit(rank=one.rank, cause="dead", text=end_text(one)) for one in first)
    followed = [one.rank for one in dead if one not in first]
    alike = len({culprit.text for culprit in culprits}) == 1
    text = (
        f"{spans(one.rank for one in first)} {culprits[0].text}"
        if alike
        else "; ".join(f"rank {culprit.rank} {culprit.text}" for culprit in culprits[:8])
    )
    step = first[0].step if first else -1
    text += f" at step {step} (phase {first[0].phase})" if first else ""
    if followed:
        text += f"; {spans(followed)} ended after that"
    return Hang(kind=Kind.DEAD, culprits=culprits, waiting=waiting, text=text)


_FOLLOWED, _STOPPED = 2, 3


def _class(one: RankEvidence) -> int:
    """Return 0 for an end with a reason of its own, 1 for one that is not known, 2 for a lost peer, 3 for SIGTERM."""
    if one.exit is not None and one.exit.signal == signal.SIGTERM:
        return _STOPPED
    if any(text in one.error for text in _PEER_IS_GONE):
        return _FOLLOWED
    known = one.error or (one.exit and (one.exit.signal is not None or one.exit.status is not None))
    return 0 if known else 1


def _same_end(one: RankEvidence, first: RankEvidence) -> bool:
    """Whether two ranks failed alike at the same step, as by an error in the script that all ranks run."""
    return one is first or (
        bool(one.error) and one.step == first.step and last_line(one.error) == last_line(first.error)
    )


def end_text(one: RankEvidence) -> str:
    """Return in words how a rank ended."""
    if one.error:
        return f"failed: {last_line(one.error)}"
    return (one.exit or Exit()).text


def last_line(error: str) -> str:
    """Return the last line of a traceback that is no indented detail: the exception itself."""
    lines = [line for line in error.splitlines() if line.strip() and not line.startswith((" ", "\t"))]
    return lines[-1][:300] if lines else ""


def memory_hint(one: RankEvidence, *, oom_kills: int) -> str | None:
    """Return why lack of memory is the likely cause of a rank's end, None if it is not."""
    if any(text in one.error for text in _MEMORY):
        return f"rank {one.rank} says that it ran out of memory"
    if one.exit is None:
        return None
    if one.exit.signal == signal.SIGKILL and oom_kills:
        return f"the kernel has killed {oom_kills} processes on this node for lack of memory since the agent began"
    if one.exit.signal == signal.SIGBUS:
        return f"rank {one.rank} was killed by SIGBUS: often /dev/shm is full (its size in containers is 64 MB)"
    return None
