"""CSV files with the names and columns of msprobe's monitor: a folder per rank and start, a file per kind and steps.

    <run>/csv/Dec03_21-34-40-rank0-1f0c2a9b/actv_0-0.csv

Every file is rectangular: one header, each row as wide. Differences in what the columns say: docs/msprobe.md.
"""

from __future__ import annotations

import csv
import datetime
import hashlib
import io
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainermon.core.journal import Header
from trainermon.core.naming import (
    COLUMNS,
    FEATURE_FILES,
    SCALARS,
    SeriesNames,
    SeriesPlace,
    dtype_of,
    feature_value,
    shape_of,
    statistics_row,
    with_shape,
)
from trainermon.core.values import STATISTICS, Kind, Moments, StatBlock
from trainermon.exporters.export import Exporter, ExportSettings

FOLDER = "csv"
TIME_FORMAT = "%b%d_%H-%M-%S"
FOLDER_NAME = re.compile(r"([\w-]{0,20})-rank(\d{1,5})-")
FILE_NAME = re.compile(r"(?P<kind>\w+)_(?P<first>\d+)-(?P<last>\d+)\.csv")
LEADING = ("vpp_stage", "name", "step")
MICRO_STEP = "micro_step"
NO_VALUE = "nan"
ALWAYS_MICRO = frozenset({"actv", "actv_grad", SCALARS})

_log = logging.getLogger(__name__)


class CsvRow(NamedTuple):
    """One series of one step, ready for any set of csv columns.

    Attributes:
        place: Its name and where it belongs.
        number: Its id in the rank's table.
        moments: Its eight moments.
        shape: The tensor's shape; None: not known.
        dtype: Its type; None: not known.
    """

    place: SeriesPlace
    number: int
    moments: Moments
    shape: list[int] | None
    dtype: str | None


def rows_of(names: SeriesNames, header: Header, block: StatBlock) -> Iterator[CsvRow]:
    """Yield the csv rows of a block (one step of one rank); checksums are left out, which no column could show."""
    places = names.places(header.series)
    values = np.asarray(block.values, np.float64).reshape(len(STATISTICS), -1)
    for number, column in zip(np.asarray(block.series).tolist(), values.T.tolist(), strict=True):
        if header.series[number].kind is Kind.CHECKSUM:
            continue
        moments, placement = Moments(*column), header.placements[number]
        shown = statistics_row(header.series[number], moments)
        shape = shape_of(placement, moments) if shown is moments else []
        yield CsvRow(places[number], number, shown, shape, dtype_of(placement))


class CsvExporter(Exporter):
    """Appends the statistics of each step to the csv files of its rank, in msprobe's format."""

    def __init__(self, settings: ExportSettings) -> None:
        self._settings = settings
        self._columns = with_shape(settings.ops)
        self._names: dict[tuple[int, int], SeriesNames] = {}
        self._folders: dict[tuple[int, int], Path] = {}

    def write(self, header: Header, block: StatBlock) -> None:
        """Append one step of one rank to the rank's csv files."""
        start = (header.coordinates.rank, header.attempt)
        folder = self._folders.get(start)
        if folder is None:
            folder = self._folders[start] = self._open(header)
            forget_from(folder, block.step)
        files: dict[str, list[CsvRow]] = {}
        for row in rows_of(self._names.setdefault(start, SeriesNames()), header, block):
            files.setdefault(row.place.file, []).append(row)
        for kind, rows in files.items():
            self._append(folder, kind, block.step, rows)

    def _open(self, header: Header) -> Path:
        run_dir = self._settings.run_dir
        rank = header.coordinates.rank
        folder = None
        if self._settings.append_output:
            candidates = run_dir.parent.glob(f"*/{FOLDER}/*")
            folder = matching_folders(candidates, *self._settings.append_output).get(rank)
            if folder is None:
                _log.warning("append_output: no csv folder of rank %d from then; a new one is made", rank)
        folder = folder or run_dir / FOLDER / folder_name(header)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    def _append(self, folder: Path, kind: str, step: int, rows: Sequence[CsvRow]) -> None:
        per_file = self._settings.step_count_per_record
        first = step // per_file * per_file
        path = folder / f"{kind}_{first}-{first + per_file - 1}.csv"
        columns = _columns_of(path)
        is_new = columns is None
        if columns is None:
            with_micro = kind in ALWAYS_MICRO or any(row.place.micro_step is not None for row in rows)
            own = FEATURE_FILES[kind].columns if kind in FEATURE_FILES else self._columns
            columns = (*LEADING, *((MICRO_STEP,) if with_micro else ()), *own)
        fitting = [row for row in rows if kind == SCALARS or (row.place.micro_step is None) != (MICRO_STEP in columns)]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if is_new:
            writer.writerow(columns)
        of_one = _by_name(fitting) if kind in FEATURE_FILES else [[row] for row in fitting]
        writer.writerows(self._line(columns, of_line, step) for of_line in of_one)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "w", encoding="utf-8", errors="replace", newline="") as file:
            file.write(text.getvalue())

    def _line(self, columns: Sequence[str], rows: Sequence[CsvRow], step: int) -> list[str]:
        row = rows[0]
        said = {
            "vpp_stage": str(row.place.stage),
            "name": row.place.name,
            "step": str(step),
            "micro_step": NO_VALUE if row.place.micro_step is None else str(row.place.micro_step),
            "id": str(row.number),
            "shape": NO_VALUE if row.shape is None else str(row.shape),
            "dtype": row.dtype or NO_VALUE,
            **{row.place.column: self._text(feature_value(row.place, row.moments)) for row in rows if row.place.column},
        }
        return [said[column] if column in said else self._number(column, row.moments) for column in columns]

    def _number(self, column: str, moments: Moments) -> str:
        # a column that is not known here is one of a file that another program began
        return self._text(COLUMNS[column](moments)) if column in COLUMNS else NO_VALUE

    def _text(self, value: float) -> str:
        return f"{value:.{self._settings.ndigits}g}"


def _by_name(rows: Iterable[CsvRow]) -> list[list[CsvRow]]:
    found: dict[SeriesPlace, list[CsvRow]] = {}
    for row in rows:
        found.setdefault(row.place._replace(column=""), []).append(row)
    return list(found.values())


def folder_name(header: Header) -> str:
    """Return the name of the folder of one rank's start: local time, rank, and what tells apart runs and attempts."""
    began = datetime.datetime.fromtimestamp(header.started_s).astimezone()
    identity = hashlib.sha256(f"{header.run_id}/{header.attempt}".encode()).hexdigest()[:8]
    return f"{began:{TIME_FORMAT}}-rank{header.coordinates.rank}-{identity}"


def matching_folders(folders: Iterable[Path], start: str | None = None, end: str | None = None) -> dict[int, Path]:
    """Return, by rank, the newest of the csv folders that were begun from `start` to `end`, both included.

    Names carry no year: all are taken for one.

    Raises:
        ValueError: A limit is no timestamp as `Dec03_21-34-40`, or `start` is after `end`.
    """
    first, last = (None if limit is None else _timestamp(limit) for limit in (start, end))
    if first and last and first > last:
        raise ValueError(f"the timestamp {start} is after {end}; give the earlier one first")
    found: dict[int, tuple[datetime.datetime, Path]] = {}
    for folder in sorted(folders):
        match = FOLDER_NAME.match(folder.name)
        if match is None or not folder.is_dir():
            continue
        began, rank = _timestamp(match[1]), int(match[2])
        if (first is None or began >= first) and (last is None or began <= last):
            found[rank] = max(found.get(rank, (began, folder)), (began, folder))
    return {rank: folder for rank, (_, folder) in sorted(found.items())}


def forget_from(folder: Path, step: int) -> None:
    """Remove all rows of `step` and later ones, and what a killed writer has left incomplete."""
    for path in folder.glob("*.csv"):
        match = FILE_NAME.fullmatch(path.name)
        if match is None or int(match["last"]) < step:
            continue
        with path.open(encoding="utf-8", newline="") as file:
            header, *rows = list(csv.reader(file)) or [[]]
        kept = [row for row in rows if len(row) == len(header) and row[2].isdecimal() and int(row[2]) < step]
        if not kept:
            path.unlink()
        elif len(kept) < len(rows):
            unfinished = path.with_name(f".{path.name}")
            with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([header, *kept])
            unfinished.replace(path)


def _timestamp(text: str) -> datetime.datetime:
    try:
        return datetime.datetime.strptime(f"2000 {text}", f"%Y {TIME_FORMAT}").astimezone()  # a leap year
    except ValueError:
        raise ValueError(f"found {text!r}, expected a timestamp as Dec03_21-34-40") from None


def _columns_of(path: Path) -> tuple[str, ...] | None:
    """Return the header of an existing file."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return tuple(next(csv.reader(file), ())) or None
    except FileNotFoundError:
        return None
