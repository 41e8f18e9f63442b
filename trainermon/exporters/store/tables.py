"""A run directory as SQL tables, while the run is on and after it.

`stats` and `all_stats` have a row per series, rank and step, `histograms` one per bin of these that has elements,
`steps` and `step_values` one per step, `alerts` one per change of an alert's state, `alerts_handled` one for everything
that somebody said about alerts.
"""

# ruff: noqa: S608  (the SQL consists of our own column names and of quoted paths)

from __future__ import annotations

import glob
import json
import logging
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trainermon.core.derived import SQL
from trainermon.core.errors import StoreError
from trainermon.core.ledger import Ledger
from trainermon.core.private_files import make_private_directory
from trainermon.core.values import BIN_BOUNDS, NUM_BINS
from trainermon.exporters.store.segments import (
    SERIES_COLUMNS,
    connect,
    cover,
    is_whole,
    live_names,
    quoted,
    read_ends,
    reason_of,
    scan,
    sql_path,
)
from trainermon.exporters.store.step_tables import STEP_VALUES, STEPS

if TYPE_CHECKING:
    import duckdb

    from trainermon.exporters.store.segments import RunPath

logger = logging.getLogger(__name__)

_DERIVED = ", ".join(f"{formula} AS {name}" for name, formula in SQL.items())

# A merge takes seconds and a listing milliseconds: that a second one is outdated, too, is already rare.
_LISTINGS = 5

_ALERT_COLUMNS: Mapping[str, str] = {
    "id": "VARCHAR",
    "rule": "VARCHAR",
    "severity": "VARCHAR",
    "state": "VARCHAR",
    "attempt": "INTEGER",
    "rank": "INTEGER",
    "step": "BIGINT",
    "first_step": "BIGINT",
    "time_s": "DOUBLE",
    "kind": "VARCHAR",
    "value": "DOUBLE",
    "baseline": "DOUBLE",
    "num_series": "INTEGER",
    "message": "VARCHAR",
}
_HANDLED_COLUMNS: Mapping[str, str] = {
    "said": "VARCHAR",  # acknowledged or silenced
    "alert": "VARCHAR",
    "rule": "VARCHAR",
    "series": "VARCHAR",
    "who": "VARCHAR",
    "time_s": "DOUBLE",
    "until_s": "DOUBLE",
    "note": "VARCHAR",
}


def open_run(run_dir: RunPath, *, memory_bytes: int = 1 << 30, threads: int | None = None) -> duckdb.DuckDBPyConnection:
    """Return a database with the run's tables as they are now, or as they were when `find_bucket_run` listed them.

    The views read the segments of all nodes when they are queried; a run without any has empty ones. `stats` leaves out
    what a later attempt has repeated: the rows of an attempt from the first step of the next one on. `steps` has a row
    for every step that any rank has a row of; `loss` and `grad_norm` are NULL where nothing was recorded, NaN where an
    element was NaN, else infinity where one was infinite, of either sign. While the run is going on a segment may be
    replaced by a merged one: a query that then fails with `duckdb.IOException` succeeds on a newly opened run. Segments
    that are damaged are left out, with a warning. The caller closes the connection. It has one thread, or as many as
    `threads` says; to wait for object storage, 16.

    Raises:
        StoreError: The directory does not exist or a segment is of another format.
    """
    connection = open_stats(run_dir, memory_bytes=memory_bytes)
    if threads is not None:
        connection.execute(f"SET threads = {threads:d}")
    connection.execute(f"CREATE VIEW steps AS {STEPS}")
    connection.execute(f"CREATE VIEW step_values AS {STEP_VALUES}")
    connection.execute(f"CREATE VIEW histograms AS {_histograms()}")
    _create_alerts(connection, _sorted(run_dir.glob("nodes/*")))
    return connection


def open_stats(run_dir: RunPath, *, node: str = "*", memory_bytes: int = 256 << 20) -> duckdb.DuckDBPyConnection:
    """Return a database with the views `stats` and `all_stats` alone, of one node or of all; otherwise as `open_run`.

    Raises:
        StoreError: The directory does not exist or a segment is of another format.
    """
    if not run_dir.is_dir():
        raise StoreError(f"{run_dir}: no such run directory")
    connection = connect(memory_bytes=memory_bytes, spill=spill_directory())
    if not isinstance(run_dir, Path):
        run_dir.attach(connection)
    last = _view(connection, run_dir, "all_stats", node=node)
    connection.execute(f"CREATE VIEW stats AS SELECT * FROM all_stats WHERE {last}")
    return connection


def add_run(connection: duckdb.DuckDBPyConnection, run_dir: Path, view: str) -> None:
    """Add the `stats` of another run to a database that `open_run` returned, as the view `view`.

    Raises:
        StoreError: The directory does not exist or a segment is of another format.
    """
    if not run_dir.is_dir():
        raise StoreError(f"{run_dir}: no such run directory")
    last = _view(connection, run_dir, f"all_{view}")
    connection.execute(f"CREATE VIEW {view} AS SELECT * FROM all_{view} WHERE {last}")


def _view(connection: duckdb.DuckDBPyConnection, run_dir: RunPath, name: str, *, node: str = "*") -> str:
    """Create a view of all rows of the run, or of one node.

    Returns the SQL condition on those that no later attempt has repeated.

    That an agent merges a segment into another one between being listed and being read is no fault: they are listed
    again.

    Raises:
        StoreError: One cannot be opened, or is of another format.
    """
    import duckdb

    for remaining in reversed(range(_LISTINGS)):
        pattern = f"nodes/{node if node == '*' else glob.escape(node)}/segments"
        listed = [path for folder in _sorted(run_dir.glob(pattern)) for path in _live(folder)]
        try:
            segments = _readable(connection, listed)
            if not isinstance(run_dir, Path):
                run_dir.objects.check()
            _tell_damaged(set(listed).difference(segments))
            connection.execute(f"CREATE OR REPLACE VIEW {name} AS SELECT *, {_DERIVED} FROM {scan(segments)}")
            return _last_attempt(_first_steps(connection, segments))
        except (StoreError, duckdb.IOException):
            if remaining == 0 or all(path.exists() for path in listed):
                raise
    raise AssertionError("the last listing returns or raises")


def _sorted(paths: Iterable[RunPath]) -> list[RunPath]:
    return sorted(paths, key=str)


def _live(folder: RunPath) -> list[RunPath]:
    if isinstance(folder, Path):
        return [segment.path for segment in cover(folder)]
    return [folder / name for *_, name in live_names(path.name for path in folder.iterdir())]


def _readable(connection: duckdb.DuckDBPyConnection, paths: Sequence[RunPath]) -> list[RunPath]:
    """Return the segments whose ends can be read; reads all of those at once.

    Raises:
        StoreError: One cannot be opened.
    """
    import duckdb

    if not paths:
        return []
    try:
        whole = [path for path in paths if is_whole(path)]
        if whole and not _have_ends(connection, whole):
            whole = [path for path in whole if _have_ends(connection, [path])]
    except (OSError, duckdb.IOException) as error:
        raise StoreError(f"a segment cannot be read: {reason_of(error)}") from error
    return whole


def _tell_damaged(paths: Iterable[RunPath]) -> None:
    for path in _sorted(paths):
        logger.warning("%s is damaged and left out: what follows is without its rows", path)


def _have_ends(connection: duckdb.DuckDBPyConnection, paths: Sequence[RunPath]) -> bool:
    import duckdb

    try:
        listed = ", ".join(quoted(sql_path(path)) for path in paths)
        connection.execute(f"SELECT count(*) FROM parquet_kv_metadata([{listed}])").fetchall()
    except duckdb.IOException:
        raise
    except duckdb.Error:
        return False
    return True


def _first_steps(connection: duckdb.DuckDBPyConnection, segments: Sequence[RunPath]) -> dict[int, int]:
    """Return the first step of each attempt over all nodes, from the newest segment of each; they are in order."""
    newest = list({path.parent: path for path in segments}.values())
    attempts: dict[int, int] = {}
    for end in read_ends(newest, connection).values():
        if isinstance(end, StoreError):
            raise end
        for attempt, step in end.attempts.items():
            attempts[attempt] = min(step, attempts.get(attempt, step))
    return attempts


def _last_attempt(first_steps: Mapping[int, int]) -> str:
    """Return the SQL condition that leaves out what later attempts have repeated."""
    repeated = [
        f"NOT (attempt = {attempt:d} AND step >= {superseded_from:d})"
        for attempt, superseded_from in superseded(first_steps).items()
    ]
    return " AND ".join(repeated) or "true"


def superseded(first_steps: Mapping[int, int]) -> dict[int, int]:
    """Return, by attempt, the step from which on later attempts stand for it; the last attempt is left out."""
    attempts = sorted(first_steps)
    return {
        attempt: min(first_steps[later] for later in attempts[place + 1 :])
        for place, attempt in enumerate(attempts[:-1])
    }


def spill_directory() -> Path | None:
    """Return a private folder for what does not fit into memory; None where there is none, or it is another user's."""
    try:
        folder = Path(tempfile.gettempdir(), f"trainermon-query-{os.getuid()}")
        make_private_directory(folder)
    except FileNotFoundError:  # no writable temporary directory at all
        return None
    except OSError as error:
        logger.warning("a query that does not fit into memory will fail: %s", error)
        return None
    return folder


def _histograms() -> str:
    """Return the SQL of the bins of all histograms in `stats`, without those that are empty."""
    identity = ", ".join((*SERIES_COLUMNS, "attempt", "rank", "step", "time_s", "num_steps"))
    bounds = ", ".join(f"({bin}, {_double(low)}, {_double(high)})" for bin, (low, high) in enumerate(BIN_BOUNDS))
    return (
        f"SELECT {identity}, low, high, found AS count FROM (SELECT {identity}, unnest(histogram) AS found,"
        f" unnest(range({NUM_BINS})) AS bin FROM stats WHERE histogram IS NOT NULL)"
        f" JOIN (VALUES {bounds}) AS bounds(bin, low, high) USING (bin) WHERE found > 0"
    )


def _double(value: float) -> str:
    return "NULL::DOUBLE" if math.isnan(value) else f"'{value!r}'::DOUBLE"


def _create_alerts(connection: duckdb.DuckDBPyConnection, nodes: Sequence[RunPath]) -> None:
    """Create the tables of all state changes in the nodes' logs, and of what was said about alerts."""
    alerts = [
        (node.name, {**alert, "findings": json.dumps(alert.get("findings"))})
        for node in nodes
        for alert in _ledger(node / "alerts.jsonl").read(_storable)
    ]
    _create_table(connection, "alerts", {**_ALERT_COLUMNS, "findings": "VARCHAR"}, alerts)
    handled = [(node.name, words) for node in nodes for words in _ledger(node / "alerts.handled.jsonl").read(_words_of)]
    _create_table(connection, "alerts_handled", _HANDLED_COLUMNS, handled)


def _ledger(path: RunPath) -> Ledger:
    return Ledger(cast("Path", path))  # reading asks for the contents, which both have


def _create_table(
    connection: duckdb.DuckDBPyConnection,
    name: str,
    columns: Mapping[str, str],
    lines: Iterable[tuple[str, Mapping[str, Any]]],
) -> None:
    """Create a table of lines of logs, each with its host; NULL where a line has nothing that fits a column."""
    described = ", ".join(f"{column} {kind}" for column, kind in columns.items())
    connection.execute(f"CREATE TABLE {name} (host VARCHAR, {described})")
    rows = [[host, *(_scalar(line.get(column)) for column in columns)] for host, line in lines]
    if rows:
        marks = ", ".join(["?", *(f"TRY_CAST(? AS {kind})" for kind in columns.values())])
        connection.executemany(f"INSERT INTO {name} VALUES ({marks})", rows)


def _scalar(value: Any) -> str | int | float | None:
    """Return `value` if a column may hold it, else None: DuckDB casts no list or object, and no integer of any size."""
    if isinstance(value, int):
        return value if abs(value) < 1 << 63 else None
    return value if isinstance(value, str | float) else None


def _words_of(entry: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    ((said, words),) = entry.items()
    return _storable({**words, "said": said, "who": words["by"]})


def _storable(alert: Mapping[str, Any]) -> dict[str, Any]:
    """Return `alert` with `?` for half characters, which a table cannot hold."""
    return dict(json.loads(json.dumps({**alert}, ensure_ascii=False).encode(errors="replace")))
