"""Alert rules over the statistics of all ranks of a node, step by step.

One `evaluate` takes one step of one rank through every rule: the condition on all series at once (`conditions`), how
long it has held (`state`), and which alerts are consequences of another one and therefore held back. Evaluating the
same records again gives the same alerts with the same ids.

Where each decision belongs: alerts/README.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trainermon.alerts.conditions import (
    DeadWatcher,
    FlatWatcher,
    NonFiniteWatcher,
    RelativeToMeanWatcher,
    Slots,
    ThresholdWatcher,
    Watcher,
    as_indices,
)
from trainermon.alerts.rules import (
    Condition,
    Dead,
    Flat,
    NonFinite,
    RelativeToMean,
    Rule,
    Spike,
    Threshold,
    inhibitors,
    later_inhibitors,
)
from trainermon.alerts.spikes import SpikeWatcher
from trainermon.alerts.state import Group
from trainermon.alerts.statistics import Array
from trainermon.alerts.wording import Concern, Moment, make_alert
from trainermon.monitor.values import STATISTICS, Alert, AlertState, SeriesKey, StatBlock

if TYPE_CHECKING:
    from trainermon.monitor.journal import Header

_NO_SLOT = -1
_MAX_PLANS = 16  # kinds that are collected at different intervals give a few patterns of series, not many


class RuleEngine:
    """Evaluates rules over any number of ranks, each with its own state.

    Baselines of a rank live as long as the engine; states are reset when the rank begins a new attempt, and alerts
    that were on are then resolved. A rule whose `inhibits` names others holds their alerts back on the same rank from
    the moment it fires until it is over; what still holds then is reported late, with its true first step.

    Cost: see benchmarks/bench_rules.py. A spike rule keeps four bytes for each place in the window of each series.

    Args:
        rules: From `load_rules`.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = tuple(rules)
        self._inhibitors = inhibitors(self._rules), later_inhibitors(self._rules)
        self._ranks: dict[int, _Rank] = {}

    @property
    def history_steps(self) -> int:
        """How many steps of every series `prime` needs so that no window is shorter than without a restart."""
        return max((_history(rule) for rule in self._rules), default=0)

    def evaluate(self, header: Header, keys: Sequence[SeriesKey], block: StatBlock) -> list[Alert]:
        """Return what changed on this step of this rank: alerts that begin, grow (same id) or are resolved.

        Args:
            header: Says which rank and attempt.
            keys: The rank's whole series table, as long as it is known; `block.series` are indices into it.
            block: One step. A step that is not newer than the last one of the attempt changes nothing, and neither
                does an attempt older than the last one.

        Returns:
            At most one alert per rule, and none for a healthy step.
        """
        rank = self._rank(header)
        changes = rank.take(header, keys, block)
        return rank.ended_unseen() + changes

    def prime(self, header: Header, keys: Sequence[SeriesKey], blocks: Iterable[StatBlock]) -> None:
        """Take steps that were evaluated before a restart, in order, without reporting anything.

        With all steps of the attempt the engine is afterwards what it was before; with the last `history_steps` the
        usual ranges are.
        """
        rank = self._rank(header)
        for block in blocks:
            rank.keep_unreported(rank.take(header, keys, block))

    def resume(self, alerts: Iterable[Alert]) -> None:
        """Tell which alerts were on before a restart; call it before `prime`.

        An alert that is found still on keeps its id, although the step on which it began may not be among the primed
        ones. One that is no longer on is reported as resolved by the first `evaluate` that has come as far.
        """
        for alert in alerts:
            self._rank_number(alert.rank).resume(alert)

    def firing(self) -> list[Alert]:
        """Return the alerts that are on and not held back, as of the last step of their rank."""
        return self._alerts(AlertState.FIRING, held=False)

    def inhibited(self) -> list[Alert]:
        """Return the alerts that are on and held back as consequences of others."""
        return self._alerts(AlertState.FIRING, held=True)

    def pending(self) -> list[Alert]:
        """Return what would become an alert if it held on."""
        return self._alerts(AlertState.PENDING, held=False)

    def _alerts(self, state: AlertState, *, held: bool) -> list[Alert]:
        return [alert for number in sorted(self._ranks) for alert in self._ranks[number].alerts(state, held=held)]

    def _rank(self, header: Header) -> _Rank:
        return self._rank_number(header.coordinates.rank)

    def _rank_number(self, number: int) -> _Rank:
        if number not in self._ranks:
            self._ranks[number] = _Rank(number, self._rules, *self._inhibitors)
        return self._ranks[number]


class _Rank:
    """All rules on one rank, and what is known of its alerts from before a restart of the agent."""

    def __init__(
        self,
        number: int,
        rules: Sequence[Rule],
        inhibited_by: Mapping[str, tuple[str, ...]],
        inhibited_later_by: Mapping[str, tuple[str, ...]],
    ) -> None:
        self._watches = {rule.name: _Watch(rule) for rule in rules}
        self._inhibited_by = inhibited_by
        self._inhibited_later_by = inhibited_later_by
        self._moment = Moment(rank=number, attempt=-1, step=-1, time_s=0.0)
        self._num_keys = 0
        self._plans: dict[bytes, list[tuple[_Watch, Slots, Slots]]] = {}
        self._resumed: dict[str, Alert] = {}  # by rule; not found again yet
        self._resumed_ids: set[str] = set()
        self._unreported: list[Alert] = []

    def resume(self, alert: Alert) -> None:
        """Remember that the alert was on before a restart."""
        self._resumed[alert.rule] = alert
        self._resumed_ids.add(alert.id)

    def keep_unreported(self, alerts: Iterable[Alert]) -> None:
        """Keep the ends of resumed alerts: they ended before the restart, but nobody was told."""
        ended = (alert for alert in alerts if alert.state is AlertState.RESOLVED)
        self._unreported += [alert for alert in ended if alert.id in self._resumed_ids]

    def take(self, header: Header, keys: Sequence[SeriesKey], block: StatBlock) -> list[Alert]:
        """Advance by one step and return what changed."""
        if header.attempt < self._moment.attempt:
            return []
        ended = self._begin_attempt(header.attempt) if header.attempt > self._moment.attempt else []
        if block.step <= self._moment.step:
            return ended
        self._moment = dataclasses.replace(self._moment, step=block.step, time_s=block.time_s)
        if len(keys) > self._num_keys:
            self._extend(keys)
        values = np.asarray(block.values, np.float64).reshape(len(STATISTICS), -1)
        with np.errstate(all="ignore"):
            for watch, rows, slots in self._plan(np.asarray(block.series)):
                watch.observe(slots, values[:, rows], block.step)
        return ended + self._changes()

    def ended_unseen(self) -> list[Alert]:
        """Return, once each, the ends of alerts that were on before a restart and are no longer.

        An alert whose step has not come again yet, as its records were not stored before the restart, is waited for.
        """
        if not self._resumed and not self._unreported:
            return []
        now = (self._moment.attempt, self._moment.step)
        lost = [alert for alert in self._resumed.values() if (alert.attempt, alert.step) <= now]
        for alert in lost:
            del self._resumed[alert.rule]
        ended, self._unreported = self._unreported, []
        return ended + [_lost(alert, self._moment) for alert in lost]

    def alerts(self, state: AlertState, *, held: bool) -> list[Alert]:
        """Return the alerts of this rank that are in `state`, held back or not."""
        if state is AlertState.PENDING:
            found = [watch.pending_alert(self._moment) for watch in self._watches.values()]
            return [alert for alert in found if alert is not None]
        return [
            watch.alert(AlertState.FIRING, self._moment)
            for watch in self._watches.values()
            if watch.group.firing and (watch.announced == 0) is held
        ]

    def _begin_attempt(self, attempt: int) -> list[Alert]:
        ended = []
        for watch in self._watches.values():
            if watch.announced:
                alert = watch.alert(AlertState.RESOLVED, self._moment)
                ended.append(dataclasses.replace(alert, message=f"{alert.message} (attempt {attempt} began)"))
            watch.reset()
        self._moment = dataclasses.replace(self._moment, attempt=attempt, step=-1)
        self._num_keys = 0
        self._plans.clear()
        return ended

    def _extend(self, keys: Sequence[SeriesKey]) -> None:
        added = keys[self._num_keys :]
        for watch in self._watches.values():
            watch.extend(added)
        self._num_keys = len(keys)

    def _plan(self, series: NDArray[Any]) -> list[tuple[_Watch, Slots, Slots]]:
        pattern = series.tobytes()
        if pattern not in self._plans:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[pattern] = [
                (watch, _compact(rows), _compact(watch.slot_of_id[series[rows]]))
                for watch in self._watches.values()
                if (rows := np.flatnonzero(watch.slot_of_id[series] != _NO_SLOT)).size
            ]
        return self._plans[pattern]

    def _changes(self) -> list[Alert]:
        changes = []
        for name, watch in self._watches.items():
            if watch.group.firing and not watch.on:
                watch.begin(self._resumed, self._moment)
            if watch.on:
                changes += watch.change(self._moment, held=self._is_consequence(name))
        return changes

    def _is_consequence(self, name: str) -> bool:
        always = (self._watches[other].group for other in self._inhibited_by[name])
        later = (self._watches[other].group for other in self._inhibited_later_by[name])
        began = self._watches[name].group.first_step
        return any(group.firing for group in always) or any(
            group.firing and group.first_step < began for group in later
        )


class _Watch:
    """One rule on one rank: its series, what it remembers of them, and what was reported.

    `on` is set while there is an alert, reported or not; `announced` is how many series were reported, 0 while the
    alert is held back.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.group = Group(rule)
        self.slot_of_id = np.zeros(0, np.intp)
        self.on = False
        self.announced = 0
        self._watcher = _watcher(rule.when, rule.on.statistic)
        self._keys: list[SeriesKey] = []
        self._slot_of: dict[SeriesKey, int] = {}
        self._first_step = 0

    def reset(self) -> None:
        """Forget states and numbers of the attempt that has ended; series and usual ranges stay."""
        self.group.reset()
        self._watcher.reset()
        self.slot_of_id = np.zeros(0, np.intp)
        self.on = False
        self.announced = 0

    def extend(self, keys: Sequence[SeriesKey]) -> None:
        """Take the next entries of the series table."""
        slots = [self._slot(key) if self.rule.on.matches(key) else _NO_SLOT for key in keys]
        self.slot_of_id = np.concatenate((self.slot_of_id, np.array(slots, np.intp)))
        if len(self._keys) > len(self.group.members):
            self.group.grow(len(self._keys))
            self._watcher.grow(len(self._keys))

    def observe(self, slots: Slots, moments: Array, step: int) -> None:
        """Advance by the moments of this step's series."""
        verdict = self._watcher.judge(slots, moments)
        restless = self.group.restless
        stirred = verdict.bad if restless is None else verdict.bad | restless[slots]
        chosen = np.flatnonzero(stirred)
        if chosen.size:
            indices = as_indices(slots, len(self._keys))[chosen]
            part = verdict.of(chosen)
            self.group.advance(indices, part, step)
            self.group.record(indices, part, moments[:, chosen], self._watcher.baseline(indices))
            restless = self.group.restless
        self._watcher.learn(slots, None if restless is None else restless[slots])

    def begin(self, resumed: dict[str, Alert], moment: Moment) -> None:
        """Note that an alert has begun, perhaps one that was known before a restart."""
        self.on = True
        self._first_step = self.group.first_step
        known = resumed.get(self.rule.name)
        if known and known.attempt == moment.attempt and known.first_step <= self._first_step:
            self._first_step = resumed.pop(self.rule.name).first_step

    def change(self, moment: Moment, *, held: bool) -> list[Alert]:
        """Return what is to be reported of the alert that is on: its begin, its growth or its end."""
        if not self.group.firing:
            reported, self.on, self.announced = self.announced, False, 0
            return [self.alert(AlertState.RESOLVED, moment)] if reported else []
        size = int(self.group.members.sum())
        if size == self.announced or (held and not self.announced):
            return []
        self.announced = size
        return [self.alert(AlertState.FIRING, moment)]

    def alert(self, state: AlertState, moment: Moment) -> Alert:
        """Return the alert that is on or has just ended."""
        return make_alert(self.rule, state, self._concern(self.group.members, self._first_step), moment)

    def pending_alert(self, moment: Moment) -> Alert | None:
        """Return what is pending; None if nothing is, or an alert is on."""
        since = self.group.pending_since()
        if since is None:
            return None
        return make_alert(self.rule, AlertState.PENDING, self._concern(self.group.pending(), since), moment)

    def _slot(self, key: SeriesKey) -> int:
        if key not in self._slot_of:
            self._slot_of[key] = len(self._keys)
            self._keys.append(key)
        return self._slot_of[key]

    def _concern(self, series: NDArray[np.bool_], first_step: int) -> Concern:
        slots = self.group.worst_first(series)
        return Concern(slots=slots, keys=self._keys, peaks=self.group.peaks, first_step=first_step)


def _watcher(when: Condition, statistic: str) -> Watcher:
    match when:
        case Spike():
            return SpikeWatcher(when, statistic)
        case RelativeToMean():
            return RelativeToMeanWatcher(when, statistic)
        case NonFinite():
            return NonFiniteWatcher(when)
        case Threshold():
            return ThresholdWatcher(when, statistic)
        case Dead():
            return DeadWatcher(when)
        case Flat():
            return FlatWatcher(when, statistic)


def _compact(indices: NDArray[np.intp]) -> Slots:
    """Return ascending neighbours as a slice: indexing with it copies nothing."""
    first, last = int(indices[0]), int(indices[-1])
    if last - first + 1 == len(indices) and (np.diff(indices) == 1).all():
        return slice(first, last + 1)
    return indices


def _history(rule: Rule) -> int:
    kept = rule.for_steps + rule.keep_steps
    return kept + rule.when.window + rule.when.adopt if isinstance(rule.when, Spike) else kept


def _lost(alert: Alert, moment: Moment) -> Alert:
    message = f"{alert.rule}: no longer on at step {moment.step} on rank {alert.rank}, began at step {alert.first_step}"
    return dataclasses.replace(
        alert, state=AlertState.RESOLVED, step=moment.step, time_s=moment.time_s, message=message
    )
