"""Which watcher computes which condition, and how many steps it needs to know what it knew."""

from __future__ import annotations

from trainermon.alerts.conditions import DeadWatcher, NonFiniteWatcher, RelativeToMeanWatcher, Watcher
from trainermon.alerts.contained import ContainedWatcher, Faults, ForeignWatcher
from trainermon.alerts.criteria import (
    Dead,
    Flat,
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
from trainermon.alerts.extensions import Custom
from trainermon.alerts.limits import RatioWatcher, SaturatedWatcher, ThresholdWatcher
from trainermon.alerts.rules import Rule
from trainermon.alerts.spikes import SpikeWatcher
from trainermon.alerts.trends import FlatWatcher, NotDecreasingWatcher, VanishingWatcher

STRAGGLER_HISTORY = 128
"""So many values of its own work are a rank's usual pace."""


def make_watcher(rule: Rule, faults: Faults) -> Watcher:
    """Return what looks at the series of one rank for `rule`; one that says nothing for rules that compare ranks."""
    return ContainedWatcher(rule.name, lambda: _make(rule), faults)


def _make(rule: Rule) -> Watcher:
    if isinstance(rule.when, Custom):
        return ForeignWatcher(rule.when, rule.on.statistic)
    return _single(rule) or _lasting(rule) or Watcher()


def _single(rule: Rule) -> Watcher | None:
    """Return the watcher of a condition on a value by itself."""
    match rule.when:
        case NonFinite() as when:
            return NonFiniteWatcher(when)
        case Threshold() as when:
            return ThresholdWatcher(when, rule.on.statistic)
        case Ratio() as when:
            return RatioWatcher(when, rule.on.statistic)
        case Saturated() as when:
            return SaturatedWatcher(when)
        case Dead() as when:
            return DeadWatcher(when)
    return None


def _lasting(rule: Rule) -> Watcher | None:
    """Return the watcher of a condition on a value against those before."""
    match rule.when:
        case Spike() as when:
            return SpikeWatcher(when, rule.on.statistic)
        case RelativeToMean() as when:
            return RelativeToMeanWatcher(when, rule.on.statistic)
        case Flat() as when:
            return FlatWatcher(when, rule.on.statistic)
        case Vanishing() as when:
            return VanishingWatcher(when, rule.on.statistic)
        case NotDecreasing() as when:
            return NotDecreasingWatcher(when, rule.on.statistic)
    return None


def history_of(rule: Rule) -> int:
    """Return how many steps before a restart decide what the rule says after it."""
    kept = rule.for_steps + rule.keep_steps
    match rule.when:
        case Spike(window=window, adopt=adopt):
            return kept + window + adopt
        case Threshold(over=over):
            return kept + over
        case NotDecreasing(steps=steps):
            return (kept + 1) * steps
        case Straggler(window=window):
            return kept + window + STRAGGLER_HISTORY
    return kept
