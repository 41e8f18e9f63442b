"""When two runs' gradients part: msprobe's two limits, and how far chance alone takes a small tensor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from trainermon.analysis.gradients.similarity import SignSimilarity

LEAST_SHARE = 0.97
"""Below it the first step compared is a fault."""
MAX_FALL = 0.03
"""A larger fall from one step to the next is a fault."""
DEVIATIONS = 5.0
"""Beyond so many standard deviations of a share of n elements, no fall is chance: 1 in 3.5 million."""


@dataclasses.dataclass(frozen=True, slots=True)
class SignFault:
    """A parameter whose signs part, or that is finite in one run alone: where, from what to what.

    Attributes:
        similarity: The step and parameter.
        before: Its share in the step before; None at the first step compared.
    """

    similarity: SignSimilarity
    before: float | None


def faults_of(similarities: Iterable[SignSimilarity]) -> list[SignFault]:
    """Return every fault, in order of steps; of a step what is finite in one run alone, then the least similar.

    Two steps with n elements each and a share p of equal signs over both differ by chance with a deviation of
    sqrt(2 p (1 - p) / n) (the test of two proportions). A fall is a fault if it exceeds both `MAX_FALL` and
    `DEVIATIONS` of these. At the first step the share is held against `LEAST_SHARE`, which is
    no sample.
    """
    before: dict[tuple[str, int | None], float] = {}
    found = []
    for one in similarities:
        last = before.get((one.name, one.rank))
        if one.num_elements and _is_fault(one, last):
            found.append(SignFault(one, last))
        before[one.name, one.rank] = one.share
    return sorted(found, key=_place)


def _place(fault: SignFault) -> tuple[int, bool, float]:
    return fault.similarity.step, not fault.similarity.nonfinite, fault.similarity.share


def _is_fault(one: SignSimilarity, last: float | None) -> bool:
    if one.nonfinite:
        return True
    expected, allowed, num_samples = (LEAST_SHARE, 0.0, 1) if last is None else (last, MAX_FALL, 2)
    share = one.share
    if expected - share <= allowed:
        return False
    likely = (expected + share) / 2
    return expected - share > DEVIATIONS * math.sqrt(num_samples * likely * (1 - likely) / one.num_elements)


def headline(similarities: Sequence[SignSimilarity], faults: Sequence[SignFault], num_unmatched: int = 0) -> str:
    """Return one sentence: where the signs part first, or that they do not, and of how much nothing is known.

    >>> headline([], [])
    'nothing was compared'
    """
    if not similarities:
        return "nothing was compared"
    steps = sorted({one.step for one in similarities})
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    lowest = min(similarities, key=lambda one: one.share)
    if not faults:
        least = f"the least similar is {lowest.name}, {lowest.share:.2%} at step {lowest.step}"
        rest = f"; {num_unmatched:,} parameters or steps were not compared" if num_unmatched else ""
        if not all(one.knows_infinities for one in similarities):
            rest += "; signs alone do not tell whether gradients are infinite"
        return f"signs do not part in {span}; {least}{rest}"
    step = faults[0].similarity.step
    together = [fault for fault in faults if fault.similarity.step == step]
    others = [one for one in similarities if one.step == step and one not in {f.similarity for f in together}]
    worst = together[0].similarity
    rank = f" on rank {worst.rank}" if any(one.rank for one in similarities) else ""
    also = f" and {len(together) - 1} more" if len(together) > 1 else ""
    lowest_other = min((one.share for one in others), default=1.0)
    rest = f"; the others at least {lowest_other:.2%}" if lowest_other < 1 else "; the others 100%"
    if worst.nonfinite:
        return f"gradients part at step {step}: {worst.name}{rank}{also}: {worst.nonfinite}"
    return f"signs part at step {step}: {worst.name}{rank} {worst.share:.2%}{also}{rest if others else ''}"
