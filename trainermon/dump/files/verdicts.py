"""What is said of an operation whose result was not finite, and of a step that was run again. Standard library only."""

from __future__ import annotations

import dataclasses
import enum


class NonfiniteCause(str, enum.Enum):
    """The cause of an operation's result that is not finite."""

    INHERITED = "inherited"
    RANGE = "range"
    PRECISION = "precision"
    KERNEL = "kernel"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


class Reproducibility(str, enum.Enum):
    """The verdict on a step that was run again: whether it gave what it had given."""

    REPRODUCIBLE = "reproducible"
    NOT_REPRODUCIBLE = "not_reproducible"
    STATEFUL = "stateful"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationVerdict:
    """Why the result of one operation was not finite.

    `cause` is `inherited` (an input was not finite already), `range` (float64 is not finite either, or no wider type
    than float64 holds the result), `precision` (float32 would have sufficed), `kernel` (the result fits its own type:
    the device or the kernel is to blame) or `unknown`; then `collect` says what would tell. `operation` is torch's name
    (`aten.exp.default`) or the key of a dumped call, `call` the key of the innermost module call around it ("": the
    model's own forward), `source` the line of the script that ran it. `evidence` says what the verdict rests on.
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
