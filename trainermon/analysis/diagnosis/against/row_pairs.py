"""The stored rows of two runs that belong together: of one series, on one step, of one rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from trainermon.analysis.compare.items import DumpRow
from trainermon.analysis.compare.metrics import relative_size
from trainermon.analysis.diagnosis.wording import series_name
from trainermon.core.values import Kind

if TYPE_CHECKING:
    import duckdb

OURS, REFERENCE = "our_stats", "reference_stats"
"""Views of the rows of a run and of its reference."""

NOISE_STEPS = 5  # of these first common steps the noise is taken
NOISE_GROWTH = 10.0  # beyond this many times the noise of its kind, a row differs
NOISE_LIMIT = 0.05  # what is apart by more than this on the first common step differs from the start, and is no noise
_MAX_ROWS = 100_000
_MAX_NAMES = 4
_MOMENTS = ("count", "min", "max", "sum", "sum_sq", "zeros", "nans", "infs")
_TOLD = (*_MOMENTS, "dtype")
_MERGED_SUM = 1e-12  # what sums of the same numbers in float64, in another order, may be apart by
_SUMS_DIFFER = (
    f"abs(ours.sum - theirs.sum) > {_MERGED_SUM} * sqrt(ours.count * theirs.sum_sq)",
    f"abs(ours.sum_sq - theirs.sum_sq) > {_MERGED_SUM} * theirs.sum_sq",
)


def _differ(*more: str, but: tuple[str, ...] = ()) -> str:
    """Return the SQL of whether any moment, `but` these, differs, or `more` holds; one that a row lacks does not."""
    unequal = (f"ours.{name} <> theirs.{name}" for name in _MOMENTS if name not in but)
    return f"coalesce({' OR '.join((*unequal, *more))}, false)"


DIFFER = {False: _differ(), True: _differ(*_SUMS_DIFFER, but=("sum", "sum_sq"))}
"""SQL: whether two rows are not equal to the bit; by whether they were merged over ranks. NaN equals NaN."""
_KEYS = ("kind", "name", "slot", "call", "micro_step", "stage", "rank")
_COMPARED = (
    *(
        Kind.CHECKSUM,
        Kind.PARAM_ORIGIN,
        Kind.PARAM_USED,
        Kind.BUFFER,
        Kind.ACTV,
        Kind.LOSS,
        Kind.ACTV_RECOMPUTED,
        Kind.ACTV_GRAD,
        Kind.GRAD_UNREDUCED,
    ),
    *(Kind.COMM, Kind.GRAD_REDUCED, Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.STATE, Kind.UPDATE, Kind.PARAM_UPDATED),
)


_ABSENT = DumpRow(place="", state="", dtype="", shape=(0,), requires_grad=False)


class RowPair(NamedTuple):
    """One series (the statistics of one tensor) on one step, in this run and in the reference.

    Attributes:
        kind: What it is a statistic of: `grad_reduced`, `actv` …
        name: Module or parameter.
        slot: Which tensor of a call: `input.0`, `output.0`.
        call: Number of the module's call.
        micro_step: Number of the forward and backward within the step; None: once per step.
        stage: Number of the virtual pipeline stage.
        rank: The rank.
        ours: This run's statistics.
        theirs: The reference's.
        relative: The size of the difference; NaN: finite on one side only, None: not known.
        only_in: `this run` or `the reference` if the other one lacks it, else "".
    """

    kind: str
    name: str
    slot: str
    call: int
    micro_step: int | None
    stage: int
    rank: int
    ours: DumpRow
    theirs: DumpRow
    relative: float | None
    only_in: str = ""

    @property
    def place(self) -> str:
        """The series' name for a report, as `grad_unreduced h.0.up.weight`."""
        return series_name(self)

    @property
    def fingerprint(self) -> object:
        """A key that two pairs share if their elements are equal on both sides: statistics of ours and of theirs."""
        return tuple((item.shape, item.max, item.min, item.mean, item.norm) for item in (self.ours, self.theirs))


_TRAINED = f"SELECT name FROM {{}} WHERE kind = '{Kind.GRAD_REDUCED}'"  # noqa: S608  # our own names


def create_pairs(connection: duckdb.DuckDBPyConnection, *, is_split_otherwise: bool = False) -> None:
    """Create the views `pairs` of series that both `OURS` and `REFERENCE` have, and `one_sided` of others.

    Of runs that are split otherwise, series of other sizes are parts of tensors, and not compared; none is one-sided.
    """
    differs, whole = DIFFER[is_split_otherwise], "ours.count = theirs.count" if is_split_otherwise else "true"
    kinds = ", ".join(f"'{kind}'" for kind in _COMPARED)
    values = ", ".join(f"ours.{name} AS {name}, theirs.{name} AS their_{name}" for name in _TOLD)
    connection.execute(f"""
        CREATE OR REPLACE TEMP VIEW pairs AS
        SELECT ours.step, {", ".join(f"ours.{name}" for name in _KEYS)}, {values}, ({differs}) AS differs
        FROM {OURS} ours JOIN {REFERENCE} theirs ON ours.step = theirs.step AND ours.rank = theirs.rank
            AND ours.kind = theirs.kind AND ours.name = theirs.name AND ours.slot = theirs.slot
            AND ours.call = theirs.call AND ours.stage = theirs.stage AND ours.num_steps = theirs.num_steps
            AND coalesce(ours.micro_step, -1) = coalesce(theirs.micro_step, -1)
        WHERE ours.kind IN ({kinds})
            AND (ours.kind <> '{Kind.COMM}' OR starts_with(ours.slot, 'pre.') OR starts_with(ours.slot, 'post.'))
            AND {whole}
    """)  # noqa: S608  # our own names
    _create_one_sided(connection)
    if is_split_otherwise:
        connection.execute("DELETE FROM one_sided")


def _create_one_sided(connection: duckdb.DuckDBPyConnection) -> None:
    """Create the view of series that one side alone has on a step and rank on which both have others.

    What a configuration leaves out is no difference: a series counts if both its name and its kind have another one on
    both sides, on that step or an earlier one. Collectives are left out, since they need not be called alike.
    """
    kinds = ", ".join(f"'{kind}'" for kind in _COMPARED if kind not in (Kind.COMM, Kind.CHECKSUM))
    same = " AND ".join(f"one.{name} IS NOT DISTINCT FROM other.{name}" for name in (*_KEYS, "step"))
    sides = ((OURS, REFERENCE, "this run"), (REFERENCE, OURS, "the reference"))
    parts = (
        f"SELECT one.*, '{side}' AS only_in FROM {one} one ANTI JOIN {other} other ON {same}"  # noqa: S608
        for one, other, side in sides
    )
    connection.execute("""
        CREATE OR REPLACE TEMP TABLE paired AS
        SELECT name, rank, min(step) AS step FROM pairs GROUP BY name, rank
    """)
    connection.execute("""
        CREATE OR REPLACE TEMP TABLE paired_kinds AS SELECT kind, min(step) AS step FROM pairs GROUP BY kind
    """)
    connection.execute("""
        CREATE OR REPLACE TEMP TABLE watched AS SELECT DISTINCT step, rank FROM pairs WHERE kind <> 'loss'
    """)
    connection.execute(f"""
        CREATE OR REPLACE TEMP TABLE one_sided AS SELECT found.* FROM ({" UNION ALL ".join(parts)}) found
        JOIN paired ON paired.name = found.name AND paired.rank = found.rank AND paired.step <= found.step
        JOIN paired_kinds kinds ON kinds.kind = found.kind AND kinds.step <= found.step
        JOIN watched ON watched.step = found.step AND watched.rank = found.rank
        WHERE found.kind IN ({kinds})
    """)  # noqa: S608  # our own names
    # a gradient of an activation is made only where something before it is trained
    connection.execute(f"""
        DELETE FROM one_sided WHERE kind = '{Kind.ACTV_GRAD}' AND EXISTS (
            ({_TRAINED.format(OURS)} EXCEPT {_TRAINED.format(REFERENCE)})
            UNION ALL ({_TRAINED.format(REFERENCE)} EXCEPT {_TRAINED.format(OURS)}))
    """)  # noqa: S608  # our own names


def set_aside(connection: duckdb.DuckDBPyConnection) -> Iterator[str]:
    """Yield, for each side that has series of kinds or names, or moments, that the other one never has, which."""
    ours, theirs = (
        connection.execute(f"SELECT DISTINCT kind, name FROM {view}").fetchall()  # noqa: S608  # our own names
        for view in (OURS, REFERENCE)
    )
    for side, here, there in (("this run", ours, theirs), ("the reference", theirs, ours)):
        kinds, names = {kind for kind, _ in there}, {name for _, name in there}
        alone = [str(kind) for kind in _COMPARED if kind not in kinds and any(kind == one for one, _ in here)]
        compared = kinds.intersection(_COMPARED) - {Kind.COMM, Kind.CHECKSUM}
        others = sorted({name for kind, name in here if kind in compared and name not in names})
        more = [f"{len(others) - _MAX_NAMES:,} other names"] if len(others) > _MAX_NAMES else []
        if said := [*alone, *others[:_MAX_NAMES], *more]:
            yield f"only in {side}: {', '.join(said)}: not compared"
    for view, side in ((OURS, "this run"), (REFERENCE, "the reference")):
        missing = ", ".join(f"bool_or({name} IS NULL)" for name in _MOMENTS)
        found = connection.execute(f"SELECT {missing} FROM {view}").fetchall()[0]  # noqa: S608  # our own names
        if lacking := [name for name, is_missing in zip(_MOMENTS, found, strict=True) if is_missing]:
            yield f"stored rows of {side} lack {', '.join(lacking)}: not compared"


def read_pairs(connection: duckdb.DuckDBPyConnection, step: int) -> tuple[RowPair, ...]:
    """Return what is not equal to the bit on a step, at most 100 000 series, and what one side alone has on it.

    The gradient of a weight that a module is given as an argument is left out: it is no activation's, but the sum over
    all who took the weight.
    """
    names = ", ".join((*_KEYS, *_TOLD, *(f"their_{name}" for name in _TOLD)))
    query = f"SELECT {names} FROM pairs WHERE step = ? AND differs LIMIT {_MAX_ROWS}"  # noqa: S608  # our own names
    found, weights = [], _weights_given(connection, step)
    for row in connection.execute(query, [step]).fetchall():
        if row[0] == Kind.ACTV_GRAD and row[1:3] in weights:
            continue
        key, numbers = row[: len(_KEYS)], row[len(_KEYS) :]
        both = list(zip(numbers[: len(_TOLD)], numbers[len(_TOLD) :], strict=True))
        # what one of the two lacks is compared of neither
        ours, theirs = (_item([None if None in pair else pair[side] for pair in both]) for side in (0, 1))
        # a checksum is no size, and neither is where two differ only within the last bits of a sum
        relative = None if key[0] == Kind.CHECKSUM else relative_size(ours, theirs)
        found.append(RowPair._make((*key, ours, theirs, relative, "")))
    return (*found, *_one_sided(connection, step))


def _weights_given(connection: duckdb.DuckDBPyConnection, step: int) -> set[tuple[str, str]]:
    """Return name and slot of modules' arguments that are weights, as a tied one may be: by name or by statistics."""
    rows = connection.execute(
        f"""
        SELECT DISTINCT given.name, given.slot FROM {REFERENCE} given LEFT JOIN {REFERENCE} weight
            ON weight.kind IN ('{Kind.PARAM_ORIGIN}', '{Kind.PARAM_USED}')
            AND weight.step = given.step AND weight.rank = given.rank AND weight.count = given.count
            AND weight.min = given.min AND weight.max = given.max AND weight.sum_sq = given.sum_sq
        WHERE given.step = ? AND given.kind = '{Kind.ACTV}' AND NOT starts_with(given.slot, 'output')
            AND (given.slot IN ('input.weight', 'input.bias') OR (weight.name IS NOT NULL AND given.min < given.max))
        """,  # noqa: S608  # our own names
        [step],
    ).fetchall()
    return {(str(name), str(slot)) for name, slot in rows}


def _one_sided(connection: duckdb.DuckDBPyConnection, step: int) -> Iterator[RowPair]:
    names = ", ".join((*_KEYS, *_TOLD, "only_in"))
    query = f"SELECT {names} FROM one_sided WHERE step = ? LIMIT {_MAX_ROWS}"  # noqa: S608  # our own names
    for row in connection.execute(query, [step]).fetchall():
        key, item, only_in = row[: len(_KEYS)], _item(row[len(_KEYS) : -1]), row[-1]
        sides = (item, _ABSENT) if only_in == "this run" else (_ABSENT, item)
        yield RowPair._make((*key, *sides, None, only_in))


def _item(told: Sequence[Any]) -> DumpRow:
    count, low, high, total, square, _, nans, infs, dtype = told
    finite = count - nans - infs if None not in (count, nans, infs) else None
    has_finite = finite is None or finite > 0
    return DumpRow(
        place="",
        state="",
        dtype=dtype or "",
        shape=(count,) if count is not None else None,
        requires_grad=False,
        max=high if has_finite else None,
        min=low if has_finite else None,
        mean=total / finite if finite and total is not None else None,
        norm=math.sqrt(square) if square is not None else None,
        nans=nans,
        infs=infs,
    )
