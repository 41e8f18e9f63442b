"""Laws of settings: learning rates, weight decay, betas, epsilon and momentum do not change by themselves."""

from __future__ import annotations

import abc
import math
from collections import deque
from collections.abc import Iterator, Mapping

import numpy as np

from trainermon.alerts.laws.law import LawRelation, LawStep, LawVerdict
from trainermon.core.catalogue import GROUP_SETTINGS, LEARNING_RATE_SERIES, WEIGHT_DECAY_SERIES
from trainermon.core.derived import COUNT, SUM
from trainermon.core.values import Kind

_FROM_ONE = frozenset({"beta1", "beta2", "momentum"})
"""Settings whose distance from 1 is what counts."""

_SELF_FINDING = 0.3
"""Rates from here on are those of optimizers that find the rate by themselves, as Prodigy, which is given 1."""

_KEPT_STEPS = 4096

_ENDING = 0.1
"""A rate that has fallen to this share of its largest is that of a schedule that may end."""


class SettingsRelation(LawRelation):
    """Judges the settings of each rank by what it showed before; base class of the laws of settings.

    Attributes:
        limit: Which number of the law the size must not exceed.
    """

    limit = "factor"

    def __init__(self, settings: Mapping[str, float]) -> None:
        super().__init__(settings)
        self._attempt = -1

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        if step.attempt != self._attempt:
            self._attempt = step.attempt
            self.restart()
        size = np.full((len(step.places), len(step.tensors)), np.nan)
        for place, where in enumerate(step.places):
            for column, found in self.follow(where.rank, step, dict(_numbers_of(step, place))):
                size[place, column] = found
        if np.isnan(size).all():
            return None
        return LawVerdict(size, np.full(size.shape, self.settings[self.limit]), ~np.isnan(size))

    @abc.abstractmethod
    def restart(self) -> None:
        """A new attempt begins: settings may have been changed meanwhile."""

    @abc.abstractmethod
    def follow(self, rank: int, step: LawStep, shown: Mapping[int, float]) -> Iterator[tuple[int, float]]:
        """Take the numbers that a rank shows of a step, by column; yield the size of each column that is judged."""


class InProportion(SettingsRelation):
    """Learning rates of the groups of an optimizer change by one factor, or drift apart little by little.

    The size is the factor of a group beside that of the others, over what it was in the last changes. Nothing is said
    of rates of zero, of steps on which all rates rise, as in a warm-up from a common rate, of a fall to the rate of
    another group, which may be a floor, and of a fall from a tenth of the group's largest rate, or less: layers that
    are frozen one after the other have schedules that end at different times.
    """

    def restart(self) -> None:  # noqa: D102 - as in SettingsRelation, here and below
        self._last: dict[int, Mapping[int, float]] = {}
        self._largest: dict[tuple[int, int], float] = {}
        self._shifts: dict[tuple[int, int], deque[float]] = {}

    def follow(self, rank: int, step: LawStep, shown: Mapping[int, float]) -> Iterator[tuple[int, float]]:  # noqa: D102
        rates = dict(_named(LEARNING_RATE_SERIES, step, shown))
        last, self._last[rank] = self._last.get(rank, {}), rates
        if rates == last:
            yield from ((column, 1.0) for column in rates)
            return
        changes = {c: math.log(rate / last[c]) for c, rate in rates.items() if rate > 0 and last.get(c, 0.0) > 0}
        usual = sorted(changes.values(), key=abs)[(len(changes) - 1) // 2] if changes else 0.0
        for column, change in changes.items():
            shifts = self._shifts.setdefault((rank, column), deque([0.0], maxlen=4))
            beyond, shift = abs(change - usual) - 2 * max(shifts), abs(change - usual)
            largest = self._largest[rank, column] = max(self._largest.get((rank, column), 0.0), last[column])
            ends = change < 0 and last[column] <= _ENDING * largest
            may_part = min(changes.values()) > 0 or ends or _falls_to_another(column, changes, rates)
            yield column, 1.0 if may_part else math.exp(max(beyond, 0.0))
            if shift:
                shifts.append(shift)


class Steady(SettingsRelation):
    """Weight decay, betas, epsilon and momentum stay what they are, or change little by little.

    The size is the factor of a change, over the one before; of betas and momentum that of their distance from 1. What
    begins from zero, or ends there, is not judged: see `SwitchedOff`.
    """

    def restart(self) -> None:  # noqa: D102
        self._last: dict[tuple[int, int], float] = {}
        self._usual: dict[tuple[int, int], float] = {}

    def follow(self, rank: int, step: LawStep, shown: Mapping[int, float]) -> Iterator[tuple[int, float]]:  # noqa: D102
        for column in (column for of_rank, column in self._last if of_rank == rank and column not in shown):
            yield column, 1.0  # what has no row is what it was
        for column, value in shown.items():
            name = step.tensors[column].name
            if name in GROUP_SETTINGS:
                yield column, self._factor((rank, column), 1.0 - value if name in _FROM_ONE else value)

    def _factor(self, key: tuple[int, int], value: float) -> float:
        before, self._last[key] = self._last.get(key, value), value
        usual = self._usual.get(key, 1.0)
        if before <= 0 or value == before or value <= 0:
            return 1.0
        factor = max(value / before, before / value)
        self._usual[key] = min(factor, self.settings["factor"])
        return max(factor / usual, 1.0)


class SwitchedOff(SettingsRelation):
    """Weight decay, epsilon, or the learning rate of one group, does not become exactly zero all at once.

    The size is 1 on the step on which it does. After other changes it is not judged: a schedule may end so. A rate may
    change before; it is judged where other groups go on, where it was a tenth of its largest and more, and the first
    time: groups may take turns.
    """

    limit = "steps"

    def restart(self) -> None:  # noqa: D102
        self._last: dict[tuple[int, int], float] = {}
        self._largest: dict[tuple[int, int], float] = {}
        self._is_open: dict[tuple[int, int], bool] = {}

    def follow(self, rank: int, step: LawStep, shown: Mapping[int, float]) -> Iterator[tuple[int, float]]:  # noqa: D102
        for column in (column for of_rank, column in self._last if of_rank == rank and column not in shown):
            yield column, 0.0  # what has no row is what it was
        goes_on = any(rate > 0 for _, rate in _named(LEARNING_RATE_SERIES, step, shown))
        for column, value in shown.items():
            name = step.tensors[column].name
            if name == LEARNING_RATE_SERIES:
                yield column, self._size((rank, column), value, may_change=True) * goes_on
            elif name in GROUP_SETTINGS and name not in _FROM_ONE:
                yield column, self._size((rank, column), value)

    def _size(self, key: tuple[int, int], value: float, *, may_change: bool = False) -> float:
        last, self._last[key] = self._last.get(key, value), value
        largest = self._largest[key] = max(self._largest.get(key, value), value)
        is_judged = self._is_open.get(key, True) and last >= _ENDING * largest
        self._is_open[key] = is_judged and value > 0 if may_change else value == last and self._is_open.get(key, True)
        return float(value == 0 < last and is_judged)


class Collapse(SettingsRelation):
    """A learning rate does not fall by orders of magnitude within one step, and go on there.

    The size is the factor of the fall, for as long as the rate has not come back from it. What has fallen to a tenth of
    the largest rate before is not judged, as a schedule that ends near zero, nor a rate of exactly zero.
    """

    def restart(self) -> None:  # noqa: D102
        self._last: dict[tuple[int, int], float] = {}
        self._largest: dict[tuple[int, int], float] = {}
        self._fell_from: dict[tuple[int, int], float] = {}

    def follow(self, rank: int, step: LawStep, shown: Mapping[int, float]) -> Iterator[tuple[int, float]]:  # noqa: D102
        for column, rate in _named(LEARNING_RATE_SERIES, step, shown):
            if rate > 0:
                yield column, self._factor((rank, column), rate)

    def _factor(self, key: tuple[int, int], rate: float) -> float:
        last, self._last[key] = self._last.get(key, rate), rate
        largest = self._largest[key] = max(self._largest.get(key, rate), rate)
        fell_from = self._fell_from.get(key, last if last >= _ENDING * largest else rate)
        if fell_from / rate > self.settings["factor"]:
            self._fell_from[key] = fell_from
        else:
            self._fell_from.pop(key, None)
        return max(fell_from / rate, 1.0)


class MildDecay(SettingsRelation):
    """Weight decay takes a small share off the weights in a step: the size is learning rate times weight decay."""

    limit = "share"

    def restart(self) -> None:  # noqa: D102
        self._decay: dict[int, dict[int, float]] = {}

    def follow(self, rank: int, step: LawStep, shown: Mapping[int, float]) -> Iterator[tuple[int, float]]:  # noqa: D102
        decay = self._decay.setdefault(rank, {})
        decay.update(_named(WEIGHT_DECAY_SERIES, step, shown))
        rates = {step.tensors[c].slot: rate for c, rate in _named(LEARNING_RATE_SERIES, step, shown)}
        for column, value in decay.items():
            rate = rates.get(step.tensors[column].slot, math.inf)
            if rate < _SELF_FINDING:
                yield column, rate * value


class GoesOn(SettingsRelation):
    """After a restart the learning rate is that of the same step before it, or of the step before that one.

    The size is the factor between them. Judged is the first step of an attempt, if the one before has made it, and not
    as its first. Where that had ended with the step before, a schedule may have changed the rate for this one: then
    it is judged only if it is the rate of step 0 again.
    """

    def __init__(self, settings: Mapping[str, float]) -> None:
        super().__init__(settings)
        self._rates: dict[tuple[int, int], dict[int, float]] = {}

    def restart(self) -> None:  # noqa: D102
        self._earlier, self._rates = self._rates, {}

    def follow(self, rank: int, step: LawStep, shown: Mapping[int, float]) -> Iterator[tuple[int, float]]:  # noqa: D102
        for column, rate in _named(LEARNING_RATE_SERIES, step, shown):
            key, number = (rank, column), step.step
            rates, earlier = self._rates.setdefault(key, {}), self._earlier.get(key, {})
            before = [earlier[near] for near in (number, number - 1) if near in earlier]
            is_known = number - 1 in earlier and (number in earlier or math.isclose(rate, earlier.get(0, math.nan)))
            if rates:
                yield column, 1.0
            elif rate > 0 and all(before) and is_known:
                yield column, min(max(rate / one, one / rate) for one in before)
            rates[number] = rate
            if len(rates) > _KEPT_STEPS:
                del rates[next(iter(rates))]


def _numbers_of(step: LawStep, place: int) -> Iterator[tuple[int, float]]:
    """Yield the finite numbers of the step that a rank shows, by column."""
    rows = step.rows[Kind.STEP][place]
    for column in np.flatnonzero((rows[COUNT] == 1) & np.isfinite(rows[SUM])).tolist():
        yield column, float(rows[SUM, column])


def _named(name: str, step: LawStep, shown: Mapping[int, float]) -> Iterator[tuple[int, float]]:
    return ((column, value) for column, value in shown.items() if step.tensors[column].name == name)


def _falls_to_another(column: int, changes: Mapping[int, float], rates: Mapping[int, float]) -> bool:
    others = [rates[other] for other in changes if other != column]
    return changes[column] < 0 and rates[column] >= min(others, default=0.0)
