"""Compares the ranks of a node step by step: which steps are complete, and who is whose peer.

Ranks come to a step at different times. It is compared when every rank of the node has shown it, or when so many later
steps are open that whoever is missing will not come soon; then nobody is waited for who was missing. What a rank shows
after that is not looked at. What the comparison says is decided in `comparisons`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainermon.alerts.across_ranks.comparing import ComparisonMemory, Found
from trainermon.alerts.across_ranks.comparisons import make_comparison
from trainermon.alerts.across_ranks.peers import PeerPart
from trainermon.alerts.batch import TakenStep
from trainermon.alerts.conditions.contained import ConditionFaults
from trainermon.alerts.rules import AlertRule

if TYPE_CHECKING:
    from trainermon.core.journal import Header

MAX_OPEN_STEPS = 16


class ComparedRank(NamedTuple):
    """What a comparison of ranks has found about one rank on one step.

    Attributes:
        part: What was compared of it.
        step: The step that was compared; the rank may be further by now.
        found: What the comparison says.
    """

    part: PeerPart
    step: int
    found: Found

    def apply(self) -> None:
        """Update the rank's rule by this result: alerts may begin or end."""
        chosen, verdict, baseline = self.found
        part = self.part
        part.watch.update(part.indices[chosen], verdict, part.moments[:, chosen], baseline, self.step)


class ComparedStep(NamedTuple):
    """A step that is complete.

    Attributes:
        step: Its number.
        ranks: The ranks that have shown it.
        found: What was found, rule by rule; nothing is computed ahead, as states of ranks change meanwhile.
    """

    step: int
    ranks: Sequence[int]
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
        self._attempt = -1
        self._steps = OpenSteps()

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
        """Record one step of one rank, and yield the steps that are complete now, oldest first."""
        if not self._comparisons or header.attempt < self._attempt:
            return
        if header.attempt > self._attempt:
            self._attempt = header.attempt
            self._steps = OpenSteps()
            for comparison in self._comparisons.values():
                comparison.reset()
        place = header.coordinates
        parts = {
            look.watch.rule.name: PeerPart(
                place.rank, place, time_s, look.watch, look.slots, look.moments(taken.values)
            )
            for look in taken.compared
        }
        for step, shown in self._steps.add(taken.step, place.rank, parts, num_ranks=place.local_world_size):
            yield ComparedStep(step, sorted(shown), self._compare(step, shown))

    def _compare(self, step: int, shown: Mapping[int, Mapping[str, PeerPart]]) -> Iterator[ComparedRank]:
        for name, comparison in self._comparisons.items():
            parts = [shown[rank][name] for rank in sorted(shown) if name in shown[rank]]
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
    """Keeps what ranks have shown of steps that not every rank has reached yet."""

    def __init__(self) -> None:
        self._open: dict[int, dict[int, Mapping[str, PeerPart]]] = {}
        self._newest_done = -1
        self._num_missing = 0  # ranks that are not waited for

    def add(
        self, step: int, rank: int, parts: Mapping[str, PeerPart], *, num_ranks: int
    ) -> list[tuple[int, dict[int, Mapping[str, PeerPart]]]]:
        """Record what `rank` shows of `step` (`parts`, by rule); return the steps that are complete now, oldest first.

        Each comes with what every rank has shown of it, by rank and rule. A step is complete when all `num_ranks` have
        shown it.
        """
        if step <= self._newest_done:
            self._num_missing = max(0, self._num_missing - 1)  # it lives; from now on it is waited for
            return []
        shown = self._open.setdefault(step, {})
        shown[rank] = parts
        if len(shown) >= num_ranks - self._num_missing:
            self._num_missing = max(0, num_ranks - len(shown))
            return self._close(step)
        if len(self._open) > MAX_OPEN_STEPS:
            oldest = min(self._open)
            self._num_missing = max(0, num_ranks - len(self._open[oldest]))
            return self._close(oldest)
        return []

    def _close(self, step: int) -> list[tuple[int, dict[int, Mapping[str, PeerPart]]]]:
        # A rank shows its steps in order: who has shown this one will show no earlier one any more.
        done = sorted(number for number in self._open if number <= step)
        self._newest_done = step
        return [(number, self._open.pop(number)) for number in done]
