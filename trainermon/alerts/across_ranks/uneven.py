"""Which ranks may have taken different numbers of steps: their steps of one number are not the same step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainermon.core.catalogue import UNEVEN_STEPS
from trainermon.core.values import Kind, SeriesKey

if TYPE_CHECKING:
    from trainermon.core.journal import Header


def are_uneven(series: Sequence[SeriesKey]) -> bool:
    """Return whether a rank with these series has trained under torch's `Join`. Cost: a look at each."""
    return SeriesKey(Kind.STEP, UNEVEN_STEPS) in series


class UnevenRanks:
    """Finds the ranks that have trained under torch's `Join` in one attempt; looks at each of their series once."""

    def __init__(self) -> None:
        self._num_known: Counter[int] = Counter()
        self._found: set[int] = set()

    def include(self, header: Header) -> bool:
        """Return whether the rank has, by the series of `header`; once found, it stays."""
        rank = header.coordinates.rank
        known, self._num_known[rank] = self._num_known[rank], len(header.series)
        if are_uneven(header.series[known:]):
            self._found.add(rank)
        return rank in self._found
