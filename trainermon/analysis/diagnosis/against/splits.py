"""The rows of two runs side by side, also where a run is split over other ranks than its reference.

Then a rank holds another part of a parameter, and of the data, than the rank of that number there. Rows of parameters,
gradients and moments are merged over the ranks: statistics of shards add up to those of the whole tensor, exactly. Of
the others only what no rank holds a part of can be compared, and nothing if ranks were given other parts of the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from trainermon.analysis.diagnosis.against.row_pairs import OURS, REFERENCE
from trainermon.analysis.diagnosis.against.sides import RunSide
from trainermon.analysis.diagnosis.evidence import open_store
from trainermon.core.derived import SQL
from trainermon.core.values import Kind
from trainermon.exporters.store.tables import add_run

if TYPE_CHECKING:
    import duckdb

_ROWS = {OURS: "stats", REFERENCE: "reference_rows"}
_MERGED = (Kind.PARAM_ORIGIN, Kind.GRAD_REDUCED, Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.UPDATE, Kind.PARAM_UPDATED)
_OF_DATA = ("dp_size", "cp_size")
_DERIVED = ", ".join(f"{formula} AS {name}" for name, formula in SQL.items())
_SUMS = {"count": "BIGINT", "sum": "DOUBLE", "sum_sq": "DOUBLE", "zeros": "BIGINT", "nans": "BIGINT", "infs": "BIGINT"}
_COMPARED = {
    True: "parameters, gradients and moments were merged over ranks; compared of activations were those of which no"
    " rank holds a part, and no gradients before the reduction, communication or checksums",
    False: "parameters, gradients and moments were merged over ranks; ranks were given other parts of the batch:"
    " neither it nor activations, losses, gradients before the reduction, communication or checksums were compared",
}


def stored_kinds(both: SideBySide) -> set[str]:
    """Return the kinds of which a run has rows, whether these can be compared or not."""
    rows = (both.connection.execute(f"SELECT DISTINCT kind FROM {name}").fetchall() for name in _ROWS.values())  # noqa: S608
    return {str(kind) for found in rows for (kind,) in found}


class SideBySide(NamedTuple):
    """The rows of two runs in one database.

    Attributes:
        connection: It has the views `OURS` and `REFERENCE`.
        split: How the runs are split otherwise, and what was left out for that, as a sentence; "": alike.
    """

    connection: duckdb.DuckDBPyConnection
    split: str


@contextlib.contextmanager
def open_both(ours: RunSide, theirs: RunSide) -> Iterator[SideBySide | None]:
    """Open the rows of two runs, merged over ranks where these are split otherwise; None if one has no store."""
    with open_store(ours.path) as connection:
        if connection is None:
            yield None
            return
        add_run(connection, theirs.path, _ROWS[REFERENCE])
        layout = _other_layout(ours, theirs)
        split = layout or _other_shards(connection) or _other_sequences(connection, ours)
        if not split:
            for view, rows in _ROWS.items():
                connection.execute(f"CREATE TEMP VIEW {view} AS SELECT * FROM {rows}")  # noqa: S608  # our own names
            yield SideBySide(connection, "")
            return
        # wrappers of shards decide whose gradient an input's is: that of one user, or the sum of all
        is_wrapped_alike = layout and ours.layout.get("framework") == theirs.layout.get("framework")
        of_ranks = (Kind.ACTV, Kind.LOSS, *([Kind.ACTV_GRAD] if is_wrapped_alike else []))
        is_same_data = _sizes(ours) == _sizes(theirs)
        for view in _ROWS:
            _merge(connection, view)
            if is_same_data and ours.places and theirs.places:
                _add_activations(connection, view, ours if view == OURS else theirs, of_ranks)
        yield SideBySide(connection, f"{split}: {_COMPARED[is_same_data]}")


def _sizes(side: RunSide) -> list[object]:
    return [side.layout.get(size, 1) for size in _OF_DATA]


def _other_layout(ours: RunSide, theirs: RunSide) -> str:
    """Return in which axes and in which framework two runs are split otherwise, in words; "": in none that is known."""
    keys = sorted(ours.layout.keys() & theirs.layout.keys())
    other = [
        f"{key} {ours.layout[key]} and {theirs.layout[key]}" for key in keys if ours.layout[key] != theirs.layout[key]
    ]
    return f"the runs are split otherwise ({', '.join(other)})" if other else ""


def _other_shards(connection: duckdb.DuckDBPyConnection) -> str:
    """Return that ranks hold other parts of parameters of the same size, as stages of ZeRO do; "" if they do not."""
    kinds = ", ".join(f"'{kind}'" for kind in _MERGED)
    first = (
        f"FROM {{rows}} WHERE kind IN ({kinds}) AND in_global_norm"  # noqa: S608  # our own names
        f" AND step = (SELECT min(step) FROM {{rows}} WHERE kind IN ({kinds}))"
    )
    part, whole = (
        f"SELECT kind, name, {rank} AS rank, sum(count) AS count {first} GROUP BY ALL" for rank in ("rank", "0")
    )
    # a parameter that one of them begins to train later says nothing
    known = " AND ".join(f"(kind, name) IN (SELECT (kind, name) {first.format(rows=rows)})" for rows in _ROWS.values())
    query = (
        "SELECT count(*) FROM ({0}) ours {how} JOIN ({1}) theirs USING (kind, name, rank)"  # noqa: S608  # our own names
        f" WHERE ours.count IS DISTINCT FROM theirs.count AND {known}"
    )
    apart, wholly = (
        connection.execute(query.format(*(text.format(rows=rows) for rows in _ROWS.values()), how=how)).fetchall()[0][0]
        for text, how in ((part, "FULL"), (whole, ""))
    )
    return "ranks hold other parts of parameters than in the reference" if apart and not wholly else ""


def _other_sequences(connection: duckdb.DuckDBPyConnection, ours: RunSide) -> str:
    """Return that activations are split otherwise, as sequence parallelism does; "" if none is a part, or all are."""
    size = ours.layout.get("tp_size", 1)
    rows, others = _ROWS.values()
    first = f"(SELECT min(step) FROM {rows} SEMI JOIN {others} USING (step))"  # noqa: S608  # our own names
    same, split = connection.execute(
        f"""
        SELECT count(*) FILTER (one.count = other.count),
            count(*) FILTER (one.count * $size = other.count OR one.count = other.count * $size)
        FROM {rows} one JOIN {others} other USING (step, rank, kind, name, slot, call, micro_step, stage)
        WHERE kind = '{Kind.ACTV}' AND step = {first}
        """,  # noqa: S608  # our own names
        {"size": size},
    ).fetchall()[0]
    return "tensor parallel ranks hold other parts of activations" if size > 1 and same and split else ""


def _merge(connection: duckdb.DuckDBPyConnection, view: str) -> None:
    """Create the table `view` of the rows of parameters, merged over ranks, each element once, as rows of rank 0."""
    kinds = ", ".join(f"'{kind}'" for kind in _MERGED)
    sums = ", ".join(f"sum({name})::{kind} AS {name}" for name, kind in _SUMS.items())
    connection.execute(f"""
        CREATE TEMP TABLE {view} AS
        WITH merged AS (
            SELECT kind, name, slot, 0 AS call, NULL::INTEGER AS micro_step, 0 AS stage, 0 AS rank, step, num_steps,
                any_value(dtype) AS dtype, min(min) AS min, max(max) AS max, {sums}
            FROM {_ROWS[view]} WHERE kind IN ({kinds}) AND in_global_norm
            GROUP BY kind, name, slot, step, num_steps
        ) SELECT *, {_DERIVED} FROM merged
    """)  # noqa: S608  # our own names


def _add_activations(connection: duckdb.DuckDBPyConnection, view: str, side: RunSide, of_ranks: Sequence[Kind]) -> None:
    """Add the rows of one rank of those that were given the same part of the batch, as rows of that part.

    Left out is what such ranks do not have alike, and what several stages of a pipeline have: each has a part of it.
    """
    kinds = ", ".join(f"'{kind}'" for kind in of_ranks)
    parts = ", ".join(f"({rank}, {_part(place)}, {place.get('pp', 0)})" for rank, place in side.places.items())
    copies = "PARTITION BY kind, name, slot, call, micro_step, part, step, num_steps"
    connection.execute(f"""
        INSERT INTO {view} BY NAME
        SELECT kind, name, slot, call, micro_step, 0 AS stage, part AS rank, step, num_steps, dtype, min, max,
            {", ".join(_SUMS)}, {", ".join(SQL)}
        FROM {_ROWS[view]} JOIN (VALUES {parts}) parts(rank, part, pp) USING (rank) WHERE kind IN ({kinds})
        QUALIFY row_number() OVER ({copies} ORDER BY rank) = 1
            AND max(pp) OVER (PARTITION BY name) = min(pp) OVER (PARTITION BY name)
            AND max(min) OVER ({copies}) = min(min) OVER ({copies})
            AND max(max) OVER ({copies}) = min(max) OVER ({copies})
    """)  # noqa: S608  # our own names


def _part(place: Mapping[str, int]) -> int:
    """Return a number for the part of the batch that a rank was given."""
    return place.get("dp", 0) + 2**16 * place.get("cp", 0)
