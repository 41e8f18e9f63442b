"""Which settings of two runs differ and may change numbers: what to look at before any tensor."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainermon.analysis.environment.compare import compare_packs
from trainermon.analysis.environment.differences import DifferenceLevel, SettingDifference
from trainermon.analysis.environment.packs import read_pack
from trainermon.analysis.environment.rules import LevelRules
from trainermon.analysis.environment.screen import shown_value
from trainermon.analysis.environment.settings import as_number, canonical_name
from trainermon.core.errors import PackError

HYPERPARAMETERS, MODEL = "hyperparameters", "model"
RATE = "learning_rate"
_WIDTH = 140  # of a line on a terminal
_MAX_SHOWN = 5


def settings_apart(run: Path, reference: Path) -> list[SettingDifference]:
    """Return the settings that differ and may change numbers, the gravest first; none where a side kept none.

    Of one gravity hyperparameters come first, then settings of the model, each once: an option of the script, and not
    what the optimizer has of it.
    """
    try:
        comparison = compare_packs(read_pack(run), read_pack(reference), LevelRules())
    except PackError:
        return []
    found: dict[tuple[str, ...], SettingDifference] = {}
    for level in (DifferenceLevel.ERROR, DifferenceLevel.WARNING):
        for row in sorted(comparison.of(level), key=_importance):
            found.setdefault((row.section, meaning_of(row), *map(_number_or_text, row.values)), row)
    return list(found.values())


def _importance(row: SettingDifference) -> tuple[int, bool]:
    """Return a key that sorts what was set before where it ran."""
    order = (HYPERPARAMETERS, MODEL)
    return order.index(row.section) if row.section in order else len(order), "." in row.name


def meaning_of(row: SettingDifference) -> str:
    """Return what a setting is called wherever it stands: `optimizer.lr` and `lr` are one."""
    if row.section != HYPERPARAMETERS:
        return row.name
    last = canonical_name(row.name).rpartition(".")[2]
    return RATE if last == "initial_lr" else last  # what schedulers of torch keep of it


def _number_or_text(value: object) -> str:
    number = as_number(value)
    return str(value if number is None else number)


def text_of(row: SettingDifference) -> str:
    """Return a difference as a text: here, then in the reference."""
    here, there = map(shown_value, row.values)
    other = f"{row.names[1]} {there}" if None not in row.names and row.names[0] != row.names[1] else there
    return f"{row.section}: {row.name} is {here}, in the reference {other}"


def lines_of(differences: Sequence[str]) -> Iterator[str]:
    """Yield what a terminal shows of such texts before all else: whatever else is found may follow from them."""
    if not differences:
        return
    verb = "setting differs" if len(differences) == 1 else "settings differ"
    yield f"{len(differences)} {verb}, look there first, what follows may come of it:"
    yield from ("  " + textwrap.shorten(text, _WIDTH, placeholder=" …") for text in differences[:_MAX_SHOWN])
    if len(differences) > _MAX_SHOWN:
        yield f"and {len(differences) - _MAX_SHOWN} more: trainermon env compare"
    yield ""
