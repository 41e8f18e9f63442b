"""What a verdict and its parts are called in words."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from trainermon.agent.hang.evidence import (
    DEAD,
    ENDED,
    PendingCall,
    ProcessExit,
    RankEvidence,
    StackFrame,
    innermost_own,
    spans,
)

COMMUNICATION = (
    "/torch/distributed/",
    "/torch/nn/parallel/distributed.py",
    "/deepspeed/comm/",
    "/megatron/core/pipeline_parallel/p2p_communication.py",
)
_BACKWARD = ("_engine_run_backward", "/torch/autograd/graph.py")
MAX_NAMED = 8

# What a rank does, by what its main thread's stack leads through.
_ACTIVITIES = (
    ("/torch/utils/data/", "data-loader", "waits for its data loader"),
    ("/torch/distributed/checkpoint/", "checkpoint", "is busy with a checkpoint"),
    ("/torch/serialization.py", "checkpoint", "is busy with a checkpoint"),
    ("/torch/_inductor/", "compilation", "is compiling"),
    ("/torch/_dynamo/", "compilation", "is compiling"),
)


def cause_of(one: RankEvidence) -> tuple[str, str]:
    """Return what keeps a rank from joining the others, as (word for programs, clause for people)."""
    if one.life == DEAD:
        return "dead", (one.exit or ProcessExit()).text
    if one.life == ENDED:
        return "ended", "has ended its training"
    if one.is_stopped:
        return "stopped", "is stopped (SIGSTOP or a debugger)"
    at = in_place(where(one))
    if one.process_state == "D":
        return "uninterruptible", f"is in a system call that cannot be interrupted ({one.wchan or 'unknown'}){at}"
    files = [frame.file for frame in one.main_frames]
    known = (entry for entry in _ACTIVITIES if any(entry[0] in file for file in files))
    state = "busy" if one.process_state == "R" else "blocked"
    _, cause, text = next(known, ("", "running" if files else "unknown", f"is {state}"))
    return cause, text + (at or f" in phase {one.phase}, its stack is not known")


def communicates(one: RankEvidence) -> bool:
    """Return whether the rank's main thread is in a communication library, or sleeps in a backward (DDP's reducer)."""
    return _sleeps_in_backward(one) or any(
        part in frame.file for frame in one.main_frames[:2] for part in COMMUNICATION
    )


def _sleeps_in_backward(one: RankEvidence) -> bool:
    """Whether the main thread computes nothing in autograd's engine; Python code of a node's would have frames."""
    innermost = next(iter(one.main_frames), None)
    return (
        one.world_size > 1
        and one.process_state == "S"
        and innermost is not None
        and (innermost.function, innermost.file[-len(_BACKWARD[1]) :]) == _BACKWARD
    )


def where(one: RankEvidence) -> str:
    """Return the place in the user's code where a rank is, `f (file.py:12)`; "" if its stack is not known."""
    frame = innermost_own(one.main_frames)
    return f"{frame.function} ({frame.file}:{frame.line})" if frame else ""


def in_place(place: str) -> str:
    """Return ` in <place>` for a sentence; "" if `place` is empty."""
    return f" in {place}" if place else ""


def called(frames: Sequence[StackFrame]) -> str:
    """Return the name of the communication function that the script called, from its stack.

    That is the outermost of the innermost run of such frames.
    """
    name = "backward" if frames and frames[0].function == _BACKWARD[0] else ""
    for frame in frames:
        if not any(part in frame.file for part in COMMUNICATION):
            break
        if not frame.function.endswith("wrapper"):
            name = frame.function
    return name


def call_text(call: PendingCall, group: str) -> str:
    """Return the operation, its number and its process group in words: `all_reduce #12 of dp`."""
    return f"{call.op} #{call.sequence} of {group}"


def form_text(call: PendingCall) -> str:
    """Return an operation's name with the shapes of the tensors that the rank passed in: `all_reduce of 8×4`."""
    shapes = ", ".join("×".join(map(str, shape)) or "a scalar" for shape in call.shapes[:3])
    return f"{call.op} of {shapes}" if shapes else call.op


def they(ranks: Collection[int], verb: str) -> str:
    """Return `ranks` in words, followed by the verb in the singular or plural.

    >>> they([3], "waits"), they([0, 1], "has"), they([0, 1], "waits")
    ('rank 3 waits', 'ranks 0–1 have', 'ranks 0–1 wait')
    """
    several = {"has": "have", "is": "are"}.get(verb, verb.removesuffix("s"))
    return f"{spans(ranks)} {verb if len(set(ranks)) == 1 else several}"


def reasons(culprits: Iterable[tuple[int, str]], *, named: bool) -> str:
    """Return one clause on what all culprits do, each given as (rank, clause).

    `named`: the text before has just named them.
    """
    listed = list(culprits)
    if len({text for _, text in listed}) == 1:
        several = "each" if named else spans(rank for rank, _ in listed)
        return f"{'it' if named and len(listed) == 1 else several} {listed[0][1]}"
    return "; ".join(f"rank {rank} {text}" for rank, text in listed[:MAX_NAMED])
