"""One rule on one rank: its series, what is known of them, and what was reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainermon.alerts.across_ranks.partners import RatioPartners
from trainermon.alerts.conditions.condition import ConditionVerdict, Indices, Slots, as_indices
from trainermon.alerts.conditions.contained import ConditionFaults
from trainermon.alerts.conditions.criteria import ACROSS_RANKS, Ratio
from trainermon.alerts.conditions.watchers import make_watcher
from trainermon.alerts.rules import AlertRule
from trainermon.alerts.state import RuleState
from trainermon.alerts.wording import AlertConcern, AlertMoment, make_alert
from trainermon.core.derived import Array
from trainermon.core.values import Alert, AlertState, Placement, SeriesKey

NO_SLOT = -1


class RuleWatch:
    """Evaluates one rule on one rank: its series, what it remembers of them, and what was reported.

    Attributes:
        rule: The rule.
        group: For how long its condition holds, and for which series.
        slot_of_id: By number in the rank's table, the position of a series among the rule's; -1 if the rule does not
            look at it.
        on: Whether there is an alert, reported or not.
        announced: How many series were reported, 0 while the alert is held back.
        compares: Whether the verdict comes from a comparison of ranks, so that `observe` is not for this rule.
        partners: Finds the divisors, for a ratio.
        keys: The rule's series.
        placements: How the tensor of each of them is placed.
    """

    def __init__(self, rule: AlertRule, faults: ConditionFaults) -> None:
        self.rule = rule
        self.group = RuleState(rule)
        self.slot_of_id = np.zeros(0, np.intp)
        self.on = False
        self.announced = 0
        self.compares = isinstance(rule.when, ACROSS_RANKS)
        self.partners = RatioPartners(rule.when) if isinstance(rule.when, Ratio) else None
        self.keys: list[SeriesKey] = []
        self.placements: list[Placement | None] = []
        self._watcher = make_watcher(rule, faults)
        self._slot_of: dict[SeriesKey, int] = {}
        self._first_step = 0

    def reset(self) -> None:
        """Forget states and series numbers of the attempt that has ended; series and usual ranges stay."""
        self.group.reset()
        self._watcher.reset()
        self.slot_of_id = np.zeros(0, np.intp)
        if self.partners:
            self.partners.reset()
        self.on = False
        self.announced = 0

    def extend(self, keys: Sequence[SeriesKey], placements: Sequence[Placement | None]) -> None:
        """Register the series that are new in the rank's table, as far as the rule looks at them."""
        on = self.rule.on  # most keys are of another kind: they cost no call, in tables of thousands for each rank
        slots = np.array(
            [self._slot(key) if key.kind in on.kinds and on.matches(key) else NO_SLOT for key in keys], np.intp
        )
        self.slot_of_id = np.concatenate((self.slot_of_id, slots))
        if len(self.keys) > len(self.group.members):
            self.group.grow(len(self.keys))
            self._watcher.grow(len(self.keys))
        if self.partners:
            self.partners.extend(keys)
        chosen = [row for row, slot in enumerate(slots.tolist()) if slot != NO_SLOT]
        if chosen:
            placed = [placements[row] for row in chosen]
            for row, placement in zip(chosen, placed, strict=True):
                self.placements[slots[row]] = placement
            self._watcher.meet(slots[chosen], [keys[row] for row in chosen], placed)

    def observe(self, slots: Slots, moments: Array, step: int) -> None:
        """Judge the rule's series of one step by their moments [8, n], and update the state.

        `slots` are the positions of these series among the rule's.
        """
        verdict = self._watcher.judge(slots, moments)
        if self.rule.share and np.count_nonzero(verdict.bad) < self.rule.share * len(verdict.bad):
            verdict = dataclasses.replace(verdict, bad=np.zeros_like(verdict.bad))
        restless = self.group.restless
        stirred = verdict.bad if restless is None else verdict.bad | restless[slots]
        if np.count_nonzero(stirred):
            chosen = np.flatnonzero(stirred)
            indices = as_indices(slots, len(self.keys))[chosen]
            part = verdict.of(chosen)
            self.group.advance(indices, part, step)
            self.group.record(indices, part, moments[:, chosen], self._watcher.baseline(indices))
            restless = self.group.restless
        self._watcher.learn(slots, None if restless is None else restless[slots])

    def take_verdict(
        self, indices: Indices, verdict: ConditionVerdict, moments: Array, baseline: Array, step: int
    ) -> None:
        """Update the state by what a comparison of ranks has found about this rank on `step`."""
        self.group.advance(indices, verdict, step)
        self.group.record(indices, verdict, moments, baseline)

    def begin(self, resumed: dict[str, Alert], moment: AlertMoment) -> None:
        """Record that an alert has begun, perhaps one that was firing before a restart."""
        self.on = True
        self._first_step = self.group.first_step
        known = resumed.get(self.rule.name)
        if known and known.attempt == moment.attempt and known.first_step <= self._first_step:
            self._first_step = resumed.pop(self.rule.name).first_step

    def change(self, moment: AlertMoment, *, held: bool) -> list[Alert]:
        """Return the alert to report as it begins, grows or ends, alone in a list; [] if there is nothing to report."""
        if not self.group.firing:
            reported, self.on, self.announced = self.announced, False, 0
            return [self.alert(AlertState.RESOLVED, moment)] if reported else []
        size = int(self.group.members.sum())
        if size == self.announced or (held and not self.announced):
            return []
        self.announced = size
        return [self.alert(AlertState.FIRING, moment)]

    def alert(self, state: AlertState, moment: AlertMoment) -> Alert:
        """Return the alert about the series that fire, or have just stopped firing, with this `state`."""
        return make_alert(self.rule, state, self._concern(self.group.members, self._first_step), moment)

    def pending_alert(self, moment: AlertMoment) -> Alert | None:
        """Return the pending alert; None if nothing is pending, or an alert fires."""
        since = self.group.pending_since()
        if since is None:
            return None
        return make_alert(self.rule, AlertState.PENDING, self._concern(self.group.pending(), since), moment)

    def _slot(self, key: SeriesKey) -> int:
        if key not in self._slot_of:
            self._slot_of[key] = len(self.keys)
            self.keys.append(key)
            self.placements.append(None)
        return self._slot_of[key]

    def _concern(self, series: NDArray[np.bool_], first_step: int) -> AlertConcern:
        slots = self.group.worst_first(series)
        return AlertConcern(slots=slots, keys=self.keys, peaks=self.group.peaks, first_step=first_step)


def compact(indices: NDArray[np.intp]) -> Slots:
    """Return ascending indices as a slice if they are consecutive, else unchanged: slices copy nothing."""
    first, last = int(indices[0]), int(indices[-1])
    if last - first + 1 == len(indices) and (np.diff(indices) == 1).all():
        return slice(first, last + 1)
    return indices
