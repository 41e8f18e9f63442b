"""Reads the steps of many segments, merged over the ranks by the database instead of block by block.

A run of 10,240 ranks has as many blocks a step, each of which costs Python 0.1 ms; the database merges ten million rows
a second. It reads the segments twice: for the moments by row of the heat maps, and for the numbers of each rank.
"""

# ruff: noqa: S608  (the SQL consists of our own names and of quoted paths)

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from trainermon.core.errors import StoreError
from trainermon.core.values import STATISTICS, Kind, SeriesKey
from trainermon.exporters.heat_rows import HeatRow, heat_row
from trainermon.exporters.merge import GRAD_NORM, NEUTRAL, SCALARS, Floats, scalar_of
from trainermon.exporters.store.segments import SERIES_COLUMNS, connect, reason_of, scan
from trainermon.exporters.store.tables import spill_directory
from trainermon.exporters.stored_steps import ShownSeries, StoredStep

if TYPE_CHECKING:
    import duckdb

MEMORY_BYTES = 512 << 20
"""What the merged rows may take; beyond it they are spilled."""
FETCHED_ROWS = 200_000
"""So many merged rows are taken out of the database at once, or one step."""

_KEY = SERIES_COLUMNS[:6]
_PLACED = (*_KEY, "in_global_norm")
_NAMES = tuple(SCALARS)
_OTHER, _COUNTED, _UNCOUNTED = -1, -2, -3  # beside the numbers of `_NAMES`: what else a row of a rank is
_MERGED = {"min": "min", "max": "max"}  # all others are added


class ChosenSegment(NamedTuple):
    """A segment, and an SQL condition on the rows that are read of it."""

    path: Path
    where: str


def read_steps(segments: Sequence[ChosenSegment]) -> Iterator[StoredStep]:
    """Yield the steps of segments by attempt and step, merged over all ranks; about 0.4 µs of CPU time a row.

    Memory: that of the database (`MEMORY_BYTES`) and of the steps that are fetched at once.

    Raises:
        StoreError: A segment cannot be read.
    """
    import duckdb

    if not segments:
        return
    try:
        with connect(memory_bytes=MEMORY_BYTES, spill=spill_directory()) as connection:
            connection.execute(f"SET threads = {min(4, os.cpu_count() or 1)}")
            rows = _merge(connection, _source(segments))
            for attempt, first, last in _stretches(connection):
                yield from _steps(connection, attempt, first, last, rows)
    except (OSError, duckdb.Error) as error:
        raise StoreError(f"the segments cannot be read: {reason_of(error)}") from error


def _source(segments: Iterable[ChosenSegment]) -> str:
    paths: dict[str, list[Path]] = {}
    for path, where in segments:
        paths.setdefault(where, []).append(path)
    parts = [f"SELECT * FROM {scan(chosen)} WHERE {where}" for where, chosen in paths.items()]
    return f"({' UNION ALL BY NAME '.join(parts)})"


def _merge(connection: duckdb.DuckDBPyConnection, source: str) -> tuple[ShownSeries, ...]:
    """Create the table `merged`, and return what is shown by its `place`.

    Its rows are moments by attempt and step, in order: of each place over all ranks, with no `rank`; and of each rank
    and `part` of what it says (`_part`).
    """
    rows = _place_series(connection, source)
    same = " AND ".join(f"rows.{name} IS NOT DISTINCT FROM placed.{name}" for name in _PLACED)
    moments = ", ".join(f"{_MERGED.get(name, 'sum')}(rows.{name})::DOUBLE AS {name}" for name in STATISTICS)
    connection.execute(
        "CREATE TABLE merged AS SELECT attempt, step, place, rows.rank AS rank, part, max(time_s) AS time_s,"
        f" {moments}, sum(sum_sq / (scale * scale)) AS unscaled FROM {source} AS rows JOIN placed ON {same}"
        " GROUP BY GROUPING SETS ((attempt, step, place), (attempt, step, rows.rank, part))"
        " ORDER BY attempt, step, rank"
    )
    return rows


def _place_series(connection: duckdb.DuckDBPyConnection, source: str) -> tuple[ShownSeries, ...]:
    """Create the table `placed` of all series: the row in which each is shown, and which number of a rank it is."""
    columns, key = ", ".join(_PLACED), ", ".join(_KEY)
    connection.execute(
        f"CREATE TABLE series AS SELECT row_number() OVER (ORDER BY rank, {key}) - 1 AS id, * FROM ("
        f" SELECT {columns}, max(max(rank)) OVER (PARTITION BY {key}) AS rank FROM {source} GROUP BY {columns})"
    )
    found = connection.execute(f"SELECT rank, in_global_norm, {key} FROM series ORDER BY id").fetchall()
    rows: dict[HeatRow, ShownSeries] = {}
    numbers: dict[HeatRow, int] = {}
    places, parts = [], []
    for rank, is_counted, kind, *rest in found:
        shown = ShownSeries(rank, SeriesKey(Kind(kind), *rest))
        row = heat_row(shown.key)
        if row is not None:
            rows[row] = shown  # the last rank's, as where its tables are read one after the other
        places.append(-1 if row is None else numbers.setdefault(row, len(numbers)))
        parts.append(_part(shown.key, is_counted=is_counted))
    connection.execute(
        "CREATE TABLE placed AS SELECT series.* EXCLUDE rank, place, part FROM series JOIN"
        " (SELECT unnest(range($1)) AS id, unnest($2::INTEGER[]) AS place, unnest($3::INTEGER[]) AS part) USING (id)",
        [len(found), places, parts],
    )
    return tuple(rows.values())


def _part(key: SeriesKey, *, is_counted: bool) -> int:
    if key.kind is Kind.GRAD_REDUCED:
        return _COUNTED if is_counted else _UNCOUNTED
    number = scalar_of(key)
    return number if number >= 0 else _OTHER


def _stretches(connection: duckdb.DuckDBPyConnection) -> list[tuple[int, int, int]]:
    """Return attempt, first and last step of what is fetched at once, in order."""
    found = connection.execute(
        "SELECT attempt, step, count(*) FROM merged GROUP BY ALL ORDER BY attempt, step"
    ).fetchall()
    stretches: list[tuple[int, int, int]] = []
    size = 0
    for attempt, step, count in found:
        if stretches and stretches[-1][0] == attempt and size + count <= FETCHED_ROWS:
            stretches[-1] = (attempt, stretches[-1][1], step)
            size += count
        else:
            stretches.append((attempt, step, step))
            size = count
    return stretches


def _steps(
    connection: duckdb.DuckDBPyConnection, attempt: int, first: int, last: int, rows: tuple[ShownSeries, ...]
) -> Iterator[StoredStep]:
    within = f"FROM merged WHERE attempt = {attempt:d} AND step BETWEEN {first:d} AND {last:d}"
    told = connection.execute(f"SELECT * EXCLUDE place {within} AND rank IS NOT NULL ORDER BY step, rank").fetchnumpy()
    columns = f"step, place, {', '.join(STATISTICS)}"
    shown = connection.execute(f"SELECT {columns} {within} AND place >= 0 ORDER BY step").fetchnumpy()
    for step in np.unique(told["step"]).tolist():
        yield _step(attempt, step, _at(told, step), _at(shown, step), rows)


def _at(columns: Mapping[str, npt.NDArray[np.float64]], step: int) -> dict[str, npt.NDArray[np.float64]]:
    """Return the rows of a step; they are ascending."""
    first, last = np.searchsorted(columns["step"], [step, step + 1])
    return {name: values[first:last] for name, values in columns.items()}


def _step(
    attempt: int, step: int, told: Mapping[str, Floats], shown: Mapping[str, Floats], rows: tuple[ShownSeries, ...]
) -> StoredStep:
    moments = np.repeat(NEUTRAL, len(rows), axis=1)
    moments[:, shown["place"].astype(np.intp)] = [shown[name] for name in STATISTICS]
    ranks, first, places = np.unique(told["rank"], return_index=True, return_inverse=True)

    def by_rank(part: int, values: Floats) -> Floats:
        found = np.full(len(ranks), np.nan)
        chosen = told["part"] == part
        found[places[chosen]] = values[chosen]
        return found

    squares = np.where(told["nans"] + told["infs"] > 0, math.inf, told["unscaled"])
    shares, others = by_rank(_COUNTED, squares), by_rank(_UNCOUNTED, squares)
    whole = np.where(np.isnan(shares), others, shares + np.nan_to_num(others, posinf=math.inf))
    return StoredStep(
        attempt=attempt,
        step=step,
        rows=rows,
        moments=moments,
        ranks=ranks.astype(np.intp),
        times_s=told["time_s"][first],
        shares=shares,
        scalars={
            **{_NAMES[part]: by_rank(part, _scalars(told, _NAMES[part])) for part in _numbers(told)},
            GRAD_NORM: np.sqrt(whole),
        },
    )


def _numbers(told: Mapping[str, Floats]) -> list[int]:
    parts: list[int] = np.unique(told["part"]).tolist()
    return [part for part in parts if part >= 0]


def _scalars(told: Mapping[str, Floats], name: str) -> Floats:
    """Return the numbers of ranks of all rows, as if each were the number `name`; NaN of nothing, else infinity."""
    with np.errstate(divide="ignore", invalid="ignore"):
        values = SCALARS[name].rows([[told[statistic] for statistic in STATISTICS]])
    bad = told["nans"] + told["infs"] > 0
    return np.where(bad, math.inf, np.where(told["count"] > 0, values, math.nan))
