"""Whether so little is left to learn that one sample weighs more than all others together."""

from __future__ import annotations

import math
import statistics

from trainermon.core.derived import DERIVED, Array

SHARE = 0.05
"""Below this share of the first losses a task is learned. A language model never comes near it."""

NUM_FIRST = 16
"""So many losses are the first ones; their median counts."""


class LossLevel:
    """Tracks how far the loss of one rank has come down since its first steps; several losses are added up.

    Attributes:
        is_learned: The last loss was below `SHARE` of the first ones. False without a loss, or where the first ones
            were not above zero.
    """

    def __init__(self) -> None:
        self.is_learned = False
        self._first: list[float] = []
        self._limit = 0.0

    def observe(self, moments: Array) -> None:
        """Add the moments `[8, n]` of the losses of one step; n may be 0. A loss that is not finite is ignored."""
        loss = float(DERIVED["mean"](moments).sum()) if moments.shape[1] else math.nan
        self.is_learned = False
        if not math.isfinite(loss):
            return
        if len(self._first) < NUM_FIRST:
            self._first.append(loss)
            self._limit = SHARE * statistics.median(self._first)
        else:
            self.is_learned = abs(loss) < self._limit
