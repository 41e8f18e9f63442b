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
    """Where, in a block, the divisors of the series of a ratio rule are.

    Attributes:
        rows: For each series, the row of its divisor.
        rates: The rows of the learning rates.
    """

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
    """Finds in the blocks of one rank the divisor of each series of a ratio rule: same name and virtual stage.

    Series whose divisor is not in the block are left out.

    Args:
        ratio: The condition, which names the divisor's kind.
    """

    def __init__(self, ratio: Ratio) -> None:
        self._over = ratio.over
        self.reset()

    def reset(self) -> None:
        """Forget the series of the attempt that has ended."""
        self._names: list[tuple[str, int]] = []
        self._divisor_of: dict[tuple[str, int], int] = {}
        self._is_rate: list[bool] = []

    def extend(self, keys: Sequence[SeriesKey]) -> None:
        """Register the series that are new in the rank's table."""
        for key in keys:
            if key.kind is self._over:
                self._divisor_of.setdefault((key.name, key.stage), len(self._names))
            self._is_rate.append(key.kind is Kind.STEP and key.name == LEARNING_RATE_SERIES)
            self._names.append((key.name, key.stage))

    def find(self, series: NDArray[Any], rows: Indices) -> tuple[Indices, RatioDivisors]:
        """Return those of `rows` whose divisor is in the same block, and where the divisors are.

        Args:
            series: The ids of all series of the block, by row.
            rows: The rows of the dividends.
        """
        place_of = {int(number): place for place, number in enumerate(series)}
        divisors = [place_of.get(self._divisor_of.get(self._names[int(series[row])], -1), -1) for row in rows]
        found = np.array(divisors, np.intp).reshape(-1)
        rates = [place for place, number in enumerate(series) if self._is_rate[int(number)]]
        return rows[found >= 0], RatioDivisors(found[found >= 0], np.array(rates, np.intp))
