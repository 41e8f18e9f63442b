"""Which rows of a block (one step of one rank) each rule looks at."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainermon.alerts.across_ranks.partners import RatioDivisors
from trainermon.alerts.conditions.condition import Indices, Slots
from trainermon.alerts.watch import NO_SLOT, RuleWatch
from trainermon.core.catalogue import LOSS_SCALE_SERIES, SKIPPED_SERIES
from trainermon.core.derived import SUM, Array
from trainermon.core.journal.patterns import ByPattern, compact
from trainermon.core.values import Kind, SeriesKey

if TYPE_CHECKING:
    from trainermon.core.journal import Header

_numbers = itertools.count()


class RuleRows(NamedTuple):
    """Which rows of a block (one step of one rank) one rule looks at.

    Attributes:
        watch: The rule, as it watches the rank.
        rows: The rows of the block.
        slots: The same series, as positions among those of the rule.
        divisors: Where the divisors are, for a ratio; else None.
        source: The same for two rules of a plan that look at the same moments.
    """

    watch: RuleWatch
    rows: Slots
    slots: Indices
    divisors: RatioDivisors | None
    source: int

    def moments(self, values: Array) -> Array:
        """Return the moments [8, n] that the rule looks at, out of a block's `values`; [17, n] for a ratio."""
        own: Array = values[:, self.rows]
        return own if self.divisors is None else self.divisors.join(own, values)


class RowPlan(NamedTuple):
    """Which rows of a block all rules look at; the same for all steps that show the same series.

    Attributes:
        looks: For each rule that looks at any row of this rank alone, the rule and its rows.
        compared: The same for the rules that compare ranks.
        losses: The rows of the losses.
        skipped: The row that tells that the framework skipped the step; -1: there is none.
        loss_scale: The row of the loss scale; -1: there is none.
        number: Another one for each plan, of whichever rank.
    """

    looks: tuple[RuleRows, ...]
    compared: tuple[RuleRows, ...]
    losses: NDArray[np.intp]
    skipped: int
    loss_scale: int
    number: int

    def is_excused(self, values: Array) -> bool:
        """Return whether the framework skipped this step to lower its loss scale, as it is meant to.

        With a scale of 1, or none, there is nothing to lower: then the step is lost, not skipped by design.
        """
        if self.skipped < 0 or self.loss_scale < 0:
            return False
        return bool(values[SUM, self.skipped] == 1.0 and 1.0 < values[SUM, self.loss_scale] < np.inf)


class RowPlans:
    """Works out which rows of a rank's blocks its rules look at, once for each combination of series.

    Series are numbered anew in each attempt, see `reset`.

    Args:
        watches: The rank's rules.
        matching: Given series, returns for each rule the positions of those that it looks at.
    """

    def __init__(
        self, watches: Sequence[RuleWatch], matching: Callable[[Sequence[SeriesKey]], Sequence[Sequence[int]]]
    ) -> None:
        self._watches = watches
        self._matching = matching
        self._plans = ByPattern(self._plan)
        self._num_keys = 0
        self._skipped_id = self._scale_id = -1
        self._loss_ids: list[int] = []

    def reset(self) -> None:
        """Forget all series: a new attempt begins."""
        self._plans.clear()
        self._num_keys = 0
        self._skipped_id = self._scale_id = -1
        self._loss_ids = []

    def extend(self, header: Header, keys: Sequence[SeriesKey]) -> None:
        """Register the series that are new in the rank's table `keys`, with each rule that looks at them."""
        if len(keys) <= self._num_keys:
            return
        added = keys[self._num_keys :]
        placements = list(header.placements[self._num_keys : len(keys)])
        placements += [None] * (len(added) - len(placements))
        num_ranks = header.coordinates.local_world_size
        for watch, chosen in zip(self._watches, self._matching(added), strict=True):
            watch.extend(added, placements, chosen, num_ranks=num_ranks)
        for number, key in enumerate(added, start=self._num_keys):
            if key == SeriesKey(Kind.STEP, SKIPPED_SERIES):
                self._skipped_id = number
            elif key == SeriesKey(Kind.STEP, LOSS_SCALE_SERIES):
                self._scale_id = number
            elif key.kind is Kind.LOSS:
                self._loss_ids.append(number)
        self._num_keys = len(keys)

    def of(self, series: NDArray[Any]) -> RowPlan:
        """Return which rows each rule looks at in a block whose rows are the series with the ids `series`."""
        return self._plans.of(series)

    def _plan(self, series: NDArray[Any]) -> RowPlan:
        looks = list(self._looks(series))
        return RowPlan(
            tuple(look for look in looks if not look.watch.compares),
            tuple(look for look in looks if look.watch.compares),
            np.flatnonzero(np.isin(series, self._loss_ids)),
            _place(series, self._skipped_id),
            _place(series, self._scale_id),
            next(_numbers),
        )

    def _looks(self, series: NDArray[Any]) -> Iterator[RuleRows]:
        sources: dict[bytes, int] = {}
        for watch in self._watches:
            rows = np.flatnonzero(watch.slot_of_id[series] != NO_SLOT)
            divisors = None
            if watch.partners:
                rows, divisors = watch.partners.find(series, rows)
            if rows.size:
                name = rows.tobytes() if divisors is None else watch.rule.name.encode()
                source = sources.setdefault(name, len(sources))
                yield RuleRows(watch, compact(rows), watch.slot_of_id[series[rows]].astype(np.intp), divisors, source)


def _place(series: NDArray[Any], number: int) -> int:
    found = np.flatnonzero(series == number)
    return int(found[0]) if number >= 0 and found.size else -1
