"""The other series that a ratio is made of: which one divides which, and where both are in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainermon.alerts.conditions.criteria import Ratio
from trainermon.core.catalogue import LEARNING_RATE_SERIES
from trainermon.core.derived import COUNT, SUM, Array
from trainermon.core.values import Kind, SeriesKey

Indices = NDArray[np.intp]


class RatioDivisors(NamedTuple):
    """Rows of a block: the divisor of each series, and the learning rates."""

    rows: Indices
    rates: Indices

    def join(self, moments: Array, values: Array) -> Array:
        """Return the 17 rows that a `RatioWatcher` takes, as an array [17, n].

        They are `moments`, the divisors' moments out of the block's `values`, and the largest learning rate in it (NaN
        without one).
        """
        rates = values[SUM, self.rates] / values[COUNT, self.rates]
        rate = np.full((1, moments.shape[1]), rates.max() if rates.size else np.nan)
        return np.concatenate((moments, values[:, self.rows], rate))


class RatioPartners:
    """The divisors of all series of one rank, by name and virtual stage."""

    def __init__(self, ratio: Ratio) -> None:
        self._over = ratio.over
        self.reset()

    def reset(self) -> None:
        """Forget the table of the attempt that has ended."""
        self._names: list[tuple[str, int]] = []
        self._divisor_of: dict[tuple[str, int], int] = {}
        self._is_rate: list[bool] = []

    def extend(self, keys: Sequence[SeriesKey]) -> None:
        """Take the next entries of the series table."""
        for key in keys:
            if key.kind is self._over:
                self._divisor_of.setdefault((key.name, key.stage), len(self._names))
            self._is_rate.append(key.kind is Kind.STEP and key.name == LEARNING_RATE_SERIES)
            self._names.append((key.name, key.stage))

    def find(self, series: NDArray[Any], rows: Indices) -> tuple[Indices, RatioDivisors]:
        """Return those of `rows` whose divisor is in the block too, and where.

        Args:
            series: The numbers of all series of the block.
            rows: Places of the dividends in it.
        """
        place_of = {int(number): place for place, number in enumerate(series)}
        divisors = [place_of.get(self._divisor_of.get(self._names[int(series[row])], -1), -1) for row in rows]
        found = np.array(divisors, np.intp).reshape(-1)
        rates = [place for place, number in enumerate(series) if self._is_rate[int(number)]]
        return rows[found >= 0], RatioDivisors(found[found >= 0], np.array(rates, np.intp))
