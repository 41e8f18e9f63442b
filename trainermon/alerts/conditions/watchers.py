"""Which watcher computes which condition, and how many steps it needs to know what it knew."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from trainermon.alerts.conditions.condition import ConditionWatcher, NonFiniteWatcher, RelativeToMeanWatcher
from trainermon.alerts.conditions.contained import ConditionFaults, ContainedWatcher, ForeignWatcher
from trainermon.alerts.conditions.criteria import (
    Dead,
    Drift,
    Exceeds,
    Flat,
    Frozen,
    NonFinite,
    NotDecreasing,
    Ratio,
    RelativeToMean,
    Saturated,
    Spike,
    Straggler,
    Threshold,
    Vanishing,
)
from trainermon.alerts.conditions.drifts import DriftWatcher, ExceedsWatcher
from trainermon.alerts.conditions.limits import RatioWatcher, SaturatedWatcher, ThresholdWatcher
from trainermon.alerts.conditions.spikes import SpikeWatcher
from trainermon.alerts.conditions.trends import FlatWatcher, FrozenWatcher, NotDecreasingWatcher, VanishingWatcher
from trainermon.alerts.extensions import CustomCondition
from trainermon.alerts.rules import AlertRule

STRAGGLER_HISTORY = 128
"""So many values of its own work are a rank's usual pace."""


def make_watcher(rule: AlertRule, faults: ConditionFaults) -> ContainedWatcher:
    """Return a new watcher of `rule`; for rules that compare ranks, one without verdicts."""
    return ContainedWatcher(rule.name, lambda: _make(rule), faults)


def _make(rule: AlertRule) -> ConditionWatcher:
    when = rule.when
    if isinstance(when, CustomCondition):
        return ForeignWatcher(when, rule.on.statistic)
    if type(when) in _OF_MOMENTS:
        return _OF_MOMENTS[type(when)](when)
    if type(when) in _OF_STATISTIC:
        return _OF_STATISTIC[type(when)](when, rule.on.statistic)
    return ConditionWatcher()


_OF_MOMENTS: Mapping[type, Callable[[Any], ConditionWatcher]] = MappingProxyType(
    {NonFinite: NonFiniteWatcher, Saturated: SaturatedWatcher, Frozen: FrozenWatcher}
)
_OF_STATISTIC: Mapping[type, Callable[[Any, str], ConditionWatcher]] = MappingProxyType(
    {
        Threshold: ThresholdWatcher,
        Ratio: RatioWatcher,
        Spike: SpikeWatcher,
        Drift: DriftWatcher,
        Exceeds: ExceedsWatcher,
        RelativeToMean: RelativeToMeanWatcher,
        Flat: FlatWatcher,
        Vanishing: VanishingWatcher,
        NotDecreasing: NotDecreasingWatcher,
    }
)


def history_of(rule: AlertRule) -> int:
    """Return how many steps from before a restart affect what the rule says after it."""
    kept = rule.for_steps + rule.keep_steps
    steps = 1
    match rule.when:
        case Spike(window=window, adopt=adopt):
            kept += window + adopt
        case Threshold(over=over):
            kept += over
        case Drift(steps=steps, levels=levels, warmup=warmup):
            kept += levels + warmup
        case Exceeds(warmup=warmup, adopt=adopt):
            kept += warmup + adopt
        case Dead(lived=lived) | Frozen(lived=lived):
            kept += lived
        case NotDecreasing(steps=steps):
            kept += 1
        case Straggler(window=window):
            kept += window + STRAGGLER_HISTORY
    return kept * steps
