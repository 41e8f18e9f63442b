"""The first step, and in it the first series, in which the stored statistics of two runs are apart.

Two runs that agree to the bit on some steps are deterministic: the first bit that differs later is the answer. Runs
that are apart from their first common step on (other hardware, types, or orders of summation) are held against their
own noise: what their first steps differ by. How far two rows are apart is decided in `compare.metrics`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from trainermon.analysis.compare.items import DumpRow
from trainermon.analysis.compare.metrics import relative_size
from trainermon.analysis.diagnosis.execution_order import Flow, read_flows
from trainermon.analysis.diagnosis.wording import series_name
from trainermon.core.values import Kind

if TYPE_CHECKING:
    import duckdb

REFERENCE = "reference_stats"
NOISE_STEPS = 5  # of these first common steps the noise is taken
NOISE_GROWTH = 10.0  # beyond this many times the noise of its kind, a row differs
NOISE_LIMIT = 0.05  # what is apart by more than this on the first common step differs from the start, and is no noise
_NOISE_FLOOR = 1e-6
_MAX_NOISY_STEPS = 200
_MAX_ROWS = 100_000
_MAX_NAMES = 4
_MOMENTS = ("count", "min", "max", "sum", "sum_sq", "zeros", "nans", "infs")
_KEYS = ("kind", "name", "slot", "call", "micro_step", "stage", "rank")
_COMPARED = (
    *(Kind.CHECKSUM, Kind.PARAM_ORIGIN, Kind.PARAM_USED, Kind.ACTV, Kind.LOSS, Kind.ACTV_GRAD, Kind.GRAD_UNREDUCED),
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowDifference:
    """The first differences between the stored rows of two runs.

    `step` is the first on which they are apart, None if they never are; `pairs` are its rows that are. `num_before`
    steps before it agree, to the bit if `is_exact`, else but for noise, of which `noise` is the largest relative size.
    `called` are the modules of which activations are stored on the step, `kinds` what else is, and `flows` what flowed
    between modules in the reference. `lost` are steps before it that one side alone has. `kept` tells that the weights
    that the optimizer left on the step before are stored on both sides, and agree if `is_exact`. `set_aside` says, in a
    sentence for each side, of what it alone has series on any step: they are not compared.
    """

    num_steps: int
    step: int | None = None
    num_before: int = 0
    is_exact: bool = True
    noise: float = 0.0
    num_rows: int = 0
    pairs: tuple[RowPair, ...] = ()
    called: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()
    flows: tuple[Flow, ...] = ()
    lost: tuple[int, ...] = ()
    kept: bool = False
    set_aside: tuple[str, ...] = ()


def find_row_difference(connection: duckdb.DuckDBPyConnection, step: int | None = None) -> RowDifference:
    """Return the first step on which `stats` and the view `REFERENCE` are apart; with `step`, what is apart on it."""
    found = dataclasses.replace(_find(connection, step), set_aside=tuple(_set_aside(connection)))
    stored = connection.execute("SELECT DISTINCT kind, name FROM pairs WHERE step = ?", [found.step]).fetchall()
    called = frozenset(name for kind, name in stored if kind == Kind.ACTV)
    kinds = frozenset(kind for kind, _ in stored)
    if found.step is None:
        return dataclasses.replace(found, called=called, kinds=kinds)
    flows = tuple(read_flows(connection, found.step, REFERENCE))
    query = f"SELECT count(*) FROM pairs WHERE step = ? AND kind = '{Kind.PARAM_UPDATED}'"  # noqa: S608  # our own name
    (updated,) = connection.execute(query, [found.step - 1]).fetchall()[0]
    lost = _lost(connection, found.step)
    return dataclasses.replace(found, called=called, kinds=kinds, flows=flows, lost=lost, kept=bool(updated))


def _find(connection: duckdb.DuckDBPyConnection, step: int | None) -> RowDifference:
    _create_pairs(connection)
    counted = connection.execute("""
        SELECT step, count(*), count(*) FILTER (differs OR only_in <> '') FROM
        (SELECT step, differs, '' AS only_in FROM pairs UNION ALL SELECT step, true, only_in FROM one_sided)
        GROUP BY step ORDER BY step
    """).fetchall()
    different = [found for found, _, number in counted if number and step in (None, found)]
    rows = {found: number for found, number, _ in counted}
    if not different:
        return RowDifference(num_steps=len(counted))
    first = different[0]
    before = [found for found, _, _ in counted if found < first]
    if before or step is not None:
        pairs = _pairs(connection, first)
        return RowDifference(
            num_steps=len(counted), step=first, num_before=len(before), num_rows=rows[first], pairs=pairs
        )
    return _beyond_noise(connection, different, rows)


def _create_pairs(connection: duckdb.DuckDBPyConnection) -> None:
    kinds = ", ".join(f"'{kind}'" for kind in _COMPARED)
    values = ", ".join(f"ours.{name} AS {name}, theirs.{name} AS their_{name}" for name in _MOMENTS)
    differs = " OR ".join(f"ours.{name} IS DISTINCT FROM theirs.{name}" for name in _MOMENTS)
    connection.execute(f"""
        CREATE OR REPLACE TEMP VIEW pairs AS
        SELECT ours.step, {", ".join(f"ours.{name}" for name in _KEYS)}, {values}, ({differs}) AS differs
        FROM stats ours JOIN {REFERENCE} theirs ON ours.step = theirs.step AND ours.rank = theirs.rank
            AND ours.kind = theirs.kind AND ours.name = theirs.name AND ours.slot = theirs.slot
            AND ours.call = theirs.call AND ours.stage = theirs.stage AND ours.num_steps = theirs.num_steps
            AND coalesce(ours.micro_step, -1) = coalesce(theirs.micro_step, -1)
        WHERE ours.kind IN ({kinds})
            AND (ours.kind <> '{Kind.COMM}' OR starts_with(ours.slot, 'pre.') OR starts_with(ours.slot, 'post.'))
    """)  # noqa: S608  # our own names
    _create_one_sided(connection)


def _create_one_sided(connection: duckdb.DuckDBPyConnection) -> None:
    """Create the view of series that one side alone has on a step and rank on which both have others.

    What a configuration leaves out is no difference: a series counts if both its name and its kind have another one on
    both sides, on that step or an earlier one. Collectives are left out, since they need not be called alike.
    """
    kinds = ", ".join(f"'{kind}'" for kind in _COMPARED if kind not in (Kind.COMM, Kind.CHECKSUM))
    same = " AND ".join(f"one.{name} IS NOT DISTINCT FROM other.{name}" for name in (*_KEYS, "step"))
    sides = (("stats", REFERENCE, "this run"), (REFERENCE, "stats", "the reference"))
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


def _set_aside(connection: duckdb.DuckDBPyConnection) -> Iterator[str]:
    """Yield, for each side that has series of kinds or names that the other one never has, which these are."""
    ours, theirs = (
        connection.execute(f"SELECT DISTINCT kind, name FROM {view}").fetchall()  # noqa: S608  # our own names
        for view in ("stats", REFERENCE)
    )
    for side, here, there in (("this run", ours, theirs), ("the reference", theirs, ours)):
        kinds, names = {kind for kind, _ in there}, {name for _, name in there}
        alone = [str(kind) for kind in _COMPARED if kind not in kinds and any(kind == one for one, _ in here)]
        compared = kinds.intersection(_COMPARED) - {Kind.COMM, Kind.CHECKSUM}
        others = sorted({name for kind, name in here if kind in compared and name not in names})
        more = [f"{len(others) - _MAX_NAMES:,} other names"] if len(others) > _MAX_NAMES else []
        if said := [*alone, *others[:_MAX_NAMES], *more]:
            yield f"only in {side}: {', '.join(said)}: not compared"


def _lost(connection: duckdb.DuckDBPyConnection, step: int) -> tuple[int, ...]:
    """Return the steps right before `step` that one side alone has."""
    query = f"""
        WITH ours AS (SELECT DISTINCT step FROM stats), theirs AS (SELECT DISTINCT step FROM {REFERENCE}),
        alone AS (
            SELECT coalesce(ours.step, theirs.step) AS step FROM ours FULL JOIN theirs ON ours.step = theirs.step
            WHERE ours.step IS NULL OR theirs.step IS NULL
        )
        SELECT step FROM alone WHERE step < $step
            AND step > (SELECT coalesce(max(ours.step), $step) FROM ours SEMI JOIN theirs ON ours.step = theirs.step
                        WHERE ours.step < $step)
        ORDER BY step
    """  # noqa: S608  # our own name
    rows = connection.execute(query, {"step": step}).fetchall()
    return tuple(found for (found,) in rows)


def _pairs(connection: duckdb.DuckDBPyConnection, step: int) -> tuple[RowPair, ...]:
    names = ", ".join((*_KEYS, *_MOMENTS, *(f"their_{name}" for name in _MOMENTS)))
    query = f"SELECT {names} FROM pairs WHERE step = ? AND differs LIMIT {_MAX_ROWS}"  # noqa: S608  # our own names
    found = []
    for row in connection.execute(query, [step]).fetchall():
        key, numbers = row[: len(_KEYS)], row[len(_KEYS) :]
        ours, theirs = _item(numbers[: len(_MOMENTS)]), _item(numbers[len(_MOMENTS) :])
        # a checksum is no size, and neither is where two differ only within the last bits of a sum
        relative = None if key[0] == Kind.CHECKSUM else relative_size(ours, theirs)
        found.append(RowPair._make((*key, ours, theirs, relative, "")))
    return (*found, *_one_sided(connection, step))


def _one_sided(connection: duckdb.DuckDBPyConnection, step: int) -> Iterator[RowPair]:
    names = ", ".join((*_KEYS, *_MOMENTS, "only_in"))
    query = f"SELECT {names} FROM one_sided WHERE step = ? LIMIT {_MAX_ROWS}"  # noqa: S608  # our own names
    for row in connection.execute(query, [step]).fetchall():
        key, item, only_in = row[: len(_KEYS)], _item(row[len(_KEYS) : -1]), row[-1]
        sides = (item, _ABSENT) if only_in == "this run" else (_ABSENT, item)
        yield RowPair._make((*key, *sides, None, only_in))


def _item(moments: Sequence[Any]) -> DumpRow:
    count, low, high, total, square, _, nans, infs = moments
    finite = count - nans - infs
    return DumpRow(
        place="",
        state="",
        dtype="",
        shape=(count,),
        requires_grad=False,
        max=high if finite else None,
        min=low if finite else None,
        mean=total / finite if finite else None,
        norm=math.sqrt(square),
        nans=nans,
        infs=infs,
    )


def _beyond_noise(
    connection: duckdb.DuckDBPyConnection, steps: Sequence[int], rows: Mapping[int, int]
) -> RowDifference:
    """Return the first step on which a row is apart by much more than rows of its kind were before."""
    noise: dict[str, float] = defaultdict(float)
    for place, step in enumerate(steps[:_MAX_NOISY_STEPS]):
        pairs = _pairs(connection, step)
        limit = {pair.kind: max(_NOISE_FLOOR, NOISE_GROWTH * noise[pair.kind]) for pair in pairs}
        far = [
            pair
            for pair in pairs
            if pair.only_in or _exceeds(pair.relative, NOISE_LIMIT if place == 0 else limit[pair.kind])
        ]
        if far:
            return RowDifference(
                num_steps=len(rows),
                step=step,
                num_before=place,
                is_exact=False,
                noise=max(noise.values(), default=0.0),
                num_rows=rows[step],
                pairs=tuple(far),
            )
        if place < NOISE_STEPS:
            _learn(noise, pairs)
    return RowDifference(num_steps=len(rows), is_exact=False, noise=max(noise.values(), default=0.0))


def _exceeds(relative: float | None, limit: float) -> bool:
    return relative is not None and (math.isnan(relative) or relative > limit)


def _learn(noise: dict[str, float], pairs: Iterable[RowPair]) -> None:
    for pair in pairs:
        if pair.relative is not None:
            noise[pair.kind] = max(noise[pair.kind], pair.relative)
