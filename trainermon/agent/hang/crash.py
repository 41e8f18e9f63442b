"""Which of several ranks that have ended without a good-bye is the cause, and which only followed."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Sequence

from trainermon.agent.hang.evidence import DEAD, ENDED, ProcessExit, RankEvidence, spans
from trainermon.agent.hang.misfits import misfit_text
from trainermon.agent.hang.verdict import Culprit, HangVerdict, StandstillKind

# What a communication library says when the rank at its other end has gone.
_PEER_IS_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "connection was closed",
    "remote process exited",
    "NCCL communicator was aborted",
    "Application timeout caused pair closure",
    "failed to recv, got 0 bytes",
    "Socket Timeout",
    "Timed out waiting",
    "Connection refused",
)
_TRACEBACK = re.compile(r"(Original )?Traceback \(most recent call last\)")
_EXIT = re.compile(r"SystemExit: (-?\d+)")
_MEMORY = ("out of memory", "OutOfMemoryError", "MemoryError", "bad_alloc")


def crash_verdict(
    evidence: Sequence[RankEvidence], order: Sequence[int], *, unordered: Collection[int] = ()
) -> HangVerdict:
    """Return whose end was the cause: the first of those that ended for a reason of their own.

    `order` lists the dead ranks as they were seen to die. Of exceptions the first is the one that was raised first, as
    a process may take long to end. Killed by a signal other than the launcher's SIGTERM, or an
    exception that does not speak of a lost peer, is a reason of its own. An exit status alone, and an abort, may be
    either. Where a SIGTERM or an interruption came before any of those, the ranks were stopped, and none is to blame.
    Where all have only lost a peer, it is one that has ended its training before them. Of the ranks in `unordered`
    nobody has seen who was first: if nothing else tells them apart, none is to blame.
    """
    dead = [one for rank in order for one in evidence if one.rank == rank]
    worst = min(map(_class, dead), default=0)
    waiting = tuple(one.rank for one in evidence if one.life != DEAD)
    if dead and worst >= _FOLLOWED and _class(dead[0]) == _STOPPED:
        text = f"{spans(order)} {_INTERRUPTED if any(map(_is_interrupted, dead)) else _STOPPED_TEXT}"
        text += f" at step {dead[0].step} (phase {dead[0].phase})"
        return HangVerdict(kind=StandstillKind.DEAD, waiting=waiting, text=text)
    left = _left_before(evidence, dead) if worst == _FOLLOWED else ()
    if left:
        return _left_verdict(left, dead)
    causes = _as_raised([one for one in dead if _class(one) == worst])
    tied = [one for one in causes if one.rank in unordered]
    if worst == _UNEXPLAINED and len(tied) > 1 and causes[0] in tied:
        return HangVerdict(kind=StandstillKind.DEAD, waiting=waiting, text=_unseen_text(tied))
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
    misfit = misfit_text(evidence)
    if followed:
        text += f"; {spans(followed)} ended after that"
    if misfit:
        text += f"; {misfit}"
    return HangVerdict(kind=StandstillKind.DEAD, culprits=culprits, waiting=waiting, text=text)


def _unseen_text(dead: Sequence[RankEvidence]) -> str:
    text = f"{spans(one.rank for one in dead)} ended before anybody looked, without closing the monitor"
    return f"{text}, at step {dead[0].step}; which was first is not known here: see the launcher's log"


def _as_raised(causes: Sequence[RankEvidence]) -> list[RankEvidence]:
    """Return ranks in the order in which their exceptions were raised, if that is known of all; else as they came."""
    return sorted(causes, key=lambda one: one.failed_s) if all(one.failed_s > 0 for one in causes) else list(causes)


_STOPPED_TEXT = "ended by SIGTERM from outside (an operator, a scheduler, the launcher)"
_INTERRUPTED = "interrupted by Ctrl-C or SIGINT"

STOPPED, INTERRUPTED, KILLED, FAILED, CRASHED = ENDS = ("stopped", "interrupted", "killed", "failed", "crashed")
"""How a training ended that did not finish; of several ranks, the most telling comes last."""


def end_of(message: str) -> str:
    """Return in a word how the ranks ended of which an alert says `message`, as `crash_verdict` puts it.

    >>> end_of("rank-dead: rank 0 was killed by SIGKILL at step 31 (phase step)")
    'killed'
    """
    if _STOPPED_TEXT in message:
        return STOPPED
    if _INTERRUPTED in message:
        return INTERRUPTED
    if " failed: " in message or " failed with status " in message:
        return FAILED
    return KILLED if "was killed by SIGKILL" in message or "was killed by SIGTERM" in message else CRASHED


_OWN, _UNEXPLAINED, _FOLLOWED, _STOPPED = range(4)


def _class(one: RankEvidence) -> int:
    """Return for what kind of reason a rank has ended, the best cause first."""
    number = one.exit.signal if one.exit else None
    if number == signal.SIGTERM or _is_interrupted(one):
        return _STOPPED
    if any(text in one.error for text in _PEER_IS_GONE):
        return _FOLLOWED
    # A library aborts the process whose connection is lost where no Python could tell.
    return _OWN if one.error or number not in (None, signal.SIGABRT) else _UNEXPLAINED


def _is_interrupted(one: RankEvidence) -> bool:
    by_signal = not one.error and one.exit is not None and one.exit.signal == signal.SIGINT
    return by_signal or exception_line(one.error).partition(":")[0] == "KeyboardInterrupt"


def _left_before(evidence: Sequence[RankEvidence], dead: Sequence[RankEvidence]) -> tuple[RankEvidence, ...]:
    """Return the ranks that had ended their training when the others lost them; those with an error status first."""
    step = min(one.step for one in dead)
    ended = tuple(one for one in evidence if one.life == ENDED and one.step <= step)
    return tuple(one for one in ended if one.exit and one.exit.status) or ended


def _left_verdict(left: Sequence[RankEvidence], dead: Sequence[RankEvidence]) -> HangVerdict:
    text = f"{spans(one.rank for one in left)} ended before the others, at step {left[0].step}"
    if left[0].exit and left[0].exit.status is not None:
        text += f", with exit status {left[0].exit.status}"
    culprits = tuple(Culprit(rank=one.rank, cause="ended", text="ended before the others") for one in left)
    return HangVerdict(
        kind=StandstillKind.DEAD,
        culprits=culprits,
        text=f"{text}; {spans(one.rank for one in dead)} lost the connection",
    )


def _same_end(one: RankEvidence, first: RankEvidence) -> bool:
    """Whether two ranks failed alike at the same step, as by an error in the script that all ranks run."""
    return one is first or (
        bool(one.error) and one.step == first.step and exception_line(one.error) == exception_line(first.error)
    )


def end_text(one: RankEvidence) -> str:
    """Return in words how a rank's process ended: by which signal, exit status or exception."""
    said = exception_line(one.error)
    status = _EXIT.fullmatch(said)
    if status:
        return f"failed with status {status[1]}"
    if one.error:
        return f"failed: {said}"
    if one.phase == "closed" and one.exit is not None and one.exit.status:
        return f"failed with status {one.exit.status}"
    return (one.exit or ProcessExit()).text


def exception_line(error: str) -> str:
    """Return the exception itself: the first line behind the frames of the last traceback; "" without any line.

    A message may have many lines, and end with what is no part of a sentence. Where no traceback has its usual head,
    it is the last line that is not an indented detail.
    """
    lines = [line for line in error.splitlines() if line.strip() and not line.startswith((" ", "\t"))]
    heads = [place for place, line in enumerate(lines) if _TRACEBACK.match(line)]
    behind = lines[heads[-1] + 1 :][:1] if heads else lines[-1:]
    return behind[0][:300] if behind else ""


def memory_hint(one: RankEvidence, *, oom_kills: int) -> str | None:
    """Return a sentence on why lack of memory is the likely cause of a rank's end; None if it is not.

    `oom_kills` is how many processes the kernel has killed on the node for lack of memory meanwhile.
    """
    if any(text in one.error for text in _MEMORY):
        return f"rank {one.rank} says that it ran out of memory"
    if one.exit is None:
        return None
    if one.exit.signal == signal.SIGKILL and oom_kills:
        return f"the kernel has killed {oom_kills} processes on this node for lack of memory since the agent began"
    if one.exit.signal == signal.SIGBUS:
        return f"rank {one.rank} was killed by SIGBUS: often /dev/shm is full (its size in containers is 64 MB)"
    return None
