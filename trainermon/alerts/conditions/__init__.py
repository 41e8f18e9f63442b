"""The conditions that rules may ask for; a condition of your own is a `ConditionWatcher`."""

from trainermon.alerts.conditions.condition import ConditionVerdict, ConditionWatcher, Slots

__all__ = ["ConditionVerdict", "ConditionWatcher", "Slots"]
