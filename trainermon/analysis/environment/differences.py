"""What a comparison of two environments is made of."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from typing import Any

from trainermon.core.environment.pack import SECTIONS


class DifferenceLevel(Enum):
    """What a difference can do to the numbers of a training; the values are msprobe's words, `info` is ours."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    SAME = "pass"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SettingDifference:
    """One setting on both sides.

    Attributes:
        section: The section it belongs to.
        names: What it is called on each side; None where that side has none.
        values: Its values; None where a side has none.
        level: What the difference can do.
        reason: Why, in a few words; "" if level and values say it all.
        matched_with: How a name was paired: `pure name`, `mapping`; "" otherwise.
        details: Further columns, by name.
    """

    section: str
    names: tuple[str | None, str | None]
    values: tuple[Any, Any]
    level: DifferenceLevel
    reason: str = ""
    matched_with: str = ""
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name, on the side that has one."""
        return self.names[0] if self.names[0] is not None else self.names[1] or ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentComparison:
    """What differs between two environments, and what does not.

    Attributes:
        sources: Where the two were read from: the benchmark, and what is compared with it.
        rows: Every setting that was compared, section by section.
        sections: The level of each section that a side has.
        notes: What was not collected.
    """

    sources: tuple[str, str]
    rows: tuple[SettingDifference, ...]
    sections: Mapping[str, DifferenceLevel]
    notes: tuple[str, ...] = ()

    def of(self, *levels: DifferenceLevel, section: str | None = None) -> tuple[SettingDifference, ...]:
        """Return the rows of some levels, of one section or of all."""
        return tuple(row for row in self.rows if row.level in levels and section in (None, row.section))

    @property
    def headline(self) -> str:
        """The result in one line."""
        counts = Counter(row.level for row in self.rows)
        errors, warnings = counts[DifferenceLevel.ERROR], counts[DifferenceLevel.WARNING]
        infos = counts[DifferenceLevel.INFO]
        if not errors + warnings + infos:
            return f"env: no difference in {len(self.rows):,} settings"
        noun = "difference" if errors == 1 else "differences"
        verb = "changes" if errors == 1 else "change"
        return (
            f"env: {errors:,} {noun} {verb} numbers, {warnings:,} may, {infos:,} {'does' if infos == 1 else 'do'} not"
        )


LEVELS_BY_WEIGHT = (DifferenceLevel.ERROR, DifferenceLevel.WARNING, DifferenceLevel.INFO, DifferenceLevel.SAME)


def worst(rows: tuple[SettingDifference, ...]) -> DifferenceLevel:
    """Return the gravest level of some rows."""
    levels = {row.level for row in rows}
    return next((level for level in LEVELS_BY_WEIGHT if level in levels), DifferenceLevel.SAME)


def in_order(rows: list[SettingDifference]) -> tuple[SettingDifference, ...]:
    """Return rows by section, the gravest first, then by name."""
    return tuple(
        sorted(rows, key=lambda row: (SECTIONS.index(row.section), LEVELS_BY_WEIGHT.index(row.level), row.name))
    )
