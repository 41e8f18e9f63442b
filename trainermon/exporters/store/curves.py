"""A row of a heat map as a curve: any statistic of it over all steps, thinned to what a screen can show, or as a table.

Which rows of the store belong to it says `heat_row`, as for the heat map itself. One node's segments are read while the
run is on, those of all nodes afterwards.
"""

# ruff: noqa: S608  (the SQL consists of our own names, of numbers, and of quoted text)

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from trainermon.core.derived import DERIVED, SQL
from trainermon.core.errors import QueryError, StoreError
from trainermon.core.values import STATISTICS, Kind, SeriesKey
from trainermon.exporters.heat_rows import heat_row
from trainermon.exporters.store.blocks import first_unreadable
from trainermon.exporters.store.segments import quoted, reason_of
from trainermon.exporters.store.step_tables import STEP_VALUES
from trainermon.exporters.store.tables import open_stats

if TYPE_CHECKING:
    import duckdb

Answer = TypeVar("Answer")

MAX_POINTS = 4000
MAX_LINES = 64
MAX_TABLE_ROWS = 500_000
MAX_STEP_LINES = 200_000
MAX_STEP_NUMBERS = 3_000_000
"""Of what is recorded, with up to 20 bytes each: so many pass through a controller, which takes 64 MiB of an agent."""
_ATTEMPTS = 3

_KEY = ("kind", "name", "slot", "call", "stage")
_CALL = re.compile(r"#\d+$")
_STAGE = re.compile(r"^\d+:")

_MERGED = ", ".join(f"{'sum' if name not in ('min', 'max') else name}({name})::DOUBLE AS {name}" for name in STATISTICS)
_VALUES: Mapping[str, str] = {
    **{name: name for name in STATISTICS},
    **SQL,
    "norm": "sqrt(sum_sq / num_steps)",  # a row that was merged over n steps holds the sum over them
    "absmax": "CASE WHEN isfinite(max) THEN greatest(-min, max) END",
    "finite": f"({SQL['finite']})::BIGINT",
    "nonfinite": f"({SQL['nonfinite']})::BIGINT",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CurveQuery:
    """Which curve is asked for.

    Attributes:
        heat_map: Name of the heat map, as `grad_reduced` or `feature/attention_entropy`.
        row: Its row, by the label beside it.
        statistic: What is shown of it, such as `rms`: one of `core.derived.DERIVED`.
        by_rank: One line for each rank; else the elements of all ranks are merged.
        first: The first step; None: the first that is stored.
        last: The last step; None: the last that is stored.
        points: How many points a line has at most, 1 to 4 000; more steps share one.
    """

    heat_map: str
    row: str
    statistic: str = "rms"
    by_rank: bool = False
    first: int | None = None
    last: int | None = None
    points: int = MAX_POINTS

    def __post_init__(self) -> None:
        if self.statistic not in DERIVED:
            raise QueryError(f"unknown statistic {self.statistic!r}; expected one of: {', '.join(DERIVED)}")


class CurveLine(NamedTuple):
    """One line: of a rank, or of all ranks together. All arrays are float64 `[n]`, ascending by step.

    Attributes:
        rank: The rank; None: all together.
        steps: The first step of each point.
        low: The smallest value of the steps that share the point; NaN: none has one.
        high: The largest.
        mean: Their mean.
        nonfinite: How many elements of these steps were not finite; the values are those of the finite ones.
    """

    rank: int | None
    steps: npt.NDArray[np.float64]
    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]
    mean: npt.NDArray[np.float64]
    nonfinite: npt.NDArray[np.float64]


class Curve(NamedTuple):
    """The lines of a curve.

    Attributes:
        lines: At most 64, by rank.
        num_lines: How many there would be.
        stride: How many steps a point stands for; 1: each has its own.
    """

    lines: list[CurveLine]
    num_lines: int
    stride: float


def read_curve(run_dir: Path, query: CurveQuery, *, node: str = "*") -> Curve:
    """Return a row of a heat map as lines; about 50 ms for a series of one rank among 6 M rows.

    Lowest and highest value of each point are those of single steps, so that no peak is lost, and every non-finite
    element is counted in its point.

    Args:
        run_dir: The run directory.
        query: Which row, and what of it.
        node: The node whose segments are read; `*`: those of all.

    Raises:
        QueryError: The run has no such row.
        StoreError: The run cannot be read.
    """
    return again(run_dir, node, lambda connection: _curve(connection, query))


def read_table(run_dir: Path, query: CurveQuery, *, node: str = "*") -> bytes:
    """Return the same steps as CSV, UTF-8: one line per step (and rank), all moments and what follows from them.

    Numbers have all their digits; what is not defined is empty. `first` and `last` of the query count, its statistic
    and points do not.

    Raises:
        QueryError: The run has no such row, or there are more than 500 000 lines.
        StoreError: The run cannot be read.
    """
    return again(run_dir, node, lambda connection: _table(connection, query))


def read_steps(run_dir: Path, *, first: int | None = None, last: int | None = None, node: str = "*") -> bytes:
    """Return the numbers of the steps as they are stored, as CSV, UTF-8: a line per step and rank of `step_values`.

    Learning rates and what the script records have a column each: `learning_rates.0`, `recorded.accuracy`. Numbers have
    all their digits; empty is what was not recorded, `nan` and `inf` what was not finite. A line takes about 30 µs
    of CPU time, with many recorded numbers 3 µs for each.

    Args:
        run_dir: The run directory.
        first: The first step; None: the first that is stored.
        last: The last step; None: the last that is stored.
        node: The node whose segments are read; `*`: those of all.

    Raises:
        QueryError: There are more than 200 000 lines, or 3 000 000 recorded numbers.
        StoreError: The run cannot be read.
    """
    return again(run_dir, node, lambda connection: _steps(connection, _within(first, last)))


def encode_curve(curve: Curve, query: CurveQuery) -> bytes:
    """Return the curve in the page's binary format.

    That is the uint32 length of a JSON header, the header, padding up to a multiple of 8 bytes, and the five arrays of
    each line one after the other as little-endian float64. The header says how many points each line has.
    """
    header = {
        "kind": query.heat_map,
        "row": query.row,
        "statistic": query.statistic,
        "lines": [{"rank": line.rank, "size": len(line.steps)} for line in curve.lines],
        "num_lines": curve.num_lines,
        "stride": curve.stride,
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(4 + len(text)) % 8)
    columns = [column.astype("<f8").tobytes() for line in curve.lines for column in line[1:]]
    return b"".join([len(text).to_bytes(4, "little"), text, *columns])


def again(run_dir: Path, node: str, ask: Callable[[duckdb.DuckDBPyConnection], Answer]) -> Answer:
    """Ask a newly opened run, again where a segment was merged away meanwhile."""
    import duckdb

    for remaining in reversed(range(_ATTEMPTS)):
        with open_stats(run_dir, node=node) as connection:
            try:
                return ask(connection)
            except duckdb.IOException as error:
                if not remaining:
                    raise StoreError(f"{run_dir}: {reason_of(error)}") from error
            except duckdb.Error as error:
                raise (first_unreadable(run_dir) or StoreError(f"{run_dir}: {reason_of(error)}")) from error
    raise AssertionError("the last attempt returns or raises")


def _curve(connection: duckdb.DuckDBPyConnection, query: CurveQuery) -> Curve:
    _create_rows(connection, query)
    ((first, last, num_steps),) = connection.execute(
        "SELECT min(step), max(step), count(DISTINCT step) FROM points"
    ).fetchall()
    points = max(1, min(query.points, MAX_POINTS))
    first, last = (first if query.first is None else query.first), (last if query.last is None else query.last)
    stride = 1.0 if num_steps <= points else max(1.0, (last - first + 1) / points)
    place = "step" if stride == 1 else f"floor((step - {first}) / {stride!r})"
    cursor = connection.execute(
        f"SELECT rank, min(step)::DOUBLE AS step, min(value), max(value), avg(value), sum(nonfinite)::DOUBLE FROM"
        f" (SELECT *, ({_VALUES[query.statistic]})::DOUBLE AS given, nans + infs AS nonfinite,"
        " CASE WHEN isfinite(given) THEN given END AS value FROM points)"
        f" GROUP BY rank, {place} ORDER BY rank, step"
    )
    found = [np.ma.filled(column.astype(np.float64), math.nan) for column in cursor.fetchnumpy().values()]
    ranks = np.unique(found[0]).astype(int)
    lines = [
        CurveLine(rank if query.by_rank else None, *(column[found[0] == rank] for column in found[1:]))
        for rank in ranks[:MAX_LINES].tolist()
    ]
    return Curve(lines, len(ranks), stride)


def _table(connection: duckdb.DuckDBPyConnection, query: CurveQuery) -> bytes:
    _create_rows(connection, query)
    derived = ", ".join(f"{formula} AS {name}" for name, formula in _VALUES.items() if name not in STATISTICS)
    columns = "step, rank" if query.by_rank else "step"
    moments = ", ".join(
        f"CASE WHEN isfinite({name}) THEN {name} END AS {name}"
        if name in ("min", "max")
        else f"{name}::BIGINT AS {name}"
        if name in ("count", "zeros", "nans", "infs")
        else name
        for name in STATISTICS
    )
    ((size,),) = connection.execute("SELECT count(*) FROM points").fetchall()
    if size > MAX_TABLE_ROWS:
        raise QueryError(
            f"{size} lines are more than the {MAX_TABLE_ROWS} of one table; ask for fewer steps, or all ranks merged"
        )
    cursor = connection.execute(f"SELECT {columns}, {moments}, {derived}, num_steps FROM points ORDER BY step, rank")
    return _csv([column[0] for column in cursor.description], cursor.fetchall())


def _steps(connection: duckdb.DuckDBPyConnection, steps: Sequence[str]) -> bytes:
    chosen = f"WITH stats AS (SELECT * FROM main.stats WHERE {' AND '.join(['true', *steps])})"
    _require_few(connection, chosen)
    connection.execute(f"CREATE TEMP TABLE lines AS {chosen} SELECT * FROM ({STEP_VALUES})")
    ((num_rates, names),) = connection.execute(
        "SELECT max(len(learning_rates)), list_sort(list_distinct(flatten(list(map_keys(recorded))))) FROM lines"
    ).fetchall()
    num_rates, names = num_rates or 0, names or []
    cursor = connection.execute(  # a map as two lists, which takes a tenth of the time
        "SELECT * EXCLUDE (learning_rates, recorded), learning_rates, map_keys(recorded), map_values(recorded)"
        " FROM lines ORDER BY attempt, step, rank"
    )
    columns = [column[0] for column in cursor.description[:-3]]
    columns += [f"learning_rates.{group}" for group in range(num_rates)] + [f"recorded.{name}" for name in names]
    batches = iter(lambda: cursor.fetchmany(1000), [])  # all at once would take gigabytes
    return _csv(columns, (_flat(line, num_rates, names) for batch in batches for line in batch))


def _require_few(connection: duckdb.DuckDBPyConnection, chosen: str) -> None:
    """Raise QueryError if the steps have more lines than one table takes: this needs a fraction of its time."""
    numbers = f"kind IN ('{Kind.LOSS}', '{Kind.STEP}')"
    told = f"{numbers} OR kind IN ('{Kind.GRAD_UNREDUCED}', '{Kind.GRAD_REDUCED}')"
    ((size, width),) = connection.execute(
        f"{chosen} SELECT (SELECT count(*) FROM (SELECT DISTINCT step, rank FROM stats WHERE {told})),"
        f" (SELECT count(*) FROM (SELECT DISTINCT name, slot FROM stats WHERE {numbers}))"
    ).fetchall()
    most = min(MAX_STEP_LINES, MAX_STEP_NUMBERS // max(1, width))
    if size > most:
        raise QueryError(
            f"{size} lines, one per step and rank, are more than the {most} of one table with {width} numbers a line;"
            " look at fewer steps, or ask `trainermon query RUN --format csv 'FROM step_values'`"
        )


def _flat(line: Sequence[Any], num_rates: int, names: Sequence[str]) -> list[Any]:
    """Return a line with a place for each learning rate and recorded number; lists of both are at its end."""
    *numbers, rates, keys, values = line
    rates, recorded = rates or [], dict(zip(keys or (), values or (), strict=True))
    return [*numbers, *rates, *[None] * (num_rates - len(rates)), *map(recorded.get, names)]


def _csv(columns: Sequence[str], lines: Iterable[Sequence[Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(lines)
    return text.getvalue().encode()


def _create_rows(connection: duckdb.DuckDBPyConnection, query: CurveQuery) -> None:
    """Create the table `points`: the moments of the row by step, and by rank if that is asked for (else it is 0)."""
    connection.execute(
        f"CREATE TEMP TABLE points AS SELECT {'rank' if query.by_rank else '0 AS rank'}, step, {_MERGED},"
        f" max(num_steps) AS num_steps FROM stats WHERE {condition_of(connection, query)} GROUP BY ALL"
    )


def condition_of(connection: duckdb.DuckDBPyConnection, query: CurveQuery) -> str:
    """Return the SQL condition on the rows of the store that the heat map's row is made of.

    A label is not meant to be parsed, so what may be the name in it is only a first choice, by which most of the
    segments need not be read.
    """
    kind = query.heat_map.partition("/")[0]
    names = ", ".join(quoted(name) for name in sorted(_possible_names(query.row)))
    roughly = f"kind = {quoted(kind)} AND name IN ({names})"
    keys = connection.execute(f"SELECT DISTINCT {', '.join(_KEY)} FROM stats WHERE {roughly}").fetchall()
    chosen = [key for key in keys if _is_row(key, query)]
    if not chosen:
        raise QueryError(f"{query.row!r} is no row of {query.heat_map!r}, or nothing of it has been stored yet")
    listed = ", ".join(
        f"({', '.join(quoted(part) if isinstance(part, str) else str(part) for part in key)})" for key in chosen
    )
    return " AND ".join([roughly, f"({', '.join(_KEY)}) IN ({listed})", *_within(query.first, query.last)])


def _within(first: int | None, last: int | None) -> list[str]:
    lower = [f"step >= {first:d}"] if first is not None else []
    return lower + ([f"step <= {last:d}"] if last is not None else [])


def _is_row(key: tuple[Any, ...], query: CurveQuery) -> bool:
    kind, name, slot, call, stage = key
    found = heat_row(SeriesKey(Kind(kind), name, slot, call, stage=stage))
    return found is not None and (found.heat_map, found.label) == (query.heat_map, query.row)


def _possible_names(label: str) -> Iterator[str]:
    """Yield every name that a series with this label may have: with and without stage, call and slot."""
    for unstaged in {label, _STAGE.sub("", label)}:
        for text in {unstaged, _CALL.sub("", unstaged)}:
            parts = text.split(".")
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))
