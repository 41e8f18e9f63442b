"""Which parameters have gradients in one of two runs alone, and the norms of the gradients that both have.

Runs that train other parameters, as where some are frozen, differ in the norm of all gradients without any fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from trainermon.analysis.diagnosis.against.row_pairs import OURS, REFERENCE
from trainermon.analysis.diagnosis.against.splits import SideBySide
from trainermon.analysis.diagnosis.wording import counted
from trainermon.core.values import Kind

if TYPE_CHECKING:
    import duckdb

_MAX_NAMES = 4
_SIDES = {OURS: "this run", REFERENCE: "the reference"}
Norms: TypeAlias = Mapping[tuple[int, int | None], float]
"""By step and rank; the rank is None of the norm over all of them."""


class TrainedSets(NamedTuple):
    """How the parameters that have gradients differ between two runs, on the steps on which both have some.

    Attributes:
        text: That they do, in a sentence.
        norms: Of this run and the reference, the norms over the gradients that both have on a step.
        rank_norms: The same for each rank; empty where ranks were merged.
    """

    text: str
    norms: tuple[Norms, Norms]
    rank_norms: tuple[Norms, Norms]


def find_trained_sets(both: SideBySide) -> TrainedSets | None:
    """Return how the sets of parameters with gradients differ; None if they do not. Cost: two reads of the gradients.

    A parameter counts on every step by itself: one may be frozen, or take no part, for a while.
    """
    alone = both.connection.execute(_ALONE).fetchall()
    if not alone:
        return None
    parts = []
    for view, side in _SIDES.items():
        names = [name for name, only_in in alone if only_in == view]
        more = f" and {len(names) - _MAX_NAMES:,} more" if len(names) > _MAX_NAMES else ""
        if names:
            parts.append(f"{counted(len(names), 'parameter')} in {side} ({_listed(names)}{more})")
    text = f"gradient norms are compared without those that one side alone has: of {', of '.join(parts)}"
    pairs = [tuple(_norms(both, view, per_rank=per_rank) for view in _SIDES) for per_rank in (False, True)]
    return TrainedSets(text, *pairs)  # type: ignore[arg-type]  # two pairs


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_MAX_NAMES])


def _norms(both: SideBySide, view: str, *, per_rank: bool) -> Norms:
    if per_rank and both.split:
        return {}
    connection: duckdb.DuckDBPyConnection = both.connection
    # of merged rows each element counts once, and no scale is known
    once = "true" if per_rank or both.split else "in_global_norm"
    rows = connection.execute(f"""
        SELECT step, {"rank" if per_rank else "NULL"} AS rank,
            CASE WHEN sum(nans) > 0 THEN 'nan'::DOUBLE WHEN sum(infs) > 0 THEN 'inf'::DOUBLE
            ELSE sqrt(sum(sum_sq / {"1" if both.split else "scale ** 2"} / num_steps)) END
        FROM {view} SEMI JOIN ({_SHARED}) shared USING (step, name)
        WHERE kind = '{Kind.GRAD_REDUCED}' AND micro_step IS NULL AND {once} GROUP BY ALL
    """).fetchall()  # noqa: S608  # our own names
    return {(step, rank): norm for step, rank, norm in rows}


def _shown(view: str) -> str:
    return f"SELECT DISTINCT step, name FROM {view} WHERE kind = '{Kind.GRAD_REDUCED}'"  # noqa: S608  # our own names


_SHARED = f"({_shown(OURS)}) INTERSECT ({_shown(REFERENCE)})"
_ALONE = f"""
    WITH ours AS ({_shown(OURS)}), theirs AS ({_shown(REFERENCE)}), alone AS (
        SELECT step, name, '{OURS}' AS only_in FROM ours ANTI JOIN theirs USING (step, name)
        UNION ALL SELECT step, name, '{REFERENCE}' AS only_in FROM theirs ANTI JOIN ours USING (step, name)
    )
    SELECT DISTINCT name, only_in FROM alone
    WHERE step IN (SELECT step FROM ours) AND step IN (SELECT step FROM theirs) ORDER BY name
"""  # noqa: S608  # our own names
