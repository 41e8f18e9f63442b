"""All rules on one rank: which alerts are held back, and what is reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trainermon.alerts.batch import TakenStep
from trainermon.alerts.conditions.contained import ConditionFaults, ContainedWatcher
from trainermon.alerts.conditions.criteria import Reported
from trainermon.alerts.conditions.watchers import make_watcher
from trainermon.alerts.extensions import CustomCondition
from trainermon.alerts.learned import LossLevel
from trainermon.alerts.rows import RowPlans
from trainermon.alerts.rules import AlertRule, inhibitors, later_inhibitors
from trainermon.alerts.watch import RuleWatch
from trainermon.alerts.wording import AlertMoment
from trainermon.core.values import STATISTICS, Alert, AlertState, Kind, SeriesKey, StatBlock

if TYPE_CHECKING:
    from trainermon.core.journal import Header


class RuleSet:
    """What the rules of all ranks share: who holds back whose alerts, and which conditions have failed.

    Attributes:
        rules: The rules that look at series.
        faults: Errors of conditions.
        firing_anywhere: By rule that compares ranks or is reported, the ranks on which it fires: such an alert holds
            back its consequences on all ranks, as those who wait for a slow rank are slow too.
    """

    def __init__(self, rules: Sequence[AlertRule]) -> None:
        self.rules = tuple(rule for rule in rules if not isinstance(rule.when, Reported))
        self.faults = ConditionFaults()
        self._watchers: dict[str, ContainedWatcher] = {}
        self._matched: tuple[Sequence[SeriesKey], list[list[int]]] = ((), [[] for _ in self.rules])
        self.firing_anywhere: dict[str, set[int]] = {}
        self._always = inhibitors(rules)
        self._later = later_inhibitors(rules)

    def watcher_of(self, rule: AlertRule) -> ContainedWatcher:
        """Return what evaluates the condition of `rule`: the same for all ranks, unless another package provides it."""
        if isinstance(rule.when, CustomCondition):
            return make_watcher(rule, self.faults)
        if rule.name not in self._watchers:
            self._watchers[rule.name] = make_watcher(rule, self.faults)
        return self._watchers[rule.name]

    def matching(self, keys: Sequence[SeriesKey]) -> Sequence[Sequence[int]]:
        """Return for each of `rules` the positions of those of `keys` that it looks at; ranks often show the same."""
        if self._matched[0] != keys:
            by_kind: dict[Kind, list[int]] = {}
            for place, key in enumerate(keys):
                by_kind.setdefault(key.kind, []).append(place)
            self._matched = keys, [_matching(rule, keys, by_kind) for rule in self.rules]
        return self._matched[1]

    def note_firing(self, rule: str, rank: int, *, is_firing: bool) -> None:
        """Record that an alert of `rule` on `rank`, one that holds others back on all ranks, has begun or ended."""
        ranks = self.firing_anywhere.setdefault(rule, set())
        (ranks.add if is_firing else ranks.discard)(rank)

    def is_consequence(self, watch: RuleWatch, watches: Mapping[str, RuleWatch]) -> bool:
        """Return whether the alert of `watch` follows from another one; `watches` are the rank's."""
        name, began = watch.rule.name, watch.group.first_step
        if any(self.firing_anywhere.get(other) for other in self._always[name]):
            return True
        always = (watches[other].group for other in self._always[name] if other in watches)
        later = (watches[other].group for other in self._later[name] if other in watches)
        return any(group.firing for group in always) or any(
            group.firing and group.first_step < began for group in later
        )


class RankRules:
    """Tracks all rules on one rank, step by step; also takes up its alerts from before a restart of the agent.

    Args:
        number: The rank.
        shared: What all ranks share.

    Attributes:
        moment: The last step of the rank.
    """

    def __init__(self, number: int, shared: RuleSet) -> None:
        self.moment = AlertMoment(rank=number, attempt=-1, step=-1, time_s=0.0)
        self._shared = shared
        self._watches = {rule.name: RuleWatch(rule, shared.watcher_of(rule)) for rule in shared.rules}
        self._has_alerts = False
        self._plans = RowPlans(tuple(self._watches.values()), shared.matching)
        self._loss_level = LossLevel()
        self._compared_places: dict[str, tuple[int, int]] = {}  # by rule, the last attempt and step that was compared
        self._resumed: dict[str, Alert] = {}  # by rule; not found again yet
        self._resumed_ids: set[str] = set()
        self._unreported: list[Alert] = []

    def resume(self, alert: Alert) -> None:
        """Register an alert that was firing before a restart of the agent, so that it continues or is resolved."""
        self._resumed[alert.rule] = alert
        self._resumed_ids.add(alert.id)

    def keep_unreported(self, alerts: Iterable[Alert]) -> None:
        """Keep the ends of resumed alerts that ended before the restart but were never reported."""
        ended = (alert for alert in alerts if alert.state is AlertState.RESOLVED)
        self._unreported += [alert for alert in ended if alert.id in self._resumed_ids]

    def begin_attempt(self, attempt: int) -> list[Alert]:
        """Forget the states of earlier attempts, if `attempt` is a new one; return the alerts that end with them."""
        if attempt <= self.moment.attempt:
            return []
        ended = []
        for watch in self._watches.values():
            if watch.announced:
                alert = watch.alert(AlertState.RESOLVED, self.moment)
                ended.append(dataclasses.replace(alert, message=f"{alert.message} (attempt {attempt} began)"))
            if watch.compares:
                self._shared.note_firing(watch.rule.name, self.moment.rank, is_firing=False)
            watch.reset()
        self.moment = dataclasses.replace(self.moment, attempt=attempt, step=-1)
        self._plans.reset()
        self._loss_level = LossLevel()
        return ended

    def take(self, header: Header, keys: Sequence[SeriesKey], block: StatBlock) -> TakenStep | None:
        """Begin a step of the present attempt; None if it is not newer than the last one."""
        if header.attempt < self.moment.attempt or block.step <= self.moment.step:
            return None
        self._plans.extend(header, keys)
        values = np.asarray(block.values, np.float64).reshape(len(STATISTICS), -1)
        with np.errstate(all="ignore"):
            plan = self._plans.of(np.asarray(block.series))
            is_excused = plan.is_excused(values)
            self._loss_level.observe(values[:, plan.losses])
        self.moment = self.moment.at(block.step, block.time_s)
        return TakenStep(block.step, plan, values, is_excused)

    def changes(self, *, is_calm: bool) -> list[Alert]:
        """Return the alerts that begin, grow or end with the step; `is_calm`: no condition holds on this rank."""
        if is_calm and not self._has_alerts:
            return []
        return self._changes(self._watches.values(), self.moment)

    def take_comparison(self, watch: RuleWatch, step: int, time_s: float) -> list[Alert]:
        """Return the alerts that a comparison of ranks changed; its step may be behind the rank's."""
        moment = self.moment.at(step, time_s)
        changes = self._changes([watch], moment)
        self._shared.note_firing(watch.rule.name, moment.rank, is_firing=watch.group.firing)
        return changes

    def note_compared(self, rules: Iterable[str], step: int) -> None:
        """Record that `rules` compared ranks on `step`: an alert that was to come by then does not come any more."""
        self._compared_places.update(dict.fromkeys(rules, (self.moment.attempt, step)))

    def ended_unseen(self) -> list[Alert]:
        """Return, once each, the ends of alerts that fired before a restart of the agent and no longer do.

        An alert whose step has not come again yet, as its records were not stored before the restart, is waited for.
        """
        if not self._resumed and not self._unreported:
            return []
        lost = [alert for alert in self._resumed.values() if self._is_past(alert)]
        for alert in lost:
            del self._resumed[alert.rule]
        ended, self._unreported = self._unreported, []
        return ended + [_lost(alert, self.moment) for alert in lost]

    def alerts(self, state: AlertState, *, held: bool) -> list[Alert]:
        """Return the rank's alerts that are in `state`.

        Those held back as consequences of others if `held`, else the rest.
        """
        if state is AlertState.PENDING:
            found = [watch.pending_alert(self.moment) for watch in self._watches.values()]
            return [alert for alert in found if alert is not None]
        return [
            watch.alert(AlertState.FIRING, self.moment)
            for watch in self._watches.values()
            if watch.group.firing and (watch.announced == 0) is held
        ]

    def _is_past(self, alert: Alert) -> bool:
        watch = self._watches.get(alert.rule)
        compares = watch is not None and watch.compares and alert.attempt == self.moment.attempt
        now = (self.moment.attempt, self.moment.step)
        if compares:
            now = self._compared_places.get(alert.rule, (-1, -1))
        return (alert.attempt, alert.step) <= now

    def _changes(self, watches: Iterable[RuleWatch], moment: AlertMoment) -> list[Alert]:
        changes = []
        for watch in watches:
            if not watch.on:
                if not watch.group.firing:
                    continue
                watch.begin(self._resumed, moment)
            changes += watch.change(moment, held=self._is_held(watch))
        self._has_alerts = any(watch.on for watch in self._watches.values())
        return changes

    def _is_held(self, watch: RuleWatch) -> bool:
        if self._loss_level.is_learned and not watch.rule.on.learned:
            return True
        return self._shared.is_consequence(watch, self._watches)


def _matching(rule: AlertRule, keys: Sequence[SeriesKey], by_kind: Mapping[Kind, Sequence[int]]) -> list[int]:
    """Return the positions of the series that a rule looks at; most are of another kind and cost no call."""
    return sorted(place for kind in rule.on.kinds for place in by_kind.get(kind, ()) if rule.on.matches(keys[place]))


def _lost(alert: Alert, moment: AlertMoment) -> Alert:
    message = f"{alert.rule}: no longer on at step {moment.step} on rank {alert.rank}, began at step {alert.first_step}"
    return dataclasses.replace(
        alert, state=AlertState.RESOLVED, step=moment.step, time_s=moment.time_s, message=message
    )
