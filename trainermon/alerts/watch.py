"""One rule on one rank: its series, what is known of them, and what was reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainermon.alerts.across_ranks.partners import RatioPartners
from trainermon.alerts.conditions.condition import ConditionVerdict, Indices
from trainermon.alerts.conditions.contained import ContainedWatcher
from trainermon.alerts.conditions.criteria import ACROSS_RANKS, BreaksLaw, Ratio
from trainermon.alerts.rules import AlertRule
from trainermon.alerts.state import RuleState
from trainermon.alerts.wording import AlertConcern, AlertMoment, make_alert
from trainermon.core.derived import Array
from trainermon.core.values import Alert, AlertState, Placement, SeriesKey

NO_SLOT = -1


class RuleWatch:
    """Tracks one rule on one rank: its series, for how long its condition has held, and what was reported.

    Args:
        rule: The rule.
        watcher: Evaluates its condition, perhaps for other ranks too.

    Attributes:
        rule: The rule.
        watcher: Evaluates its condition.
        places: By position of a series among the rule's, its slot in `watcher`.
        group: For how long its condition holds, and for which series.
        slot_of_id: By number in the rank's table, the position of a series among the rule's; -1 if the rule does not
            look at it.
        on: Whether there is an alert, reported or not.
        announced: How many series were reported, 0 while the alert is held back.
        compares: Whether the verdict comes from a comparison of ranks.
        partners: Finds the divisors, for a ratio.
        keys: The rule's series.
        placements: How the tensor of each of them is placed.
    """

    def __init__(self, rule: AlertRule, watcher: ContainedWatcher) -> None:
        self.rule = rule
        self.watcher = watcher
        self.places: Indices = np.zeros(0, np.intp)
        self.group = RuleState(rule)
        self.slot_of_id = np.zeros(0, np.int32)
        self.on = False
        self.announced = 0
        self.compares = isinstance(rule.when, ACROSS_RANKS)
        self.partners = RatioPartners(rule.when) if isinstance(rule.when, Ratio) else None
        self.keys: list[SeriesKey] = []
        self.placements: list[Placement | None] = []
        self._slot_of: dict[SeriesKey, int] = {}
        self._first_step = 0

    def reset(self) -> None:
        """Forget states and series numbers of the attempt that has ended; series and usual ranges stay."""
        self.group.reset()
        self.watcher.reset(self.places)
        self.slot_of_id = np.zeros(0, np.int32)
        if self.partners:
            self.partners.reset()
        self.on = False
        self.announced = 0

    def extend(
        self,
        keys: Sequence[SeriesKey],
        placements: Sequence[Placement | None],
        chosen: Sequence[int],
        *,
        num_ranks: int,
    ) -> None:
        """Register the series that are new in the rank's table; `chosen` are positions of those the rule looks at.

        `num_ranks` are the ranks that are expected to show as many.
        """
        slots = np.full(len(keys), NO_SLOT, np.int32)
        for row in chosen:
            slots[row] = self._slot(keys[row])
        self.slot_of_id = np.concatenate((self.slot_of_id, slots))
        num_added = len(self.keys) - len(self.places)
        if num_added:
            self.group.grow(len(self.keys))
            self.places = np.concatenate((self.places, self.watcher.add(num_added, num_ranks=num_ranks)))
        if self.partners:
            self.partners.extend(keys)
        if len(chosen):
            placed = [placements[row] for row in chosen]
            for row, placement in zip(chosen, placed, strict=True):
                self.placements[slots[row]] = placement
            self.watcher.meet(self.places[slots[chosen]], [keys[row] for row in chosen], placed)

    @property
    def is_calm(self) -> bool:
        """Whether the condition holds on none of the series, and no alert is on."""
        return self.group.restless is None

    def take_verdict(self, slots: Indices, verdict: ConditionVerdict, moments: Array, step: int) -> None:
        """Update the state by what the condition says of the series `slots` of one step, by their moments [8, n].

        `slots` are positions among the rule's series.
        """
        if self.rule.share and np.count_nonzero(verdict.bad) < self.rule.share * len(verdict.bad):
            verdict = dataclasses.replace(verdict, bad=np.zeros_like(verdict.bad))
        restless = self.group.restless
        stirred = verdict.bad if restless is None else verdict.bad | restless[slots]
        if np.count_nonzero(stirred):
            chosen = np.flatnonzero(stirred)
            indices = slots[chosen]
            baseline = self.watcher.baseline(self.places[indices])
            self.update(indices, verdict.of(chosen), moments[:, chosen], baseline, step)

    def update(self, indices: Indices, verdict: ConditionVerdict, moments: Array, baseline: Array, step: int) -> None:
        """Update the state by the verdict on the series `indices`, and keep the worst values.

        `baseline` is what they were compared with. Series that are calm may be left out.
        """
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
        return AlertConcern(
            slots=slots, keys=self.keys, num_judged=self._num_judged, peaks=self.group.peaks, first_step=first_step
        )

    @property
    def _num_judged(self) -> int:
        if not isinstance(self.rule.when, BreaksLaw):
            return len(self.keys)
        return sum(key.kind is self.rule.on.kinds[0] for key in self.keys)
