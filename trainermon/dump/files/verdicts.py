"""What is said of an operation whose result was not finite, and of a step that was run again. Standard library only."""

from __future__ import annotations

import dataclasses

from trainermon.core.values import TextEnum


class NonfiniteCause(TextEnum):
    """Why an operation's result was NaN or Inf.

    `inherited`: an input was NaN or Inf already. `range`: the true result does not fit any type. `precision`: float32
    would have been enough. `kernel`: the result fits its own type, so the device or the kernel is to blame. `unknown`:
    what was recorded does not tell.
    """

    INHERITED = "inherited"
    RANGE = "range"
    PRECISION = "precision"
    KERNEL = "kernel"
    UNKNOWN = "unknown"


class Reproducibility(TextEnum):
    """Whether a step that was run again (a replay) gave, bit for bit, what it had given in training.

    `reproducible`: it did. `not_reproducible`: it gave something else, because of a race, a kernel that is not
    deterministic, or a passing fault of the hardware. `stateful`: the forward changes something that was no longer as
    it had been in the step. `unknown`: it could not be compared.
    """

    REPRODUCIBLE = "reproducible"
    NOT_REPRODUCIBLE = "not_reproducible"
    STATEFUL = "stateful"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationVerdict:
    """Why the result of one operation was not finite, found by running the operation again.

    Attributes:
        operation: Torch's name (`aten.exp.default`), or the key of a dumped call.
        cause: `inherited` (an input was already not finite), `range` (float64 is not finite either, or no wider type
            than float64 holds the result), `precision` (float32 would have sufficed), `kernel` (the result fits its own
            type: the device or the kernel is to blame), or `unknown`.
        reason: The cause in a sentence.
        call: Key of the innermost module call around it; "": the model's own forward.
        direction: `forward` or `backward`.
        micro_step: Number of the forward and backward within the step, from 0; None: not known.
        stage: Number of the virtual pipeline stage.
        source: The line of the script that ran it.
        evidence: What the verdict rests on.
        collect: For `unknown`, what one would have to record to find out.
        is_mask: It gave minus infinity, perhaps on purpose, of which nothing worse came.
    """

    operation: str
    cause: NonfiniteCause
    reason: str
    call: str = ""
    direction: str = "forward"
    micro_step: int | None = None
    stage: int = 0
    source: str = ""
    evidence: str = ""
    collect: str = ""
    is_mask: bool = False
