"""A comparison as tables: msprobe's sheets, columns and words, with both sides the right way round, and ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from trainermon.analysis.environment.compare import NOT_COLLECTED
from trainermon.analysis.environment.differences import DifferenceLevel, EnvironmentComparison, SettingDifference

Cell = str | int | float | bool | None

ONLY_BENCH, ONLY_CMP = "only bench has this env", "only cmp has this env"
_IN_BENCHMARK, _IN_COMPARISON = "Only in benchmark", "Only in comparison"
_STATIC = "hyperparameters_static.json"
_DIFFS = ("max_relative_diff", "min_relative_diff", "mean_relative_diff", "norm_relative_diff")
_OURS = ("name", "bench_value", "cmp_value", "level", "reason")


class ResultSheet(NamedTuple):
    """A table.

    Attributes:
        name: The name of its sheet.
        titles: The columns.
        rows: The cells, row by row.
        levels: The level of each row, for its colour.
    """

    name: str
    titles: tuple[str, ...]
    rows: list[tuple[Cell, ...]]
    levels: list[DifferenceLevel]


def result_sheets(comparison: EnvironmentComparison, *, everything: bool = False) -> list[ResultSheet]:
    """Return the tables of a comparison, the summary first; equal settings only if `everything` is wanted.

    Of weights, inputs and draws, equal ones are listed too, as msprobe lists them.
    """
    summary = [(_TITLES.get(section, section), msprobe_word(level)) for section, level in comparison.sections.items()]
    sheets = [ResultSheet("summary", ("filename", "pass_check"), list(summary), list(comparison.sections.values()))]
    for section in comparison.sections:
        rows = [row for row in comparison.rows if row.section == section]
        if not everything and section not in _DETAILED:
            rows = [row for row in rows if row.level is not DifferenceLevel.SAME]
        if section in _DETAILED:
            rows = [row for row in rows if set(_DETAILED[section]) - {"weight_name"} <= set(row.details)]
        sheets.append(_sheet(section, rows))
    return sheets


def _sheet(section: str, rows: Sequence[SettingDifference]) -> ResultSheet:
    titles, cells = _LAYOUTS.get(section, (_OURS, _plain))
    if section in _DETAILED:
        titles = _DETAILED[section]
        cells = _details
    return ResultSheet(_TITLES.get(section, section), titles, [cells(row) for row in rows], [row.level for row in rows])


def msprobe_word(level: DifferenceLevel) -> str:
    """Return msprobe's word for a level: what changes no numbers passes."""
    return DifferenceLevel.SAME.value if level is DifferenceLevel.INFO else level.value


def cell_of(value: Any) -> Cell:
    """Return a value as a cell: lists and mappings as JSON."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return json.dumps(value, default=str, ensure_ascii=False)


def _variables(row: SettingDifference) -> tuple[Cell, ...]:
    bench, cmp = row.names
    values = ["" if value is None else cell_of(value) for value in row.values]
    return bench or ONLY_CMP, cmp or ONLY_BENCH, *values, row.level.value


def _packages(row: SettingDifference) -> tuple[Cell, ...]:
    values = ["None" if value is None else cell_of(value) for value in row.values]
    return row.name, *values, row.level.value


def _hyperparameters(row: SettingDifference) -> tuple[Cell, ...]:
    bench, cmp = row.names
    values = ["" if value is None else cell_of(value) for value in row.values]
    return _STATIC, bench or _IN_COMPARISON, cmp or _IN_BENCHMARK, *values, row.matched_with, row.level.value


def _plain(row: SettingDifference) -> tuple[Cell, ...]:
    values = [cell_of(value) for value in row.values]
    name = row.name if row.reason != NOT_COLLECTED else f"({row.name})"
    return name, *values, row.level.value, row.reason


def _details(row: SettingDifference) -> tuple[Cell, ...]:
    names = {"weight_name": row.name}
    return tuple(cell_of(row.details.get(title, names.get(title))) for title in _DETAILED[row.section])


_TITLES = {"variables": "env", "packages": "pip", "data": "dataset"}
_DETAILED = {
    "data": ("step", "rank", "tag", "equal", *_DIFFS),
    "weights": ("step", "rank", "weight_name", "equal", *_DIFFS),
    "random": ("op", "rank", "bench_stack", "cmp_stack", "bench_count", "cmp_count", "check_result"),
}
_Layout = tuple[tuple[str, ...], Callable[[SettingDifference], tuple[Cell, ...]]]
_LAYOUTS: dict[str, _Layout] = {
    "variables": (("bench_env_name", "cmp_env_name", "bench_value", "cmp_value", "level"), _variables),
    "packages": (("package", "bench version", "cmp version", "level"), _packages),
    "hyperparameters": (
        ("file_name", "bench_para", "cmp_para", "bench_value", "cmp_value", "matched_with", "level"),
        _hyperparameters,
    ),
}
