"""All rules on one rank: which series of a step each of them looks at, which alerts are held back, what is reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainermon.alerts.across_ranks.partners import RatioDivisors
from trainermon.alerts.conditions.condition import Slots
from trainermon.alerts.conditions.contained import ConditionFaults
from trainermon.alerts.conditions.criteria import Reported
from trainermon.alerts.learned import LossLevel
from trainermon.alerts.rules import AlertRule, inhibitors, later_inhibitors
from trainermon.alerts.watch import NO_SLOT, RuleWatch, compact
from trainermon.alerts.wording import AlertMoment
from trainermon.core.catalogue import LOSS_SCALE_SERIES, SKIPPED_SERIES
from trainermon.core.derived import SUM, Array
from trainermon.core.values import STATISTICS, Alert, AlertState, Kind, SeriesKey, StatBlock

if TYPE_CHECKING:
    from trainermon.core.journal import Header

_MAX_PLANS = 16  # kinds that are collected at different intervals give a few patterns of series, not many


class RuleRows(NamedTuple):
    """Which rows of a block (one step of one rank) one rule looks at.

    Attributes:
        watch: The rule, as it watches the rank.
        rows: The rows of the block.
        slots: The same series, as positions among those of the rule.
        divisors: Where the divisors are, for a ratio; else None.
    """

    watch: RuleWatch
    rows: Slots
    slots: Slots
    divisors: RatioDivisors | None

    def moments(self, values: Array) -> Array:
        """Return the moments [8, n] that the rule looks at, out of a block's `values`; [17, n] for a ratio."""
        own: Array = values[:, self.rows]
        return own if self.divisors is None else self.divisors.join(own, values)


class RowPlan(NamedTuple):
    """Which rows of a block all rules look at; the same for all steps that show the same series.

    Attributes:
        looks: For each rule that looks at any row, the rule and its rows; other rules are left out.
        losses: The rows of the losses.
        skipped: The row that tells that the framework skipped the step; -1: there is none.
        loss_scale: The row of the loss scale; -1: there is none.
    """

    looks: tuple[RuleRows, ...]
    losses: NDArray[np.intp]
    skipped: int
    loss_scale: int

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
    """

    def __init__(self, watches: Sequence[RuleWatch]) -> None:
        self._watches = watches
        self._plans: dict[bytes, RowPlan] = {}
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
        for watch in self._watches:
            watch.extend(added, placements)
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
        pattern = series.tobytes()
        if pattern not in self._plans:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[pattern] = RowPlan(
                tuple(self._looks(series)),
                np.flatnonzero(np.isin(series, self._loss_ids)),
                _place(series, self._skipped_id),
                _place(series, self._scale_id),
            )
        return self._plans[pattern]

    def _looks(self, series: NDArray[Any]) -> Iterator[RuleRows]:
        for watch in self._watches:
            rows = np.flatnonzero(watch.slot_of_id[series] != NO_SLOT)
            divisors = None
            if watch.partners:
                rows, divisors = watch.partners.find(series, rows)
            if rows.size:
                yield RuleRows(watch, compact(rows), compact(watch.slot_of_id[series[rows]]), divisors)


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
        self.firing_anywhere: dict[str, set[int]] = {}
        self._always = inhibitors(rules)
        self._later = later_inhibitors(rules)

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
    """Evaluates all rules on one rank, step by step; also takes up its alerts from before a restart of the agent.

    Args:
        number: The rank.
        shared: What all ranks share.

    Attributes:
        moment: The last step of the rank.
        took_step: Whether the last `advance` was given a new step.
        compared: What rules that compare ranks need of the last step: `(watch, slots, moments)`.
    """

    def __init__(self, number: int, shared: RuleSet) -> None:
        self.moment = AlertMoment(rank=number, attempt=-1, step=-1, time_s=0.0)
        self.took_step = False
        self.compared: list[tuple[RuleWatch, Slots, Array]] = []
        self._shared = shared
        self._watches = {rule.name: RuleWatch(rule, shared.faults) for rule in shared.rules}
        self._plans = RowPlans(tuple(self._watches.values()))
        self._loss_level = LossLevel()
        self._compared_place = (-1, -1)  # attempt and step up to which ranks were compared
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

    def advance(self, header: Header, keys: Sequence[SeriesKey], block: StatBlock) -> list[Alert]:
        """Evaluate all rules on one step of the rank; return the alerts that begin, grow or end."""
        self.compared = []
        self.took_step = False
        if header.attempt < self.moment.attempt:
            return []
        ended = self._begin_attempt(header.attempt) if header.attempt > self.moment.attempt else []
        if block.step <= self.moment.step:
            return ended
        self.took_step = True
        self.moment = self.moment.at(block.step, block.time_s)
        self._plans.extend(header, keys)
        values = np.asarray(block.values, np.float64).reshape(len(STATISTICS), -1)
        with np.errstate(all="ignore"):
            self._observe(self._plans.of(np.asarray(block.series)), values, block.step)
        return ended + self._changes(self._watches.values(), self.moment)

    def take_comparison(self, watch: RuleWatch, step: int, time_s: float) -> list[Alert]:
        """Return the alerts that a comparison of ranks changed; its step may be behind the rank's."""
        self._compared_place = (self.moment.attempt, step)
        moment = self.moment.at(step, time_s)
        changes = self._changes([watch], moment)
        self._shared.note_firing(watch.rule.name, moment.rank, is_firing=watch.group.firing)
        return changes

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
        now = self._compared_place if compares else (self.moment.attempt, self.moment.step)
        return (alert.attempt, alert.step) <= now

    def _begin_attempt(self, attempt: int) -> list[Alert]:
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

    def _observe(self, plan: RowPlan, values: Array, step: int) -> None:
        is_excused = plan.is_excused(values)
        self._loss_level.observe(values[:, plan.losses])
        for look in plan.looks:
            if is_excused and not look.watch.rule.on.skipped:
                continue
            if look.watch.compares:
                self.compared.append((look.watch, look.slots, look.moments(values)))
            else:
                look.watch.observe(look.slots, look.moments(values), step)

    def _changes(self, watches: Iterable[RuleWatch], moment: AlertMoment) -> list[Alert]:
        changes = []
        for watch in watches:
            if not watch.on:
                if not watch.group.firing:
                    continue
                watch.begin(self._resumed, moment)
            changes += watch.change(moment, held=self._is_held(watch))
        return changes

    def _is_held(self, watch: RuleWatch) -> bool:
        if self._loss_level.is_learned and not watch.rule.on.learned:
            return True
        return self._shared.is_consequence(watch, self._watches)


def _place(series: NDArray[Any], number: int) -> int:
    found = np.flatnonzero(series == number)
    return int(found[0]) if number >= 0 and found.size else -1


def _lost(alert: Alert, moment: AlertMoment) -> Alert:
    message = f"{alert.rule}: no longer on at step {moment.step} on rank {alert.rank}, began at step {alert.first_step}"
    return dataclasses.replace(
        alert, state=AlertState.RESOLVED, step=moment.step, time_s=moment.time_s, message=message
    )
