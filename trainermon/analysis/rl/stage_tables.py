"""The tables of two runs' stages: a workbook for each key, with the columns of msprobe's SingleComparator."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trainermon.analysis.environment.differences import DifferenceLevel
from trainermon.analysis.environment.output.sheets import Cell, ResultSheet
from trainermon.analysis.environment.output.workbook import workbook_of
from trainermon.analysis.rl.stage_differences import StageComparison, StageDifference
from trainermon.core.terminal.results import writing

TITLES = (
    "step",
    "rank",
    "micro_step",
    "id",
    "shape1",
    "shape2",
    "相同元素百分比(%)",  # equal elements
    "首个不匹配元素索引",  # index of the first element that is not, flattened
    "最大绝对误差",  # largest difference
    "最大相对误差",  # largest relative difference
    "误差在千分之一内元素占比(%)",  # within a thousandth
    "误差在百分之一内元素占比(%)",  # within a hundredth
    "dtype1",
    "dtype2",
)
"""The columns: msprobe's twelve, then ours."""


def write_tables(found: StageComparison, folder: Path) -> list[Path]:
    """Write `KEY.xlsx` for every key that both runs have, and return their paths; arrays that differ are coloured.

    Raises:
        OSError: A file cannot be written.
    """
    by_key: dict[str, list[StageDifference]] = {}
    for each in found.arrays:
        by_key.setdefault(each.key, []).append(each)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for key, arrays in by_key.items():
        levels = [DifferenceLevel.SAME if each.is_equal else DifferenceLevel.ERROR for each in arrays]
        rows = [tuple(_cells(each)) for each in arrays]
        paths.append(folder / f"{key}.xlsx")
        with writing(paths[-1]) as file:
            file.write(workbook_of([ResultSheet("Sheet1", TITLES, rows, levels)]))
    return paths


def _cells(found: StageDifference) -> Iterator[Cell]:
    yield from (found.step, found.rank, found.micro_step)
    yield int(found.part) if found.part.isdigit() else found.part or 0
    yield from (str(list(shape)) for shape in found.shapes)
    yield 100.0 * found.equal
    yield None if found.first is None else _flat(found)
    yield from (_plain(found.max_abs), _plain(found.max_relative))
    yield from (100.0 * found.within_thousandth, 100.0 * found.within_hundredth)
    yield from found.dtypes


def _flat(found: StageDifference) -> int:
    """Return the number of the first unequal element in the part that both arrays have."""
    one, other = found.shapes
    if len(one) != len(other):
        one, other = (math.prod(one),), (math.prod(other),)
    shared = tuple(map(min, one, other))
    return int(np.ravel_multi_index(found.first or (), shared)) if shared else 0


def _plain(number: float) -> Cell:
    return number if math.isfinite(number) else str(number)
