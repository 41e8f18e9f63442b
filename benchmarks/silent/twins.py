"""Whether the silent errors are real: each case beside its twin, without the monitor.

    python -m benchmarks.silent.twins --part ddp          # all cases of a framework
    python -m benchmarks.silent.twins --case ddp-NAME     # one; repeatable

Says of each from which step on its weights differ from the twin's, on which ranks, and which ranks agree with each
other. The status is 1 if a case is not as it says: the weights never differ, or not from its first wrong step or the
one after it on; a loss is not finite; the twin has no finite loss.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.silent.case import FRAMEWORKS, SilentCase, all_cases
from benchmarks.silent.judge import LATER, train, written_by_ranks


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What became of one variant of a case.

    Attributes:
        losses: By rank and step.
        digests: Of the weights after each step, by rank and step.
    """

    losses: Sequence[Sequence[float]]
    digests: Sequence[Sequence[str]]

    @property
    def is_finite(self) -> bool:
        """Whether all losses are."""
        return all(math.isfinite(loss) for rank in self.losses for loss in rank)

    @property
    def apart(self) -> int | None:
        """The first step after which two ranks' weights differ; shards always do."""
        return next((i for i, each in enumerate(zip(*self.digests, strict=True)) if len(set(each)) > 1), None)


def main() -> int:
    arguments = _parse()
    is_as_said = True
    for case in all_cases().values():
        if case.name in (arguments.case or [case.name]) and arguments.part in (None, case.framework):
            is_as_said &= _tried(case)
    return int(not is_as_said)


def _tried(case: SilentCase) -> bool:
    began_s = time.perf_counter()
    try:
        found = trained(case)
    except AssertionError as error:
        print(f"{case.name}: {str(error)[-1500:]}", flush=True)
        return False
    problems = list(problems_of(case, found))
    took_s = time.perf_counter() - began_s
    print(f"{case.name} ({took_s:.0f} s): {_said(found)}; {'; '.join(problems) or 'as it says'}", flush=True)
    return not problems


def trained(case: SilentCase) -> Mapping[str, Weights]:
    """Train a case and its twin; a healthy program has no other variant."""
    variants = ("healthy",) if case.mechanism is None else ("healthy", "broken")
    found = {}
    with tempfile.TemporaryDirectory(prefix="twins-") as scratch:
        for variant in variants:
            train(case, folder := Path(scratch, variant), "unwatched")
            found[variant] = _weights(written_by_ranks(folder, case))
    return found


def _weights(parts: Sequence[Sequence[Mapping[str, Any]]]) -> Weights:
    by_rank = list(zip(*parts, strict=True))
    losses = [[loss for part in rank for loss in part["losses"]] for rank in by_rank]
    return Weights(losses=losses, digests=[[each for part in rank for each in part["after_steps"]] for rank in by_rank])


def first_difference(found: Mapping[str, Weights]) -> tuple[int | None, list[int]]:
    """Return the first step after which weights differ from the twin's, and the ranks on which they do."""
    pairs = zip(found["healthy"].digests, found["broken"].digests, strict=True)
    firsts = [next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), None) for pair in pairs]
    if not (steps := [step for step in firsts if step is not None]):
        return None, []
    return min(steps), [rank for rank, step in enumerate(firsts) if step == min(steps)]


def problems_of(case: SilentCase, found: Mapping[str, Weights]) -> Iterator[str]:
    """Yield in which respects the case is not as it says."""
    yield from (f"{variant}: a loss is not finite" for variant, weights in found.items() if not weights.is_finite)
    if "broken" in found:
        step, _ = first_difference(found)
        if step is None:
            yield "the weights are those of the twin"
        elif not case.first_wrong <= step <= case.first_wrong + LATER:
            yield f"first wrong in step {case.first_wrong}, it says"


def _said(found: Mapping[str, Weights]) -> str:
    lines = []
    if "broken" in found:
        step, ranks = first_difference(found)
        lines.append(f"differs from step {step} on, ranks {ranks}")
    for variant, weights in found.items():
        means = [sum(step) / len(step) for step in zip(*weights.losses, strict=True)]
        apart = "" if len(weights.digests) == 1 else f", ranks apart from step {weights.apart}"
        lines.append(f"{variant} loss {sum(means[:5]) / 5:.3f} → {sum(means[-5:]) / 5:.3f}{apart}")
    return "; ".join(lines)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(FRAMEWORKS), help="only this framework")
    parser.add_argument("--case", action="append", help="only this case; repeatable")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
