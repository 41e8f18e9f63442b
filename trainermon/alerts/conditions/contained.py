"""Keeps a condition that fails from doing harm: the first fault is told once and ends its rule, all else goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trainermon.alerts.conditions.condition import ConditionVerdict, ConditionWatcher, Indices, Mask, Slots
from trainermon.alerts.extensions import CustomCondition, factory_of
from trainermon.core.derived import Array
from trainermon.core.values import Placement, SeriesKey

_GROWTH = 1.125

_logger = logging.getLogger(__name__)


class ConditionFaults:
    """Records which rules' conditions have failed, and how.

    Attributes:
        by_rule: By name of the rule, its first fault; a rule that stands here says nothing any more, on any rank.
    """

    def __init__(self) -> None:
        self.by_rule: dict[str, str] = {}

    def note(self, rule: str, error: Exception) -> None:
        """Record an error in a rule's condition, and log the first one of the rule."""
        if rule not in self.by_rule:
            self.by_rule[rule] = f"{type(error).__name__}: {error}"
            _logger.error("rule %s is switched off, as its condition failed", rule, exc_info=error)


class ContainedWatcher(ConditionWatcher):
    """Passes calls on to another watcher, until that raises an error; from then on the rule gives no verdicts.

    Args:
        rule: Name of the rule, for the message.
        make: Makes the watcher.
        faults: Where the error is noted. One on another rank ends the rule here too.
    """

    def __init__(self, rule: str, make: Callable[[], ConditionWatcher], faults: ConditionFaults) -> None:
        self._rule = rule
        self._faults = faults
        self._num_series = self._room = 0
        self._watcher: ConditionWatcher = self._attempt(make) or ConditionWatcher()

    def add(self, num_series: int, *, num_ranks: int = 1) -> Indices:
        """Make room for so many more series, and return their slots.

        The first time there is room for as many of each of `num_ranks` ranks, so that nothing is copied as they come.
        """
        slots = np.arange(self._num_series, self._num_series + num_series)
        self._num_series += num_series
        if self._num_series > self._room:
            self._room = max(self._num_series, int(_GROWTH * self._room) or num_ranks * num_series)
            self.grow(self._room)
        return slots

    def grow(self, size: int) -> None:  # noqa: D102 - as in ConditionWatcher, here and below
        self._attempt(self._watcher.grow, size)

    def meet(  # noqa: D102
        self, slots: Indices, keys: Sequence[SeriesKey], placements: Sequence[Placement | None]
    ) -> None:
        self._attempt(self._watcher.meet, slots, keys, placements)

    def reset(self, slots: Slots = slice(None)) -> None:  # noqa: D102
        self._attempt(self._watcher.reset, slots)

    def judge(self, slots: Slots, moments: Array) -> ConditionVerdict:  # noqa: D102
        verdict = self._attempt(self._watcher.judge, slots, moments)
        return verdict or _silence(moments.shape[1])

    def learn(self, slots: Slots, restless: Mask | None) -> None:  # noqa: D102
        self._attempt(self._watcher.learn, slots, restless)

    def baseline(self, slots: Indices) -> Array:  # noqa: D102
        found = self._attempt(self._watcher.baseline, slots)
        return np.full(len(slots), np.nan) if found is None else found

    def _attempt(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self._rule in self._faults.by_rule:
            return None
        try:
            return call(*arguments)
        except Exception as error:  # noqa: BLE001 - the border: a rule that fails must not cost the others a step
            self._faults.note(self._rule, error)
            return None


class ForeignWatcher(ConditionWatcher):
    """Passes a copy of the moments to a condition that another package provides, and checks its answers.

    Raises:
        RuleError: It cannot be loaded.
        TypeError: It is no watcher.
    """

    def __init__(self, condition: CustomCondition, statistic: str) -> None:
        self._watcher = _make(condition, statistic)

    def grow(self, size: int) -> None:  # noqa: D102
        self._watcher.grow(size)

    def meet(  # noqa: D102
        self, slots: Indices, keys: Sequence[SeriesKey], placements: Sequence[Placement | None]
    ) -> None:
        self._watcher.meet(slots, keys, placements)

    def reset(self, slots: Slots = slice(None)) -> None:  # noqa: D102
        del slots  # all that there are
        self._watcher.reset()

    def learn(self, slots: Slots, restless: Mask | None) -> None:  # noqa: D102
        self._watcher.learn(slots, restless)

    def judge(self, slots: Slots, moments: Array) -> ConditionVerdict:  # noqa: D102
        return _checked(self._watcher.judge(slots, moments.copy()), moments.shape[1])

    def baseline(self, slots: Indices) -> Array:  # noqa: D102
        found: Array = _column(self._watcher.baseline(slots), len(slots))
        return found


def _make(condition: CustomCondition, statistic: str) -> ConditionWatcher:
    watcher = factory_of(condition.name)(condition.settings, statistic)
    if not isinstance(watcher, ConditionWatcher):
        raise TypeError(
            f"condition {condition.name!r} made {watcher!r}, expected a trainermon.alerts.conditions.condition.Watcher"
        )
    return watcher


def _checked(verdict: ConditionVerdict, size: int) -> ConditionVerdict:
    """Return the verdict as the state machine needs it: one entry per series, never bad and clear at once."""
    bad = _column(verdict.bad, size).astype(np.bool_)
    blind = None if verdict.blind is None else _column(verdict.blind, size).astype(np.bool_)
    hidden = np.zeros(size, np.bool_) if blind is None else blind
    clear = _column(verdict.clear, size).astype(np.bool_) & ~bad & ~hidden
    return ConditionVerdict(_column(verdict.value, size), _column(verdict.score, size), bad & ~hidden, clear, blind)


def _column(found: Any, size: int) -> Any:
    array = np.asarray(found)
    if array.shape != (size,):
        raise ValueError(f"found an array of shape {array.shape}, expected one value for each of {size} series")
    return array


def _silence(size: int) -> ConditionVerdict:
    nothing, everything = np.zeros(size, np.bool_), np.ones(size, np.bool_)
    return ConditionVerdict(np.full(size, np.nan), np.full(size, np.nan), nothing, nothing, everything)
