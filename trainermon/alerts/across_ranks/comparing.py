"""What every comparison of ranks is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trainermon.alerts.across_ranks.peers import PeerPart
from trainermon.alerts.conditions.condition import ConditionVerdict, Indices
from trainermon.core.derived import Array


class ComparedSeries(NamedTuple):
    """What a comparison says of the series of one rank.

    Attributes:
        slots: Which, as positions among the series of the rule.
        moments: Their moments, [8, n].
        verdict: What is said of them.
        baseline: What they were compared with.
    """

    slots: Indices
    moments: Array
    verdict: ConditionVerdict
    baseline: Array


class ComparisonMemory:
    """What one rule that compares ranks remembers between steps; the base class of all comparisons.

    Attributes:
        is_patient: Whether ranks are waited for however far they are behind the others.
        slowness: By rank, its own work over the median of its peers', as of the last step; only of stragglers' rules.
        num_compared: Steps on which copies were compared; only where ranks must not differ.
        num_odd: By rank, series of all steps that were not what they had to be; only where ranks must not differ.
    """

    is_patient = False

    def __init__(self) -> None:
        self.slowness: dict[int, float] = {}
        self.num_compared = 0
        self.num_odd: dict[int, int] = {}

    def judge(self, parts: Sequence[PeerPart]) -> list[ComparedSeries | None]:
        """Return the verdict on each rank's part of one step, in the order of `parts`.

        None for a rank of which nothing can be said, or for all of them where nothing is bad and none was restless
        (`are_calm`): then nothing follows.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Forget what was learned in the attempt that has ended."""


def are_calm(parts: Sequence[PeerPart]) -> bool:
    """Return whether the rule's condition held on no rank so far, and no alert is on."""
    return all(part.watch.is_calm for part in parts)
