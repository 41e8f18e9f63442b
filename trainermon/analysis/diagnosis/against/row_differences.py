"""The first step, and in it the first series, in which the stored statistics of two runs are apart.

Two runs that agree to the bit on some steps are deterministic: the first bit that differs later is the answer. Runs
that are apart from their first common step on are held against rounding there (`first_step.py`), and on later steps
against their own noise: what their first steps differ by. How far two rows are apart is decided in `compare.metrics`.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from trainermon.analysis.diagnosis.against.first_step import (
    JudgedStep,
    StepRounding,
    judge_first_step,
    noisy_sizes,
    operation_of,
    unit_of,
)
from trainermon.analysis.diagnosis.against.row_pairs import (
    NOISE_GROWTH,
    NOISE_STEPS,
    OURS,
    REFERENCE,
    RowPair,
    create_pairs,
    read_pairs,
    set_aside,
)
from trainermon.analysis.diagnosis.against.scaling import Scaling, find_scaling
from trainermon.analysis.diagnosis.against.sides import RunSide, common_product_unit
from trainermon.analysis.diagnosis.against.splits import SideBySide
from trainermon.analysis.diagnosis.execution_order import Flow, in_execution_order, read_flows, with_outer
from trainermon.analysis.diagnosis.rows.order import StepOrder
from trainermon.core.values import Kind

if TYPE_CHECKING:
    import duckdb

_NOISE_FLOOR = 1e-6
_MAX_NOISY_STEPS = 200


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowDifference:
    """The first differences between the stored rows of two runs.

    `step` is the first on which they are apart, None if they never are; `pairs` are its rows that are. `num_before`
    steps before it agree, to the bit if `is_exact`, else but for noise, of which `noise` is the largest relative size.
    `explained` is what rounding explains of the first of the pairs, where it is the first common step.
    `scaling` tells that all gradients of the step are off by one factor, None: they are not.
    `called` are the modules of which activations are stored on the step, `kinds` what else is, and `flows` what flowed
    between modules in the reference. `lost` are steps before it that one side alone has. `kept` tells that the weights
    that the optimizer left on the step before are stored on both sides, and agree if `is_exact`. `set_aside` says, in a
    sentence for each side, of what it alone has series on any step: they are not compared. `split` says how the
    runs are split otherwise, and what was compared; "": alike. `alone` are the numbers of steps that this run and the
    reference have alone; (0, 0) unless nothing differs.
    """

    num_steps: int
    step: int | None = None
    num_before: int = 0
    is_exact: bool = True
    noise: float = 0.0
    explained: float | None = None
    scaling: Scaling | None = None
    num_rows: int = 0
    pairs: tuple[RowPair, ...] = ()
    called: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()
    flows: tuple[Flow, ...] = ()
    lost: tuple[int, ...] = ()
    kept: bool = False
    set_aside: tuple[str, ...] = ()
    split: str = ""
    alone: tuple[int, int] = (0, 0)


def step_order(side: RunSide, flows: Iterable[Flow], *, has_unreduced: bool) -> StepOrder:
    """Return in which order a step of the run comes to its series.

    `flows` say what flowed between modules, `has_unreduced` whether gradients before the reduction are stored.
    """
    modules = in_execution_order(side.modules, flows)
    return StepOrder(modules, side.places, is_single=len(side.places) == 1, has_unreduced=has_unreduced)


@dataclasses.dataclass(frozen=True, slots=True)
class _Stores:
    """The rows of two runs, in the views `OURS` and `REFERENCE` of one connection."""

    connection: duckdb.DuckDBPyConnection
    ours: RunSide
    theirs: RunSide


def find_row_difference(both: SideBySide, ours: RunSide, theirs: RunSide, step: int | None = None) -> RowDifference:
    """Return the first step on which the rows of two runs are apart; with `step`, what is apart on it.

    Where they are split otherwise, all ranks count as one.
    """
    connection = both.connection
    create_pairs(connection, is_split_otherwise=bool(both.split))
    ours = dataclasses.replace(ours, places={}) if both.split else ours
    stores = _Stores(connection, ours, theirs)
    found = dataclasses.replace(_find(stores, step), set_aside=tuple(set_aside(connection)), split=both.split)
    called, kinds = _stored_on(connection, found.step)
    if found.step is None:
        return dataclasses.replace(found, called=called, kinds=kinds, alone=_alone(connection))
    flows = tuple(read_flows(connection, found.step, REFERENCE))
    query = f"SELECT count(*) FROM pairs WHERE step = ? AND kind = '{Kind.PARAM_UPDATED}'"  # noqa: S608  # our own name
    (updated,) = connection.execute(query, [found.step - 1]).fetchall()[0]
    lost = _lost(connection, found.step)
    return dataclasses.replace(
        found,
        called=called,
        kinds=kinds,
        flows=flows,
        lost=lost,
        kept=bool(updated),
        scaling=find_scaling(connection, found.step, (ours, theirs)),
    )


def _stored_on(connection: duckdb.DuckDBPyConnection, step: int | None) -> tuple[frozenset[str], frozenset[str]]:
    """Return the modules of which both sides have activations on a step, and the kinds of rows that both have."""
    stored = connection.execute("SELECT DISTINCT kind, name FROM pairs WHERE step = ?", [step]).fetchall()
    return frozenset(name for kind, name in stored if kind == Kind.ACTV), frozenset(kind for kind, _ in stored)


def _find(stores: _Stores, step: int | None) -> RowDifference:
    counted = stores.connection.execute("""
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
        pairs = read_pairs(stores.connection, first)
        return RowDifference(
            num_steps=len(counted), step=first, num_before=len(before), num_rows=rows[first], pairs=pairs
        )
    return _beyond_noise(stores, different, rows)


def _judged(stores: _Stores, step: int, noise: Mapping[str, float] | None) -> JudgedStep:
    """Return what is apart by more than rounding on one of the first common steps, none of which is equal.

    `noise` is what earlier ones differ by, None on the first.
    """
    _, kinds = _stored_on(stores.connection, step)
    flows = read_flows(stores.connection, step, REFERENCE)
    order = step_order(stores.ours, flows, has_unreduced=Kind.GRAD_UNREDUCED in kinds)
    return judge_first_step(read_pairs(stores.connection, step), _read_rounding(stores, step, noise), order)


def _read_rounding(stores: _Stores, step: int, noise: Mapping[str, float] | None) -> StepRounding:
    connection, products = stores.connection, common_product_unit(stores.ours, stores.theirs)
    equal = connection.execute(
        "SELECT DISTINCT kind, name, slot FROM pairs WHERE step = ? AND NOT differs AND min < max", [step]
    ).fetchall()
    types = connection.execute(
        f"SELECT DISTINCT name, dtype, their_dtype FROM pairs WHERE step = ? AND kind = '{Kind.ACTV}'",  # noqa: S608
        [step],
    ).fetchall()
    floating = [row for row in types if all(dtype and dtype.startswith(("float", "bfloat")) for dtype in row[1:])]
    units: dict[str, float] = defaultdict(float)
    for name, *dtypes in floating:
        for module in with_outer(name):
            units[module] = max(units[module], products, unit_of(*dtypes))
    return StepRounding(
        alike=frozenset(operation_of(*series) for series in equal),
        unit=max(units.values(), default=0.0) or _unit_without(connection, step),
        units=units,
        has_same_types=any(one == other for _, one, other in floating),
        are_weights_noisy=noise is not None or (step > 0 and _have_most_weights_parted(connection, step)),
        noise=max((noise or {}).values(), default=0.0),
    )


def _have_most_weights_parted(connection: duckdb.DuckDBPyConnection, step: int) -> bool:
    """Return whether more than half of the weights differ: then steps that are not stored have done it."""
    weights = f"kind IN ('{Kind.PARAM_ORIGIN}', '{Kind.PARAM_USED}', '{Kind.CHECKSUM}')"
    query = f"SELECT count(*), count(*) FILTER (differs) FROM pairs WHERE step = ? AND {weights}"  # noqa: S608  # ours
    number, differ = connection.execute(query, [step]).fetchall()[0]
    return bool(2 * differ > number)


def _unit_without(connection: duckdb.DuckDBPyConnection, step: int) -> float:
    """Return the unit roundoff where no activations tell it: that of float32 if the losses are equal to the bit."""
    query = f"SELECT count(*), count(*) FILTER (differs) FROM pairs WHERE step = ? AND kind = '{Kind.LOSS}'"  # noqa: S608
    number, differ = connection.execute(query, [step]).fetchall()[0]
    return unit_of("float32") if number and not differ else 1.0


def _alone(connection: duckdb.DuckDBPyConnection) -> tuple[int, int]:
    """Return how many steps each of the two sides has alone."""
    query = f"""
        SELECT count(*) FILTER (theirs.step IS NULL), count(*) FILTER (ours.step IS NULL)
        FROM (SELECT DISTINCT step FROM {OURS}) ours FULL JOIN (SELECT DISTINCT step FROM {REFERENCE}) theirs
            ON ours.step = theirs.step
    """  # noqa: S608  # our own names
    (found,) = connection.execute(query).fetchall()
    return found[0], found[1]


def _lost(connection: duckdb.DuckDBPyConnection, step: int) -> tuple[int, ...]:
    """Return the steps right before `step` that one side alone has."""
    query = f"""
        WITH ours AS (SELECT DISTINCT step FROM {OURS}), theirs AS (SELECT DISTINCT step FROM {REFERENCE}),
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


def _beyond_noise(stores: _Stores, steps: Sequence[int], rows: Mapping[int, int]) -> RowDifference:
    """Return the first step on which a row is apart by more than rounding, or by much more than its kind was before."""
    noise: dict[str, float] = defaultdict(float)
    for place, step in enumerate(steps[:_MAX_NOISY_STEPS]):
        is_early = place < NOISE_STEPS
        found = _judged(stores, step, noise if place else None) if is_early else _far(stores.connection, step, noise)
        if found.pairs:
            return RowDifference(
                num_steps=len(rows),
                step=step,
                num_before=place,
                is_exact=not place and not found.noise,
                noise=max([found.noise, *noise.values()]),
                explained=found.explained,
                num_rows=rows[step],
                pairs=found.pairs,
            )
        if is_early:
            _learn(noise, read_pairs(stores.connection, step))
    return RowDifference(num_steps=len(rows), is_exact=False, noise=max(noise.values(), default=0.0))


def _learn(noise: dict[str, float], pairs: Sequence[RowPair]) -> None:
    size_of = noisy_sizes(pairs)
    for pair in pairs:
        if pair.kind != Kind.CHECKSUM:
            noise[pair.kind] = max(noise[pair.kind], size_of(pair))


def _far(connection: duckdb.DuckDBPyConnection, step: int, noise: Mapping[str, float]) -> JudgedStep:
    """Return the rows of a later step that are apart by ten times the noise of their kind."""
    pairs = [pair for pair in read_pairs(connection, step) if pair.kind != Kind.CHECKSUM]
    size_of = noisy_sizes(pairs)
    limits = {kind: max(_NOISE_FLOOR, NOISE_GROWTH * noise.get(kind, 0.0)) for kind in {pair.kind for pair in pairs}}
    far = tuple(pair for pair in pairs if size_of(pair) > limits[pair.kind])
    return JudgedStep(far, max(noise.values(), default=0.0), None)
