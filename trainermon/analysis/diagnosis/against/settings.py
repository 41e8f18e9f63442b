"""Which settings of two runs differ: the first place to look at, before any tensor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from trainermon.analysis.diagnosis.evidence import open_store
from trainermon.analysis.environment.compare import compare_packs
from trainermon.analysis.environment.differences import DifferenceLevel, SettingDifference
from trainermon.analysis.environment.packs import read_pack
from trainermon.analysis.environment.rules import LevelRules
from trainermon.analysis.environment.screen import shown_value
from trainermon.analysis.environment.settings import as_number, canonical_name
from trainermon.core.errors import PackError

if TYPE_CHECKING:
    import duckdb

HYPERPARAMETERS, MODEL = "hyperparameters", "model"
_RATE = "learning_rate"
_SAME = 1e-6  # what float32 keeps of a rate
_RATES = """
    SELECT step, max(learning_rate), min(learning_rate) FROM step_values
    WHERE learning_rate IS NOT NULL GROUP BY attempt, step ORDER BY attempt, step
"""


def setting_differences(run: Path, reference: Path, step: int | None = None) -> tuple[str, ...]:
    """Return the settings that differ and may change numbers, the gravest first, as texts: here, then in the reference.

    Of one gravity hyperparameters come first, then settings of the model, each once: an option of the script, and not
    what the optimizer has of it. The stored learning rates tell where no setting does, if they differ by `step`, the
    first on which values do: what comes later may follow from these. Empty if nothing differs, or is known.
    """
    rows = _rows(run, reference)
    rate = _rate_difference(run, reference, step) if _RATE not in map(_meaning, rows) else None
    return (*([rate] if rate else []), *map(_text, rows))


def _rows(run: Path, reference: Path) -> list[SettingDifference]:
    try:
        comparison = compare_packs(read_pack(run), read_pack(reference), LevelRules())
    except PackError:
        return []
    found: dict[tuple[str, ...], SettingDifference] = {}
    for level in (DifferenceLevel.ERROR, DifferenceLevel.WARNING):
        for row in sorted(comparison.of(level), key=_importance):
            found.setdefault((row.section, _meaning(row), *map(_number_or_text, row.values)), row)
    return list(found.values())


def _importance(row: SettingDifference) -> tuple[int, bool]:
    """Return a key that sorts what was set before where it ran."""
    order = (HYPERPARAMETERS, MODEL)
    return order.index(row.section) if row.section in order else len(order), "." in row.name


def _meaning(row: SettingDifference) -> str:
    """Return what a setting is called wherever it stands: `optimizer.lr` and `lr` are one."""
    if row.section != HYPERPARAMETERS:
        return row.name
    last = canonical_name(row.name).rpartition(".")[2]
    return _RATE if last == "initial_lr" else last  # what schedulers of torch keep of it


def _number_or_text(value: object) -> str:
    number = as_number(value)
    return str(value if number is None else number)


def _text(row: SettingDifference) -> str:
    here, there = map(shown_value, row.values)
    other = f"{row.names[1]} {there}" if None not in row.names and row.names[0] != row.names[1] else there
    return f"{row.section}: {row.name} is {here}, in the reference {other}"


def _rate_difference(run: Path, reference: Path, step: int | None) -> str | None:
    """Return the first step on which the smallest or largest learning rates of two runs differ, and both; else None."""
    with open_store(run) as ours, open_store(reference) as theirs:
        if ours is None or theirs is None:
            return None
        rates, others = (_rates(side) for side in (ours, theirs))
    apart = [key for key in rates if key in others and not math.isclose(rates[key], others[key], rel_tol=_SAME)]
    if not apart or (step is not None and apart[0][0] > step):
        return None
    return f"learning rate is {rates[apart[0]]:.6g} on step {apart[0][0]}, in the reference {others[apart[0]]:.6g}"


def _rates(connection: duckdb.DuckDBPyConnection) -> dict[tuple[int, str], float]:
    """Return the largest and the smallest learning rate of all ranks by step, in order."""
    rows = connection.execute(_RATES).fetchall()
    return {(step, which): rate for step, *both in rows for which, rate in zip(("max", "min"), both, strict=True)}
