"""Which settings of two runs differ: the first place to look at, before any tensor."""

from __future__ import annotations

from pathlib import Path

from trainermon.analysis.environment.compare import compare_packs
from trainermon.analysis.environment.differences import DifferenceLevel, SettingDifference
from trainermon.analysis.environment.packs import read_pack
from trainermon.analysis.environment.rules import LevelRules
from trainermon.analysis.environment.screen import shown_value
from trainermon.core.errors import PackError


def setting_differences(run: Path, reference: Path) -> tuple[str, ...]:
    """Return the settings that differ and may change numbers, the gravest first, as texts: here, then in the reference.

    Empty if none does, or a run kept none (`environment: false`, or an older version).
    """
    try:
        comparison = compare_packs(read_pack(run), read_pack(reference), LevelRules())
    except PackError:
        return ()
    rows = comparison.of(DifferenceLevel.ERROR) + comparison.of(DifferenceLevel.WARNING)
    return tuple(map(_text, rows))


def _text(row: SettingDifference) -> str:
    here, there = map(shown_value, row.values)
    return f"{row.section}: {row.name} is {here}, in the reference {there}"
