"""Conditions that other packages add, by name.

    [project.entry-points."trainermon.conditions"]
    mine = "package.module:MyCondition"

A rule then says `when: {mine: {limit: 3}}`. The entry point names a callable that takes the settings of the rule (a
mapping) and the name of its statistic, and returns a `conditions.Watcher`. It is called once per rank, in the agent.
How the rest of the agent is kept from its faults is decided in `contained`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from trainermon.core.errors import RuleError

GROUP = "trainermon.conditions"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CustomCondition:
    """A rule's condition that another installed package provides.

    Attributes:
        name: Name of its entry point.
        settings: The rule's settings for it.
    """

    name: str
    settings: Mapping[str, Any]


@lru_cache(maxsize=1)
def _entry_points() -> Mapping[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}


def conditions_of_others() -> tuple[str, ...]:
    """Return the names of the conditions that other installed packages provide."""
    return tuple(_entry_points())


def factory_of(name: str) -> Callable[[Mapping[str, Any], str], Any]:
    """Return the function that makes the watchers of the condition `name`, from its entry point.

    Raises:
        RuleError: Its package cannot be imported, or does not hold it.
    """
    point = _entry_points()[name]
    try:
        factory: Callable[[Mapping[str, Any], str], Any] = point.load()
    except Exception as error:  # the border: another package's import may do anything
        raise RuleError(f"condition {name!r} of {point.value} cannot be loaded: {error!r}") from error
    return factory
