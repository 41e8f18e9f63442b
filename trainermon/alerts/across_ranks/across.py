"""Compares the ranks of a node step by step: which steps are complete, and who is whose peer.

Ranks come to a step at different times. It is compared when every rank of the node that lives has shown it. How long
the others wait for one that is behind depends on the rule. Who is slow is told soon: after 16 later steps nobody is
waited for, and never longer for a rank that has not even begun. Copies that must be equal are compared however far
ranks are apart, as ranks that no longer reduce their gradients have nothing that holds them together; only memory
bounds that. What a rank shows of a step after it was compared is not looked at. What the comparison says is decided in
`comparisons`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainermon.alerts.across_ranks.comparing import ComparedSeries, ComparisonMemory
from trainermon.alerts.across_ranks.comparisons import make_comparison
from trainermon.alerts.across_ranks.peers import PeerPart
from trainermon.alerts.across_ranks.uneven import UnevenRanks
from trainermon.alerts.batch import TakenStep
from trainermon.alerts.conditions.contained import ConditionFaults
from trainermon.alerts.rules import AlertRule

if TYPE_CHECKING:
    from trainermon.alerts.rows import RuleRows
    from trainermon.core.journal import Header

MAX_OPEN_STEPS = 16
MAX_OPEN_BYTES = 32 << 20


class ComparedRank(NamedTuple):
    """What a comparison of ranks has found about one rank on one step.

    Attributes:
        part: What was compared of it.
        step: The step that was compared; the rank may be further by now.
        found: What the comparison says.
    """

    part: PeerPart
    step: int
    found: ComparedSeries

    def apply(self) -> None:
        """Update the rank's rule by this result: alerts may begin or end."""
        found = self.found
        self.part.watch.update(found.slots, found.verdict, found.moments, found.baseline, self.step)


class ComparedStep(NamedTuple):
    """A step that is complete for some of the rules.

    Attributes:
        step: Its number.
        ranks: The ranks that have shown it.
        rules: The names of these rules.
        found: What was found, rule by rule; nothing is computed ahead, as states of ranks change meanwhile.
    """

    step: int
    ranks: Sequence[int]
    rules: Collection[str]
    found: Iterator[ComparedRank]


class AcrossRanks:
    """Evaluates the rules that compare ranks with each other, over all ranks that one agent sees.

    Args:
        rules: Of any kind; those that look at one rank alone are passed over.
        faults: Notes when a comparison has failed; its rule is then switched off.
    """

    def __init__(self, rules: Sequence[AlertRule], faults: ConditionFaults) -> None:
        self._faults = faults
        self._comparisons: dict[str, ComparisonMemory] = {
            rule.name: comparison for rule in rules if (comparison := make_comparison(rule)) is not None
        }
        prompt = frozenset(name for name, comparison in self._comparisons.items() if not comparison.is_patient)
        self._rules = [names for names in (prompt, frozenset(self._comparisons) - prompt) if names]
        self._prompt = prompt
        self._attempt = -1
        self._over: frozenset[int] = frozenset()
        self._steps = self._no_steps()
        self._uneven = UnevenRanks()

    @property
    def slowness(self) -> dict[int, float]:
        """By rank, the time of its own work over the median of its peers', on the last step that was compared."""
        return {rank: ratio for comparison in self._comparisons.values() for rank, ratio in comparison.slowness.items()}

    def num_odd(self, rules: Collection[str]) -> dict[int, int]:
        """Return, by rank, how many series, over all steps, one of `rules` found to differ from the other ranks'."""
        counted: Counter[int] = Counter()
        for name in rules:
            counted.update(self._comparisons[name].num_odd)
        return dict(counted)

    def num_compared(self, rules: Collection[str]) -> int:
        """Return on how many steps one of `rules` (the one that did most often) could compare ranks."""
        return max((self._comparisons[name].num_compared for name in rules), default=0)

    def add(self, header: Header, time_s: float, taken: TakenStep) -> Iterator[ComparedStep]:
        """Record one step of one rank, and yield the steps that are complete now, oldest first.

        None of ranks that may take different numbers of steps: theirs of one number are not the same step.
        """
        if not self.meet(header) or self._uneven.include(header):
            return
        place = header.coordinates
        parts = {look.watch.rule.name: self._part(header, time_s, look, taken) for look in taken.compared}
        for names, steps in zip(self._rules, self._steps, strict=True):
            shown = {name: part for name, part in parts.items() if name in names}
            done = steps.add(taken.step, place.rank, shown, num_ranks=place.local_world_size)
            yield from self._complete(names, done)

    def meet(self, header: Header) -> bool:
        """Note that a rank has begun its attempt; return whether that is the newest one, and anything is compared."""
        if not self._comparisons or header.attempt < self._attempt:
            return False
        if header.attempt > self._attempt:
            self._attempt = header.attempt
            self._over = frozenset()
            self._steps = self._no_steps()
            self._uneven = UnevenRanks()
            for comparison in self._comparisons.values():
                comparison.reset()
        for steps in self._steps:
            steps.meet(header.coordinates.rank)
        return True

    def leave(self, over: Collection[int]) -> Iterator[ComparedStep]:
        """Wait no longer for the ranks in `over`, which show nothing more; yield the steps that are complete now."""
        if self._over == (over := frozenset(over)):
            return
        self._over = over
        for names, steps in zip(self._rules, self._steps, strict=True):
            yield from self._complete(names, steps.leave(over))

    def _no_steps(self) -> list[OpenSteps]:
        return [
            OpenSteps(max_steps=MAX_OPEN_STEPS) if names is self._prompt else OpenSteps(max_bytes=MAX_OPEN_BYTES)
            for names in self._rules
        ]

    def _part(self, header: Header, time_s: float, look: RuleRows, taken: TakenStep) -> PeerPart:
        moments = look.moments(taken.values)
        if moments.base is not None and look.watch.rule.name not in self._prompt:
            moments = moments.copy()  # what waits long must not keep the whole block
        place = header.coordinates
        return PeerPart(place.rank, header.attempt, taken.step, place, time_s, look.watch, look.slots, moments)

    def _complete(
        self, names: Collection[str], done: Sequence[tuple[int, Mapping[int, Mapping[str, PeerPart]]]]
    ) -> Iterator[ComparedStep]:
        for step, shown in done:
            yield ComparedStep(step, sorted(shown), names, self._compare(names, step, shown))

    def _compare(
        self, names: Collection[str], step: int, shown: Mapping[int, Mapping[str, PeerPart]]
    ) -> Iterator[ComparedRank]:
        for name, comparison in self._comparisons.items():
            parts = [shown[rank][name] for rank in sorted(shown) if name in shown[rank]] if name in names else []
            if not parts or name in self._faults.by_rule:
                continue
            try:
                with np.errstate(all="ignore"):
                    judged = comparison.judge(parts)
            except Exception as error:  # noqa: BLE001 - the border: a rule that fails must not cost the others a step
                self._faults.note(name, error)
                continue
            for part, found in zip(parts, judged, strict=True):
                if found is not None:
                    yield ComparedRank(part, step, found)


class OpenSteps:
    """Keeps what ranks have shown of steps that not every rank has reached yet.

    Args:
        max_steps: With more steps open, the ranks that are missing on the oldest are late: nobody waits for them.
        max_bytes: Likewise, with moments of more bytes open.
    """

    def __init__(self, *, max_steps: float = math.inf, max_bytes: float = math.inf) -> None:
        self._max_steps = max_steps
        self._max_bytes = max_bytes
        self._open: dict[int, dict[int, Mapping[str, PeerPart]]] = {}
        self._num_bytes = 0
        self._num_ranks = 0
        self._newest_done = -1
        self._newest: dict[int, int] = {}  # by rank that is not over; a rank shows its steps in order
        self._over: frozenset[int] = frozenset()
        self._num_late = 0

    def add(
        self, step: int, rank: int, parts: Mapping[str, PeerPart], *, num_ranks: int
    ) -> list[tuple[int, dict[int, Mapping[str, PeerPart]]]]:
        """Record what `rank` shows of `step` (`parts`, by rule); return the steps that are complete now, oldest first.

        Each comes with what every rank has shown of it, by rank and rule. A step is complete when all `num_ranks` have
        shown it or a later one, but for those that are over or late.
        """
        self._num_ranks = num_ranks
        self._over -= {rank}
        self._newest[rank] = step
        if step <= self._newest_done:
            self._num_late = max(0, self._num_late - 1)  # it lives; from now on it is waited for
            return []
        self._open.setdefault(step, {})[rank] = parts
        self._num_bytes += _num_bytes(parts)
        if len(self._open) > MAX_OPEN_STEPS:
            self._num_late = max(self._num_late, self._num_awaited - len(self._newest))
        done = self._close(self._complete_up_to())
        while self._open and (len(self._open) > self._max_steps or self._num_bytes > self._max_bytes):
            oldest = min(self._open)
            self._num_late = self._num_awaited - sum(newest >= oldest for newest in self._newest.values())
            done += self._close(max(oldest, self._complete_up_to()))
        return done

    def meet(self, rank: int) -> None:
        """Note that `rank` has begun: whoever is patient waits for its steps."""
        self._over -= {rank}
        self._newest.setdefault(rank, -1)

    def leave(self, over: frozenset[int]) -> list[tuple[int, dict[int, Mapping[str, PeerPart]]]]:
        """Wait no longer for the ranks in `over`; return the steps that are complete now, as `add` does."""
        self._over = over
        self._newest = {rank: newest for rank, newest in self._newest.items() if rank not in over}
        return self._close(self._complete_up_to())

    @property
    def _num_awaited(self) -> int:
        return self._num_ranks - len(self._over)

    def _complete_up_to(self) -> int:
        """Return the newest step that all ranks which are waited for have shown or passed."""
        num_needed = self._num_awaited - self._num_late
        if num_needed <= 0:
            return max(self._open, default=self._newest_done)
        reached = sorted(self._newest.values(), reverse=True)
        return reached[num_needed - 1] if len(reached) >= num_needed else self._newest_done

    def _close(self, up_to: int) -> list[tuple[int, dict[int, Mapping[str, PeerPart]]]]:
        done = [(step, self._open.pop(step)) for step in sorted(self._open) if step <= up_to]
        if done:
            self._newest_done = done[-1][0]
            self._num_bytes -= sum(_num_bytes(parts) for _, shown in done for parts in shown.values())
            self._num_late = min(
                self._num_late, self._num_awaited - sum(newest >= self._newest_done for newest in self._newest.values())
            )
        return done


def _num_bytes(parts: Mapping[str, PeerPart]) -> int:
    return sum(part.moments.nbytes for part in parts.values())
