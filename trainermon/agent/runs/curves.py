"""The curves of one run at full resolution, from its store: what several runs are compared by."""

# ruff: noqa: S608  (the SQL consists of our own names and of quoted text)

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainermon.agent.runs.facts import find_files
from trainermon.agent.runs.folder import RunPlace
from trainermon.core.catalogue import TOKENS_PER_SECOND_SERIES, TOKENS_SERIES
from trainermon.core.errors import QueryError
from trainermon.core.values import Kind, SeriesKey
from trainermon.exporters.export import SEGMENTS_FOLDER
from trainermon.exporters.heat_rows import heat_row, statistics_of
from trainermon.exporters.store.query import run_query
from trainermon.exporters.store.segments import connect, cover, quoted, scan
from trainermon.exporters.store.step_tables import TOLD

Floats = npt.NDArray[np.float64]

NUMBERS = ("loss", "grad_norm", "step_time", "tokens_per_second")
"""The numbers of a step that every run may have."""

_FINITE = "sum(count - nans - infs)"
_STATISTICS: Mapping[str, str] = {
    "rms": f"sqrt(sum(sum_sq) / nullif({_FINITE}, 0))",
    "absmax": f"CASE WHEN {_FINITE} > 0 THEN max(greatest(-min, max)) END",
    "zero_ratio": "sum(zeros) / nullif(sum(count), 0)",
    "mean": f"sum(sum) / nullif({_FINITE}, 0)",
    "max": f"CASE WHEN {_FINITE} > 0 THEN max(max) END",
}
"""What is shown of a series, over all ranks, micro steps and calls, as the page's heat maps do it."""


class Curves(NamedTuple):
    """Numbers by step.

    Attributes:
        steps: The steps, ascending.
        time_s: Unix time at which the last rank had finished each.
        tokens: Of all ranks together in each step; NaN: not recorded.
        columns: By name, a value for each step: NaN where nothing was recorded, infinity where something was not
            finite.
    """

    steps: npt.NDArray[np.int64]
    time_s: Floats
    tokens: Floats
    columns: Mapping[str, Floats]


class StatisticName(NamedTuple):
    """Names one statistic of one series, of all its micro steps and calls together.

    Attributes:
        kind: What it is a statistic of.
        name: Parameter or module.
        slot: Which tensor of it.
        statistic: Which statistic.
    """

    kind: str
    name: str
    slot: str
    statistic: str

    @classmethod
    def parse(cls, text: str) -> StatisticName:
        """Return the series that `text`, made by `str`, names.

        Raises:
            QueryError: It names none.
        """
        try:
            parsed = cls(*json.loads(text))
        except (ValueError, TypeError, RecursionError):
            raise QueryError(
                f"unknown series {text[:200]!r}; expected one of {', '.join(NUMBERS)}, or a JSON list of kind, name, "
                "slot and statistic"
            ) from None
        if not all(isinstance(part, str) for part in parsed) or parsed.statistic not in _STATISTICS:
            raise QueryError(f"unknown series {text[:200]!r}; statistics are {', '.join(_STATISTICS)}")
        return parsed

    def __str__(self) -> str:
        return json.dumps([*self])


class RunCurves:
    """Reads the curves of a run; those that were read are kept until its store grows. Threads wait for one another.

    Args:
        place: The run.
    """

    def __init__(self, place: RunPlace) -> None:
        self.place = place
        self._lock = threading.Lock()
        self._store: tuple[str, ...] = ()
        self._numbers: Curves | None = None
        self._columns: dict[str, Floats] = {}
        self._offered: dict[str, frozenset[tuple[str, str, str]]] = {}

    def read(self, names: Sequence[str]) -> Curves:
        """Return the curves of these names (of `NUMBERS`, or `str` of a `StatisticName`); of an unknown series NaN.

        Raises:
            QueryError: A name is none.
            StoreError: The store cannot be read.
        """
        with self._lock:
            return self._read(names)

    def _read(self, names: Sequence[str]) -> Curves:
        store = self._segments()
        if store != self._store or self._numbers is None:
            self._numbers, self._columns = self._read_numbers(), {}
            self._store = store
        for name in names:
            if name not in NUMBERS and name not in self._columns:
                self._columns[name] = self._read_series(StatisticName.parse(name), self._numbers.steps)
        columns = {name: self._numbers.columns.get(name, self._columns.get(name)) for name in names}
        return self._numbers._replace(columns={name: found for name, found in columns.items() if found is not None})

    def offered(self) -> frozenset[tuple[str, str, str]]:
        """Return kind, name and slot of the series in the newest segment of each node."""
        with self._lock:
            return self._offer()

    def _offer(self) -> frozenset[tuple[str, str, str]]:
        newest = {node: str(path) for node, path in find_files(self.place.path).newest.items()}
        for path in newest.values():
            if path not in self._offered:
                self._offered[path] = _series_in(path)
        self._offered = {path: self._offered[path] for path in newest.values()}
        return frozenset().union(*self._offered.values())

    def _segments(self) -> tuple[str, ...]:
        folders = sorted(self.place.path.glob(f"nodes/*/{SEGMENTS_FOLDER}"))
        return tuple(str(segment.path) for folder in folders for segment in cover(folder))

    def _read_numbers(self) -> Curves:
        rows = run_query(
            self.place.path,
            f"""
            SELECT step, max(told_s), max({_told("loss")}), max({_told("grad_norm")}), max(duration_s),
                max(tokens), max({_told("tokens_per_second")})
            FROM ({TOLD}) FULL JOIN ({_TOKENS}) USING (attempt, step)
            GROUP BY step ORDER BY step
            """,
        ).rows
        table = np.array([[math.nan if value is None else value for value in row] for row in rows], np.float64)
        table = table.reshape(len(rows), 7)
        values = dict(zip(NUMBERS, (_measured(column) for column in table.T[[2, 3, 4, 6]]), strict=True))
        return Curves(table[:, 0].astype(np.int64), table[:, 1], table[:, 5], values)

    def _read_series(self, series: StatisticName, steps: npt.NDArray[np.int64]) -> Floats:
        value = f"CASE WHEN sum(nans + infs) > 0 THEN 'inf'::DOUBLE ELSE {_STATISTICS[series.statistic]} END"
        rows = run_query(
            self.place.path,
            f"SELECT step, {value} FROM stats WHERE kind = {quoted(series.kind)} AND name = {quoted(series.name)}"
            f" AND slot = {quoted(series.slot)} GROUP BY step ORDER BY step",
        ).rows
        found = dict(rows)
        values = (found.get(step) for step in steps.tolist())
        return np.array([math.nan if value is None else value for value in values], np.float64)


def describe_series(kind: str, name: str, slot: str) -> dict[str, Any]:
    """Return a series as the page lists it: what it is, and the names under which its statistics can be read."""
    row = heat_row(SeriesKey(Kind(kind), name, slot))
    statistics = statistics_of(row.heat_map) if row else ("mean",)
    return {
        "kind": kind,
        "label": f"{name}.{slot}" if slot else name,
        "statistics": {statistic: str(StatisticName(kind, name, slot, statistic)) for statistic in statistics},
    }


_TOKENS = f"""
    SELECT attempt, step, sum(value) FILTER (name = '{TOKENS_PER_SECOND_SERIES}') AS tokens_per_second,
        sum(total) FILTER (name = '{TOKENS_SERIES}') AS tokens
    FROM (
        SELECT attempt, step, rank, name, sum(sum / num_steps) AS total,
            CASE WHEN sum(nans + infs) > 0 THEN 'inf'::DOUBLE ELSE sum(sum) / nullif({_FINITE}, 0) END AS value
        FROM stats WHERE kind = '{Kind.STEP}' AND name IN ('{TOKENS_SERIES}', '{TOKENS_PER_SECOND_SERIES}')
        GROUP BY attempt, step, rank, name
    ) GROUP BY attempt, step
"""


def _told(column: str) -> str:
    """Return the SQL of a column in which whatever is not finite is infinity."""
    return f"CASE WHEN isfinite({column}) THEN {column} WHEN {column} IS NOT NULL THEN 'inf'::DOUBLE END"


def _measured(values: Floats) -> Floats:
    return np.where(np.isinf(values), np.inf, values)


def _series_in(path: str) -> frozenset[tuple[str, str, str]]:
    import duckdb

    try:
        with connect() as connection:
            rows = connection.execute(f"SELECT DISTINCT kind, name, slot FROM {scan([Path(path)])}").fetchall()
    except (OSError, duckdb.Error):
        return frozenset()
    return frozenset(rows)
