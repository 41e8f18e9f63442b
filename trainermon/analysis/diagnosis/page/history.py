"""How loss, gradients and the module in question went in the stored steps around the one that is explained."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainermon.analysis.diagnosis.evidence import open_store
from trainermon.analysis.diagnosis.findings import Diagnosis, FaultPhase
from trainermon.core.catalogue import LOSS_SERIES
from trainermon.core.values import Kind

if TYPE_CHECKING:
    import duckdb

BEFORE, AFTER = 60, 15
"""How many stored steps are shown before and after the one in question."""

_NORM = "sqrt(sum(sum_sq))"
_LARGEST = "max(greatest(abs(min), abs(max)))"


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One step of a curve on the page of a diagnosis.

    Attributes:
        step: The step.
        low: Smallest value over the ranks whose tensor is all finite; None: there is no such rank.
        high: Largest value, likewise.
        own: Value of the rank in question, likewise.
        bad: Whether an element was NaN or infinite on some rank.
    """

    step: int
    low: float | None
    high: float | None
    own: float | None
    bad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryCurve:
    """A number over the steps, to be drawn on the page of a diagnosis.

    Attributes:
        title: What it is.
        by_power: Whether a logarithmic axis suits it.
        points: In the order of steps.
        reference: The same of the run it is compared with; () if there is none.
    """

    title: str
    by_power: bool
    points: tuple[CurvePoint, ...]
    reference: tuple[CurvePoint, ...] = ()


@dataclass(frozen=True, slots=True)
class _HistoryQuery:
    """What to draw: which rows of the store (SQL with `values` for its question marks), and which number of them."""

    title: str
    where: str
    number: str
    values: tuple[str, ...] = ()
    by_power: bool = True


def curves(run_dir: Path, diagnosis: Diagnosis) -> tuple[HistoryCurve, ...]:
    """Read from the run's store the curves around a diagnosis (loss, gradient norm …); () if nothing is stored.

    A curve that looks like another is left out: gradients before and after a reduction over one rank.
    """
    if diagnosis.step is None:
        return ()
    with _opened(run_dir) as connection:
        if connection is None:
            return ()
        rows = _StoredRows(connection, diagnosis, diagnosis.attempt)
        steps = _window(rows, diagnosis.step)
        drawn = [(question, _points(rows, question, steps)) for question in _questions(diagnosis)]
    with _opened(Path(diagnosis.reference) if diagnosis.reference else None) as connection:
        rows = _StoredRows(connection, diagnosis, None)
        beside = [_points(rows, question, steps) if connection is not None else () for question, _ in drawn]
    found: dict[tuple[str, tuple[CurvePoint, ...]], HistoryCurve] = {}
    for (question, points), others in zip(drawn, beside, strict=True):
        curve = HistoryCurve(title=question.title, by_power=question.by_power, points=points, reference=others)
        if len(points) > 1:
            found.setdefault((question.number, points), curve)
    return tuple(found.values())


class _StoredRows(NamedTuple):
    """Stored rows of one attempt, those that count in the end if `attempt` is None; and what they are asked for."""

    connection: duckdb.DuckDBPyConnection | None
    diagnosis: Diagnosis
    attempt: int | None

    def ask(self, query: str, values: Sequence[object]) -> list[Any]:
        """Return the rows of a query on `chosen`."""
        chosen = "stats" if self.attempt is None else f"(SELECT * FROM all_stats WHERE attempt = {self.attempt:d})"  # noqa: S608
        assert self.connection is not None
        return self.connection.execute(f"WITH chosen AS (FROM {chosen}) {query}", list(values)).fetchall()


def _opened(run_dir: Path | None) -> contextlib.AbstractContextManager[duckdb.DuckDBPyConnection | None]:
    return contextlib.nullcontext() if run_dir is None else open_store(run_dir)


def _window(rows: _StoredRows, step: int) -> tuple[int, int]:
    query = f"""
        SELECT coalesce(min(step), {step:d}), coalesce(max(step), {step:d}) FROM (
            (SELECT DISTINCT step FROM chosen WHERE step <= ? ORDER BY step DESC LIMIT {BEFORE})
            UNION ALL
            (SELECT DISTINCT step FROM chosen WHERE step > ? ORDER BY step LIMIT {AFTER})
        )
    """  # noqa: S608  # numbers of ours
    first, last = rows.ask(query, [step, step])[0]
    return first, last


def _questions(diagnosis: Diagnosis) -> list[_HistoryQuery]:
    loss = f"kind = '{Kind.LOSS}' AND name = '{LOSS_SERIES}'"
    found = [_HistoryQuery("Loss", loss, "sum(sum) / nullif(sum(finite), 0)", by_power=False)]
    for kind, when in ((Kind.GRAD_UNREDUCED, "before"), (Kind.GRAD_REDUCED, "after")):
        where = f"kind = '{kind}' AND micro_step IS NULL"
        found.append(_HistoryQuery(f"Norm of the gradients {when} the reduction", where, _NORM))
    name = diagnosis.module
    if not name or name.startswith("("):
        return found
    activations = f"kind = '{Kind.ACTV}' AND name = ? AND slot LIKE 'output%'"
    found.append(_HistoryQuery(f"Largest value that {name} returned", activations, _LARGEST, (name,)))
    kind = Kind.GRAD_UNREDUCED if diagnosis.phase is FaultPhase.BACKWARD else Kind.PARAM_ORIGIN
    of_module = f"kind = '{kind}' AND micro_step IS NULL AND starts_with(name, ?)"
    what = "gradients" if kind == Kind.GRAD_UNREDUCED else "weights"
    return [*found, _HistoryQuery(f"Norm of the {what} of {name}", of_module, _NORM, (f"{name}.",))]


def _points(rows: _StoredRows, question: _HistoryQuery, steps: tuple[int, int]) -> tuple[CurvePoint, ...]:
    query = f"""
        SELECT step, min(number), max(number), max(number) FILTER (rank = ?), bool_or(bad) FROM (
            SELECT step, rank, sum(nans + infs) > 0 AS bad, CASE WHEN NOT bad THEN {question.number} END AS number
            FROM chosen WHERE step BETWEEN ? AND ? AND {question.where} GROUP BY step, rank
        ) GROUP BY step ORDER BY step
    """  # noqa: S608  # SQL of ours; what comes from the run is handed over as values
    rank = -1 if rows.diagnosis.rank is None else rows.diagnosis.rank
    found = rows.ask(query, [rank, *steps, *question.values])
    return tuple(
        CurvePoint(step=step, low=_known(low), high=_known(high), own=_known(own), bad=bool(bad))
        for step, low, high, own, bad in found
    )


def _known(value: float | None) -> float | None:
    """Return a number, None for one that float64 cannot hold, as the norm of very large elements."""
    return value if value is not None and math.isfinite(value) else None
