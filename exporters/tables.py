"""A run directory as SQL tables, while the run is on and after it.

`stats` and `all_stats` have a row per series, rank and step, `steps` and `step_values` one per step, `alerts` one per
change of an alert's state.
"""

# ruff: noqa: S608  (the SQL consists of our own column names and of quoted paths)

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainermon.exporters.segments import connect, cover, read_newest, scan
from trainermon.exporters.step_tables import STEP_VALUES, STEPS
from trainermon.monitor.errors import StoreError

if TYPE_CHECKING:
    import duckdb

# The formulas of trainermon.monitor.values.Moments, as columns beside the moments.
_DERIVED = """
    count - nans - infs AS finite,
    nans + infs AS nonfinite,
    sum / nullif(count - nans - infs, 0) AS mean,
    sqrt(sum_sq) AS norm,
    sqrt(sum_sq / nullif(count - nans - infs, 0)) AS rms,
    CASE WHEN count > nans + infs
        THEN sqrt(greatest(0, sum_sq / (count - nans - infs) - (sum / (count - nans - infs)) ** 2)) END AS std,
    zeros / nullif(count, 0) AS zero_ratio
"""

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


def open_run(run_dir: Path, *, memory_bytes: int = 1 << 30, threads: int = 1) -> duckdb.DuckDBPyConnection:
    """Return a database with the run's tables as they are now.

    The views read the segments of all nodes when they are queried; a run without any has empty ones. `stats` leaves out
    what a later attempt has repeated: the rows of an attempt from the first step of the next one on. `steps` has a row
    for every step that any rank has a row of; `loss` and `grad_norm` are NULL where nothing was recorded, NaN where an
    element was NaN, else infinity where one was infinite, of either sign. While the run is going on a segment may be
    replaced by a merged one: a query that then fails with `duckdb.IOException` succeeds on a newly opened run. The
    caller closes the connection.

    Raises:
        StoreError: The directory does not exist or a segment is of another format.
    """
    if not run_dir.is_dir():
        raise StoreError(f"{run_dir}: no such run directory")
    nodes = sorted(run_dir.glob("nodes/*/segments"))
    attempts = _first_steps(nodes)
    connection = connect(memory_bytes=memory_bytes, spill=_spill_directory())
    connection.execute(f"SET threads = {threads:d}")
    segments = scan(segment.path for node in nodes for segment in cover(node))
    connection.execute(f"CREATE VIEW all_stats AS SELECT *, {_DERIVED} FROM {segments}")
    connection.execute(f"CREATE VIEW stats AS SELECT * FROM all_stats WHERE {_last_attempt(attempts)}")
    connection.execute(f"CREATE VIEW steps AS {STEPS}")
    connection.execute(f"CREATE VIEW step_values AS {STEP_VALUES}")
    _create_alerts(connection, sorted(run_dir.glob("nodes/*/alerts.jsonl")))
    return connection


def add_run(connection: duckdb.DuckDBPyConnection, run_dir: Path, view: str) -> None:
    """Add the `stats` of another run to a database that `open_run` returned, as the view `view`.

    Raises:
        StoreError: The directory does not exist or a segment is of another format.
    """
    if not run_dir.is_dir():
        raise StoreError(f"{run_dir}: no such run directory")
    nodes = sorted(run_dir.glob("nodes/*/segments"))
    segments = scan(segment.path for node in nodes for segment in cover(node))
    last = _last_attempt(_first_steps(nodes))
    connection.execute(f"CREATE VIEW {view} AS SELECT *, {_DERIVED} FROM {segments} WHERE {last}")


def _first_steps(nodes: Sequence[Path]) -> dict[int, int]:
    """Return the first step of each attempt over all nodes, from the newest segment of each."""
    attempts: dict[int, int] = {}
    for node in nodes:
        for attempt, step in read_newest(node)[1].attempts.items():
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


def _spill_directory() -> Path | None:
    try:
        return Path(tempfile.gettempdir(), f"trainermon-query-{os.getuid()}")
    except FileNotFoundError:  # no writable temporary directory at all
        return None


def _create_alerts(connection: duckdb.DuckDBPyConnection, logs: Iterable[Path]) -> None:
    """Create the table `alerts` of all state changes in the nodes' logs; lines that are not whole are left out."""
    columns = ", ".join(f"{name} {kind}" for name, kind in _ALERT_COLUMNS.items())
    connection.execute(f"CREATE TABLE alerts (host VARCHAR, {columns}, findings VARCHAR)")
    marks = ", ".join("?" * (len(_ALERT_COLUMNS) + 2))
    rows = [
        [log.parent.name, *(alert.get(name) for name in _ALERT_COLUMNS), json.dumps(alert.get("findings"))]
        for log in logs
        for alert in _read_lines(log)
    ]
    if rows:
        connection.executemany(f"INSERT INTO alerts VALUES ({marks})", rows)


def _read_lines(log: Path) -> Iterator[dict[str, Any]]:
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):  # the last line may be half written
                alert = json.loads(line)
                if isinstance(alert, dict):
                    yield alert
