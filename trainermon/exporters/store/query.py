"""`trainermon query`: SQL over a run, in the user's own process, while the run is on and after it.

Decides which run is meant, asks its agent to store what it holds, and prints the answer. The tables are those of
`trainermon.exporters.store.tables`.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import difflib
import io
import json
import logging
import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainermon.core.errors import QueryError, StoreError
from trainermon.core.terminal.escapes import printable
from trainermon.core.terminal.progress import ProgressBar
from trainermon.core.terminal.tables import aligned
from trainermon.core.topology import OUTPUT_ROOT, output_root
from trainermon.core.values import as_plain
from trainermon.exporters.node_agent import AGENT_FAULTS, find_agent
from trainermon.exporters.store.blocks import first_unreadable
from trainermon.exporters.store.segments import reason_of
from trainermon.exporters.store.store import open_run

if TYPE_CHECKING:
    from trainermon.exporters.store.segments import RunPath

logger = logging.getLogger(__name__)

SUMMARY = "query a run's statistics, steps and alerts with SQL"

_ATTEMPTS = 5
_FLUSH_S = 5.0
_TABLE_ROWS = 1000
_UNKNOWN_COLUMN = re.compile(
    r'column named "([^"]+)"|column "([^"]+)" (?:in \w+ list )?(?:not found|does not exist)', re.IGNORECASE
)
_TOO_LARGE = (
    "the query does not fit into memory (1 GiB), and there is no room for the rest of it in {}: ask for fewer rows or"
    " columns, or set TMPDIR to a folder with more room"
)
_NOTES = """\
stats has one row per series, rank and step, without what a later attempt has repeated; all_stats has every attempt's.
histograms has one row per bin that has elements, where histograms were taken: count elements from low to high, both
NULL for those that are not finite. steps has one row per step, step_values one per step and rank. Their values are
NaN where an element was NaN, else inf where one was infinite, of either sign; and NULL where nothing was recorded.
The page calls both "not finite". In comparisons NaN is larger than all numbers; isfinite(loss) leaves both out.
alerts has one row per change of an alert's state, alerts_handled one for each time that somebody acknowledged an alert
or silenced a rule.
"""
_EXAMPLES = """\
Examples:
  FROM steps ORDER BY step DESC LIMIT 10;

  SELECT step, rank, loss, learning_rate, global_grad_norm, clip_ratio
  FROM step_values ORDER BY step DESC LIMIT 10;

  SELECT step, rank, name, rms FROM stats
  WHERE kind = 'grad_reduced' AND nonfinite > 0 ORDER BY step LIMIT 20;

  SELECT name, max(max) AS largest FROM stats
  WHERE kind = 'actv' GROUP BY name ORDER BY largest DESC LIMIT 10;

  SELECT step, sqrt(sum(sum_sq)) AS norm FROM stats
  WHERE kind = 'update' AND in_global_norm GROUP BY step ORDER BY step;

  SELECT step, low, high, sum(count) AS count FROM histograms
  WHERE kind = 'grad_reduced' AND in_global_norm
  GROUP BY ALL ORDER BY step, low;

  FROM alerts ORDER BY time_s;

  SELECT said, who, note, alert, rule, series
  FROM alerts_handled ORDER BY time_s;
"""


class QueryResult(NamedTuple):
    """The answer to an SQL query.

    Attributes:
        columns: Names of the columns.
        rows: The rows.
        is_cut: Whether there were more rows than the limit.
    """

    columns: list[str]
    rows: list[tuple[Any, ...]]
    is_cut: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trainermon query`."""
    parser.add_argument(
        "run",
        nargs="?",
        help=f"run directory, address (s3://bucket/run), or run id under $TRAINERMON_OUTPUT or ./{OUTPUT_ROOT}"
        " (default: the newest)",
    )
    parser.add_argument("sql", nargs="?", help="the query; without it, the tables and their columns are listed")
    parser.add_argument("--format", choices=("table", "csv", "json"), default="table", help="default: %(default)s")
    parser.add_argument("--limit", type=int, help=f"print at most this many rows (default: {_TABLE_ROWS} in a table)")


def main(args: argparse.Namespace) -> int:
    """Run an SQL query over a run (`trainermon query`) and print the answer; returns 0.

    Raises:
        QueryError: The query is wrong, or there is no such run.
        StoreError: The run cannot be read.
    """
    run, sql = args.run, args.sql
    if sql is None and run is not None and any(letter.isspace() for letter in run) and not Path(run).exists():
        run, sql = None, run
    run_dir = find_stored_run(run)
    if sql is None:
        sys.stdout.write(describe(run_dir, width=shutil.get_terminal_size().columns))
        return 0
    if isinstance(run_dir, Path):
        flush_agents(run_dir)
    limit = args.limit if args.limit is not None or args.format != "table" else _TABLE_ROWS
    with ProgressBar("asking"):
        found = run_query(run_dir, sql, limit=limit)
    sys.stdout.writelines(_FORMATS[args.format](found))
    return 0


def find_stored_run(run: str | None) -> RunPath:
    """Return the directory of `run` on disk, as `find_run`, or in object storage, if `run` is an address.

    Raises:
        QueryError: There is none, or the package that reads such addresses is missing.
    """
    if run is None or "://" not in run:
        return find_run(run)
    try:
        from trainermon.exporters.store.buckets import find_bucket_run
    except ImportError as error:
        raise QueryError(f"{run} is read by another package: `pip install s3fs`, for s3:// ({error})") from error
    return find_bucket_run(run)


def find_run(run: str | None, root: Path | None = None) -> Path:
    """Return the directory of `run`: a path, else a run id under `root`; None is the newest run there.

    Without a root it is where runs go: TRAINERMON_OUTPUT, MONITOR_OUTPUT_DIR or `trainermon_output`.

    Raises:
        QueryError: There is none.
    """
    root = output_root() if root is None else root
    if run is not None and "://" in run:
        raise QueryError(
            f"{run}: only `trainermon query` reads runs in object storage; copy the run, and name the copy"
        )
    if run is not None:
        for path in (Path(run), root / run):
            if is_run(path):
                return path
        raise QueryError(f"no run {run!r}: neither it nor {root / run} is a run directory (one has run.json or nodes/)")
    runs = [path for path in root.glob("*") if is_run(path)]
    if not runs:
        raise QueryError(f"no run under {root.absolute()}; give the run directory")
    return max(runs, key=lambda path: path.stat().st_mtime)


def path_or_run(text: str) -> Path:
    """Return the path `text`, or, where nothing is there, the run of that name under the root if there is one."""
    path, run = Path(text), output_root() / text
    return run if not path.exists() and is_run(run) else path


def run_query(run_dir: RunPath, sql: str, *, limit: int | None = None) -> QueryResult:
    """Return the answer to `sql` over the run as it is now, at most `limit` rows of it.

    A segment that is merged away while it is read makes the query begin again.

    Raises:
        QueryError: DuckDB refuses the query; the message is DuckDB's and a line that names the tables.
        StoreError: The run, or a file that the query names, cannot be read.
    """
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(StoreError):
            return _ask(run_dir, sql, limit)
        if not isinstance(run_dir, Path):
            run_dir = find_stored_run(str(run_dir))
    return _ask(run_dir, sql, limit)


def describe(run_dir: RunPath, *, width: int = 120) -> str:
    """Return the run's tables with their columns, what non-finite values mean, and examples, in lines of `width`."""
    names: dict[str, list[str]] = {}
    for table, columns in _tables(run_dir).items():
        whole = (f"{name} {kind}".replace(" ", "\N{NO-BREAK SPACE}") for name, kind in columns.items())
        names.setdefault(", ".join(whole), []).append(table)
    fill = partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
    tables = [
        fill(f"{', '.join(tables)} ({columns})", initial_indent="  ", subsequent_indent="    ")
        for columns, tables in names.items()
    ]
    text = "\n".join([f"Tables of {run_dir}:", *tables, "", fill(_NOTES), "", _EXAMPLES])
    return text.replace("\N{NO-BREAK SPACE}", " ")


def flush_agents(run_dir: Path, timeout_s: float = _FLUSH_S) -> bool:
    """Ask the agent of a running run on this node to store what it holds; return whether it has.

    Best effort: without an agent, or if it does not answer in time, the query sees what was stored before.
    """
    agent = find_agent(run_dir)
    if agent is None:
        return False
    try:
        agent.ask("/api/flush", data=b"", timeout_s=timeout_s)
    except AGENT_FAULTS as error:
        logger.debug("the agent of %s was not asked to flush: %s", run_dir, error)
        return False
    return True


def _ask(run_dir: RunPath, sql: str, limit: int | None) -> QueryResult:
    import duckdb

    with open_run(run_dir) as connection:
        connection.execute("SET lock_configuration = true")  # what `connect` has forbidden stays forbidden
        try:
            cursor = connection.execute(sql)
            if cursor is None:  # nothing but spaces and comments
                raise QueryError(f"the query is empty\n{_hint(run_dir, '')}")
            columns = [column[0] for column in cursor.description or ()]
            rows = cursor.fetchall() if limit is None else cursor.fetchmany(limit + 1)
        except duckdb.IOException as error:
            raise StoreError(f"{run_dir}: {reason_of(error)}") from error
        except duckdb.OutOfMemoryException as error:
            raise QueryError(_TOO_LARGE.format(tempfile.gettempdir())) from error
        except duckdb.Error as error:
            if not isinstance(run_dir, Path):
                run_dir.objects.check()
            elif not isinstance(error, _errors_of_queries()) and (damage := first_unreadable(run_dir)):
                raise damage from error
            told = str(error).partition("\n\nPossible solutions")[0].removeprefix(str(error).partition("\n")[0])
            raise QueryError(f"the query is refused: {reason_of(error)}{told}\n{_hint(run_dir, str(error))}") from error
    return QueryResult(columns, rows[:limit], limit is not None and len(rows) > limit)


def _errors_of_queries() -> tuple[type[Exception], ...]:
    """Return what the database raises of a query, and never of damaged bytes."""
    import duckdb

    return duckdb.ProgrammingError, duckdb.NotSupportedError, duckdb.OutOfRangeException, duckdb.PermissionException


def _tables(run_dir: RunPath) -> dict[str, dict[str, str]]:
    """Return, by table and column, the column's type; both in the database's order."""
    with open_run(run_dir) as connection:
        rows = connection.execute(
            "SELECT table_name, column_name, lower(data_type) FROM duckdb_columns() WHERE NOT internal"
            " ORDER BY table_name, column_index"
        ).fetchall()
    tables: dict[str, dict[str, str]] = {}
    for table, column, kind in rows:
        tables.setdefault(table, {})[column] = kind
    return tables


def _hint(run_dir: RunPath, message: str) -> str:
    """Return one line that names the tables and, where a column is unknown, the nearest ones of any table."""
    tables = _tables(run_dir)
    line = f"Tables: {', '.join(tables)} (`trainermon query RUN` lists their columns)"
    unknown = _UNKNOWN_COLUMN.search(message)
    if unknown:
        places: dict[str, list[str]] = {}
        for table in tables.keys() - {"all_stats"}:
            for column in tables[table]:
                places.setdefault(column, []).append(f"{table}.{column}")
        nearest = difflib.get_close_matches((unknown[1] or unknown[2]).lower(), places)
        if nearest:
            line += f"; nearest columns: {', '.join(place for column in nearest for place in sorted(places[column]))}"
    return line


def is_run(path: Path) -> bool:
    """Return whether `path` is the directory of a run."""
    return (path / "run.json").is_file() or (path / "nodes").is_dir()


def _table(answer: QueryResult) -> Iterable[str]:
    """Yield aligned lines: numbers to the right with six digits, text to the left and escaped, nothing for NULL."""
    texts = [[printable(_text(value)) for value in row] for row in answer.rows]
    head = list(map(printable, answer.columns))
    right = [i for i in range(len(head)) if all(isinstance(row[i], int | float | None) for row in answer.rows)]
    lines = aligned([head, *texts], right=right)
    widths = [max(map(len, column)) for column in zip(head, *texts, strict=True)]
    yield from (f"{text}\n" for text in (lines[0], "  ".join("-" * width for width in widths), *lines[1:]))
    if answer.is_cut:
        yield f"... only the first {len(texts)} rows; --limit or LIMIT shows others\n"
    else:
        yield f"({len(texts)} {'row' if len(texts) == 1 else 'rows'})\n"


def _csv(answer: QueryResult) -> Iterable[str]:
    for row in [answer.columns, *answer.rows]:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(row)
        yield text.getvalue()


def _json(answer: QueryResult) -> Iterable[str]:
    """Yield a JSON array with one object per row and line."""
    rows = [as_plain(dict(zip(answer.columns, row, strict=True))) for row in answer.rows]
    yield "["
    yield ",".join("\n" + json.dumps(row, default=str, allow_nan=False) for row in rows)
    yield "\n]\n"


_FORMATS = {"table": _table, "csv": _csv, "json": _json}


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.1f}" if 1e6 <= abs(value) < 1e12 else f"{value:.6g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_text(item)}' for key, item in value.items())}}}"
    return str(value)
