"""csv files of msprobe's form → the SQLite database of its trend analyser, `monitor_data.trend.db`.

Schema and rules are those of `msprobe data2db`: a table of values with one row per rank, step, target and metric, and
tables that name targets, metrics, and the tags by which a page filters targets.
"""

from __future__ import annotations

import itertools
import math
import os
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from trainermon.core.errors import StoreError
from trainermon.msprobe.csv_tables import KINDS, CsvTableRow, read_tables

FILE = "monitor_data.trend.db"
STATISTICS = (
    "norm",
    "min",
    "max",
    "zeros",
    "nans",
    "mean",
    "entropy",
    "softmax_max",
    "sr",
    "kernel_norm",
    "std_x",
    "jacobian",
    "proxy",
    "token_similarity",
)
"""Statistics that the trend analyser knows, in the order of its columns."""
LIMIT = 1e9
"""Larger magnitudes are cut to this one; an infinite one is one beyond it."""

SCHEMA = """
CREATE TABLE monitoring_targets (
    target_id INTEGER PRIMARY KEY AUTOINCREMENT,
    target_name TEXT NOT NULL,
    vpp_stage INTEGER NOT NULL,
    micro_step INTEGER NOT NULL DEFAULT 0,
    UNIQUE(target_name, vpp_stage, micro_step));
CREATE TABLE monitoring_metrics (
    metric_id INTEGER PRIMARY KEY AUTOINCREMENT,
    metric_name TEXT UNIQUE NOT NULL);
CREATE TABLE monitoring_tags (
    tag_id INTEGER PRIMARY KEY AUTOINCREMENT,
    tag_name TEXT NOT NULL,
    category TEXT NOT NULL,
    metric_id INTEGER NOT NULL REFERENCES monitoring_metrics(metric_id),
    UNIQUE(tag_name, category, metric_id));
CREATE TABLE tag_target_mapping (
    tag_id INTEGER NOT NULL REFERENCES monitoring_tags(tag_id),
    target_id INTEGER NOT NULL REFERENCES monitoring_targets(target_id),
    PRIMARY KEY (tag_id, target_id));
"""


class TrendTarget(NamedTuple):
    """Identifies one line in msprobe's trend analyser.

    Attributes:
        name: Module or parameter.
        stage: Number of the virtual pipeline stage.
        micro_step: Number of the forward and backward within the step.
    """

    name: str
    stage: int
    micro_step: int


class _TrendContents(NamedTuple):
    """What the files hold: statistics and targets by metric, and how many micro steps each step has."""

    statistics: dict[str, set[str]]
    targets: dict[str, dict[TrendTarget, None]]
    micro_steps: dict[int, int]


def write_database(
    folders: Mapping[int, Path],
    path: Path,
    *,
    mapping: Mapping[str, str] | None = None,
    micro_steps: bool = True,
) -> int:
    """Write the csv files in `folders` to a new SQLite database at `path` for msprobe's trend analyser.

    Returns the number of values. Every file is read twice; in memory is one at a time.

    Args:
        folders: By rank, the folder with its csv files.
        path: The database; an existing one is replaced once the new one is complete.
        mapping: Parts of names, and what to write for them.
        micro_steps: Number micro steps through as steps: with two each, step 3 becomes 6 and 7, and what exists once
            per step is at 6. Otherwise each micro step is a target of its own.

    Raises:
        StoreError: The files hold nothing, or the database cannot be written.
    """
    renames = dict(mapping or {})
    contents = _survey(folders, renames, micro_steps=micro_steps)
    if not contents.targets:
        raise StoreError(f"{', '.join(map(str, folders.values()))}: found no csv file of {', '.join(KINDS)}")
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        with closing(sqlite3.connect(unfinished)) as connection, connection:
            connection.executescript(SCHEMA)
            number = _fill(connection, folders, contents, renames, micro_steps=micro_steps)
        unfinished.replace(path)
    except (OSError, sqlite3.Error) as error:
        unfinished.unlink(missing_ok=True)
        raise StoreError(f"{path} cannot be written: {error}") from error
    return number


def stored_value(value: float) -> float | None:
    """Return what the trend database holds for a value: None for NaN, magnitudes limited to 1e9, infinity just beyond.

    >>> stored_value(float("nan")), stored_value(2e9), stored_value(float("-inf")), stored_value(0.5)
    (None, 1000000000.0, -1000000001.0, 0.5)
    """
    if math.isnan(value):
        return None
    if math.isinf(value):
        return math.copysign(LIMIT + 1, value)
    return max(-LIMIT, min(LIMIT, value))


def tags_of(name: str) -> set[tuple[str, str]]:
    """Return the (tag, category) pairs by which the trend analyser finds a name.

    They are its parts, and each part that is a number together with the one before it.

    >>> sorted(tags_of("layers.22.mlp.weight"))
    [('layers', 'module'), ('layers.22', 'layer'), ('mlp', 'module'), ('weight', 'module')]
    """
    parts = name.split(".")
    found = {(part, "module") for part in parts if not part.isdigit()}
    pairs = itertools.pairwise(parts)
    return found | {(f"{one}.{other}", "layer") for one, other in pairs if other.isdigit() and not one.isdigit()}


def _statistics(row: CsvTableRow) -> Mapping[str, float]:
    """Return the numbers of a row by names that the analyser knows, which has none for a number of the step."""
    return {"mean": row.values["value"]} if "value" in row.values else row.values


def _survey(folders: Mapping[int, Path], renames: Mapping[str, str], *, micro_steps: bool) -> _TrendContents:
    contents = _TrendContents(defaultdict(set), defaultdict(dict), defaultdict(int))
    for folder in folders.values():
        for kind, rows in read_tables(folder):
            for row in rows:
                contents.statistics[kind].update(STATISTICS & _statistics(row).keys())
                contents.targets[kind][_target(row, renames, micro_steps=micro_steps)] = None
                contents.micro_steps[row.step] = max(contents.micro_steps[row.step], 1 + (row.micro_step or 0))
    return contents


def _target(row: CsvTableRow, renames: Mapping[str, str], *, micro_steps: bool) -> TrendTarget:
    name = row.name
    for part, other in renames.items():
        name = name.replace(part, other)
    return TrendTarget(name, row.stage, 0 if micro_steps else row.micro_step or 0)


def _fill(
    connection: sqlite3.Connection,
    folders: Mapping[int, Path],
    contents: _TrendContents,
    renames: Mapping[str, str],
    *,
    micro_steps: bool,
) -> int:
    metrics = {kind: n for n, kind in enumerate((kind for kind in KINDS if contents.statistics.get(kind)), start=1)}
    targets = {
        t: n for n, t in enumerate(dict.fromkeys(t for kind in metrics for t in contents.targets[kind]), start=1)
    }
    connection.executemany("INSERT INTO monitoring_metrics VALUES (?, ?)", ((n, kind) for kind, n in metrics.items()))
    connection.executemany("INSERT INTO monitoring_targets VALUES (?, ?, ?, ?)", ((n, *t) for t, n in targets.items()))
    _fill_tags(connection, contents.targets, metrics, targets)
    first_of = _first_indices(contents.micro_steps) if micro_steps else {step: step for step in contents.micro_steps}
    last = max(first_of) if not micro_steps else sum(contents.micro_steps.values()) - 1
    _fill_global(connection, contents.statistics, metrics, (min(first_of.values()), last, max(folders)))
    return _fill_values(
        connection,
        _values(folders, first_of, metrics, targets, renames=renames, micro_steps=micro_steps),
        [name for name in STATISTICS if any(name in found for found in contents.statistics.values())],
    )


def _first_indices(micro_steps: Mapping[int, int]) -> dict[int, int]:
    """Return, by step, how many micro steps were before it."""
    first, before = {}, 0
    for step, number in sorted(micro_steps.items()):
        first[step] = before
        before += number
    return first


def _fill_tags(
    connection: sqlite3.Connection,
    of_metrics: Mapping[str, Iterable[TrendTarget]],
    metrics: Mapping[str, int],
    targets: Mapping[TrendTarget, int],
) -> None:
    tags: dict[tuple[str, str, int], int] = {}
    pairs: set[tuple[int, int]] = set()
    for kind, metric in metrics.items():
        for target in of_metrics[kind]:
            for tag in sorted(tags_of(target.name)):
                pairs.add((tags.setdefault((*tag, metric), len(tags) + 1), targets[target]))
    connection.executemany("INSERT INTO monitoring_tags VALUES (?, ?, ?, ?)", ((n, *tag) for tag, n in tags.items()))
    connection.executemany("INSERT INTO tag_target_mapping VALUES (?, ?)", sorted(pairs))


def _fill_global(
    connection: sqlite3.Connection,
    statistics: Mapping[str, set[str]],
    metrics: Iterable[str],
    extent: tuple[int, int, int],
) -> None:
    of_metrics = {kind: ",".join(name for name in STATISTICS if name in statistics[kind]) for kind in metrics}
    columns = ["min_step INTEGER DEFAULT 0", "max_step INTEGER DEFAULT 0", "max_rank INTEGER DEFAULT 0"]
    columns += [f'"{kind}" TEXT DEFAULT NULL' for kind in of_metrics]  # quoted: update is a word of SQL
    connection.execute(f"CREATE TABLE global_stats ({', '.join(columns)})")
    marks = ", ".join("?" * len(columns))
    connection.execute(f"INSERT INTO global_stats VALUES ({marks})", (*extent, *of_metrics.values()))  # noqa: S608  (marks only)


def _values(  # noqa: PLR0913  (the numbers that every row refers to)
    folders: Mapping[int, Path],
    first_of: Mapping[int, int],
    metrics: Mapping[str, int],
    targets: Mapping[TrendTarget, int],
    *,
    renames: Mapping[str, str],
    micro_steps: bool,
) -> Iterator[tuple[tuple[int, int, int, int], Mapping[str, float]]]:
    for rank, folder in folders.items():
        for kind, rows in read_tables(folder):
            for row in rows if kind in metrics else ():
                step = first_of[row.step] + ((row.micro_step or 0) if micro_steps else 0)
                target = targets[_target(row, renames, micro_steps=micro_steps)]
                yield (rank, step, target, metrics[kind]), _statistics(row)


def _fill_values(
    connection: sqlite3.Connection,
    values: Iterable[tuple[tuple[int, int, int, int], Mapping[str, float]]],
    statistics: Sequence[str],
) -> int:
    columns = "".join(f"{name} REAL DEFAULT NULL, " for name in statistics)
    connection.execute(
        "CREATE TABLE trend_data (rank INTEGER NOT NULL, step INTEGER NOT NULL,"
        " target_id INTEGER NOT NULL REFERENCES monitoring_targets(target_id),"
        f" metric_id INTEGER NOT NULL REFERENCES monitoring_metrics(metric_id), {columns}"
        "PRIMARY KEY (rank, step, target_id, metric_id)) WITHOUT ROWID"
    )
    marks = ", ".join("?" * (4 + len(statistics)))
    rows = ((*place, *(stored_value(found.get(name, math.nan)) for name in statistics)) for place, found in values)
    connection.executemany(f"INSERT OR REPLACE INTO trend_data VALUES ({marks})", rows)  # noqa: S608  (marks only)
    count: int = connection.execute("SELECT count(*) FROM trend_data").fetchone()[0]
    return count
