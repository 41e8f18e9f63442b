"""Steps as the store has them, for many ranks at once: what `OpenStep` merges block by block comes as arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from trainermon.core.values import SeriesKey
from trainermon.exporters.merge import (
    LAG,
    NEUTRAL,
    Floats,
    Indices,
    StepSummary,
    merge_moments,
    summarise,
)


class ShownSeries(NamedTuple):
    """A series that a row of a heat map shows.

    Attributes:
        rank: The last rank that has it.
        key: The series.
    """

    rank: int
    key: SeriesKey


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredStep:
    """One step of n ranks; answers as an `OpenStep` to which their blocks were added.

    Attributes:
        attempt: The start of the job.
        step: Its number.
        rows: What the columns of `moments` are, [rows]; the same object in all steps that are read together.
        moments: Merged over the ranks, float64 [8, rows].
        ranks: The ranks, ascending, [n].
        times_s: When the step ended on each, Unix time, float64 [n].
        shares: The part of each in the squared global gradient norm, float64 [n]; NaN: none.
        scalars: Numbers of each by name, float64 [n]; NaN where a rank has none, infinity: not finite.
    """

    attempt: int
    step: int
    rows: tuple[ShownSeries, ...]
    moments: Floats
    ranks: Indices
    times_s: Floats
    shares: Floats
    scalars: Mapping[str, Floats]

    @property
    def quantities(self) -> set[str]:
        """The quantities that `by_rank` knows of any rank."""
        return {LAG, *self.scalars}

    def by_rank(self, quantity: str, rows: Mapping[int, int]) -> Floats:
        """Return one quantity of every rank; as `OpenStep.by_rank`."""
        values = np.full(len(rows), np.nan)
        if quantity == LAG:
            found = self.times_s - self.times_s.min()
        else:
            found = self.scalars.get(quantity, np.full(len(self.ranks), np.nan))
        values[[rows[rank] for rank in self.ranks.tolist()]] = found
        return values

    def summary(self, step: int) -> StepSummary:
        """Return loss, gradient norm and the other numbers of the whole step, over the ranks that have reached it."""
        return summarise(
            step,
            time_s=float(self.times_s.max()),
            shares=_present(self.shares),
            told={name: _present(values) for name, values in self.scalars.items()},
        )

    def placed(self, places: Indices) -> StoredStep:
        """Return the step with its rows at other places, [rows]; without those whose place is -1."""
        known = places >= 0
        moments = np.repeat(NEUTRAL, int(places.max(initial=-1)) + 1, axis=1)
        moments[:, places[known]] = self.moments[:, known]
        return dataclasses.replace(self, moments=moments)

    def joined(self, other: StoredStep) -> StoredStep:
        """Return the step of the ranks of both, which are placed alike; of a rank in both, what `other` says."""
        mine = ~np.isin(self.ranks, other.ranks)
        ranks = np.concatenate([self.ranks[mine], other.ranks])
        order = np.argsort(ranks)

        def both(one: Floats, another: Floats) -> Floats:
            return np.concatenate([one[mine], another])[order]

        return dataclasses.replace(
            other,
            moments=merge_moments(self.moments, other.moments),
            ranks=ranks[order],
            times_s=both(self.times_s, other.times_s),
            shares=both(self.shares, other.shares),
            scalars={
                name: both(
                    *(step.scalars.get(name, np.full(len(step.ranks), math.nan)) for step in (self, other)),
                )
                for name in {**self.scalars, **other.scalars}
            },
        )


def _present(values: Floats) -> list[float]:
    present: list[float] = values[~np.isnan(values)].tolist()
    return present
