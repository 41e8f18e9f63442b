"""Reads folders of csv files of msprobe's form, whoever wrote them: one table per kind, row by row."""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from trainermon.core.errors import StoreError
from trainermon.core.naming import FEATURE_FILES
from trainermon.msprobe.csv_files import FILE_NAME, MICRO_STEP, NO_VALUE, matching_folders

KINDS = (
    "actv",
    "actv_grad",
    "exp_avg",
    "exp_avg_sq",
    "grad_unreduced",
    "grad_reduced",
    "param_origin",
    "param_updated",
    "other",
    "param_used",
    "state",
    "update",
    "ratio",
    "actv_recomputed",
    "buffer",
    "feature",
    *FEATURE_FILES,
)
"""Kinds that are converted, msprobe's first."""
WITHOUT_NUMBERS = frozenset({"vpp_stage", "name", "step", MICRO_STEP, "shape", "dtype", "id"})

_log = logging.getLogger(__name__)


class CsvTableRow(NamedTuple):
    """One row read from a csv file.

    Attributes:
        stage: Number of the virtual pipeline stage.
        name: Module or parameter.
        step: The step.
        micro_step: Number of the forward and backward within the step; None: once per step.
        values: Its statistics by name; NaN where the file says so.
    """

    stage: int
    name: str
    step: int
    micro_step: int | None
    values: dict[str, float]


def rank_folders(path: Path, start: str | None = None, end: str | None = None) -> dict[int, Path]:
    """Return, by rank, the newest folder of csv files below `path` that was begun between `start` and `end`.

    Both are times as `Dec03_21-34-40`, included; None: no limit.

    Raises:
        StoreError: There is none, or a limit is no timestamp.
    """
    try:
        found = matching_folders(path.iterdir() if path.is_dir() else (), start, end)
    except ValueError as error:
        raise StoreError(str(error)) from None
    if not found:
        when = f" from {start or 'the beginning'} to {end or 'now'}" if start or end else ""
        raise StoreError(
            f"{path}: found no folder such as Dec03_21-34-40-rank0-1f0c2a9b{when}; give the one above them"
        )
    return found


def read_tables(folder: Path, kinds: Sequence[str] = KINDS) -> Iterator[tuple[str, list[CsvTableRow]]]:
    """Yield (kind, rows) for each csv file of the folder, by kind and step. Files of other kinds are passed over.

    A row that is not as wide as its header, which msprobe writes of collectives, is left out and counted in the log.
    """
    files: dict[str, list[tuple[int, Path]]] = {kind: [] for kind in kinds}
    for path in folder.glob("*.csv"):
        match = FILE_NAME.fullmatch(path.name)
        if match and match["kind"] in files:
            files[match["kind"]].append((int(match["first"]), path))
    for kind, of_kind in files.items():
        for _, path in sorted(of_kind):
            yield kind, _read(path)


def _read(path: Path) -> list[CsvTableRow]:
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        found = [_row(header, cells) for cells in reader]
    rows = [row for row in found if row is not None]
    if len(rows) < len(found):
        num_broken = len(found) - len(rows)
        _log.warning("%s: %d rows are not of the form that the header says and are left out", path, num_broken)
    return rows


def _row(header: list[str], values: list[str]) -> CsvTableRow | None:
    try:
        cells = dict(zip(header, values, strict=True))
        return CsvTableRow(
            stage=int(cells["vpp_stage"]),
            name=cells["name"],
            step=int(cells["step"]),
            micro_step=int(cells[MICRO_STEP]) if cells.get(MICRO_STEP, NO_VALUE) != NO_VALUE else None,
            values={op: float(value or "nan") for op, value in cells.items() if op not in WITHOUT_NUMBERS},
        )
    except (ValueError, KeyError):
        return None
