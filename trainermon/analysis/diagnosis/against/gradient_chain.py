"""Where along a gradient's way through the step two runs part: from the parameter's gradient to the new weights.

The way is: gradient before the reduction over ranks, gradient after it, norm of what a rank holds, norm of all, moments
of the optimizer, weights. Of each link, the first step on which it differs is told; the first link that does names the
part of the step to look at.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from trainermon.analysis.diagnosis.against.row_pairs import (
    DIFFER,
    NOISE_GROWTH,
    NOISE_LIMIT,
    NOISE_STEPS,
    OURS,
    REFERENCE,
)
from trainermon.analysis.diagnosis.against.sides import RunSide
from trainermon.analysis.diagnosis.against.splits import SideBySide, open_both, stored_kinds
from trainermon.analysis.diagnosis.against.trained_sets import Norms, TrainedSets
from trainermon.analysis.diagnosis.evidence import open_store
from trainermon.core.values import Kind

if TYPE_CHECKING:
    import duckdb

DIFFERS, AGREES, NOT_STORED, NOT_COMPARED = "differs", "agrees", "not stored", "not comparable"
_NOISE_FLOOR = 1e-6
_LOCAL_NORM, _NORM = "local gradient norm", "gradient norm"
_LINKS: tuple[tuple[str, tuple[Kind, ...]], ...] = (
    ("gradient before the reduction", (Kind.GRAD_UNREDUCED,)),
    ("gradient after the reduction", (Kind.GRAD_REDUCED,)),
    (_LOCAL_NORM, ()),
    (_NORM, ()),
    ("moments", (Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.STATE)),
    ("weights", (Kind.PARAM_UPDATED,)),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GradientLink:
    """One station of a gradient's way through the step, and whether two runs agree there.

    `link` is the station: before the reduction, after it, norm, moments, weights. `state` is `differs`, `agrees` (but
    for noise), `not stored` on any side, or `not comparable`: what is stored has no counterpart. `num_steps` is how
    many steps were compared. `step` is the first on which it differs, `relative` how far its farthest series is
    apart, relative to its size (NaN: finite on one side only), `rank` and `series` which that is; None and "" where
    nothing differs, but for `relative`, which is the noise there, None without any. The norm of all ranks has no rank.
    """

    link: str
    state: str
    num_steps: int = 0
    step: int | None = None
    relative: float | None = None
    rank: int | None = None
    series: str = ""


class _ChainPoint(NamedTuple):
    """What is known of a link on a step: whether a bit differs, how far the farthest series is apart, and which."""

    step: int
    differs: bool
    relative: float
    rank: int | None
    series: str


def gradient_chain(
    ours: RunSide, theirs: RunSide, first_limit: float = NOISE_LIMIT, trained: TrainedSets | None = None
) -> tuple[GradientLink, ...]:
    """Return the stations of the gradients' way, in order, each with the first step on which two runs differ there.

    () if one of them has no store. Where they are split otherwise, ranks are merged, and have no norm of their own.
    `first_limit` is what passes for noise on the first common step. Where other parameters are `trained`, the norms are
    those of what both have.
    """
    with open_both(ours, theirs) as both, open_store(theirs.path) as there:
        if both is None or there is None:
            return ()
        links = tuple(
            _link(name, list(_series(name, kinds, both, there, trained)), first_limit) for name, kinds in _LINKS
        )
        return _with_reasons(links, stored_kinds(both))


def _with_reasons(links: Sequence[GradientLink], stored: Collection[str]) -> tuple[GradientLink, ...]:
    """Return the links, of those that nothing is known of the ones as not comparable of which a run stores rows."""
    kinds_of = dict(_LINKS)
    return tuple(
        dataclasses.replace(link, state=NOT_COMPARED)
        if link.state == NOT_STORED and any(kind in stored for kind in kinds_of[link.link] or (Kind.GRAD_REDUCED,))
        else link
        for link in links
    )


def _series(
    name: str,
    kinds: Sequence[Kind],
    both: SideBySide,
    theirs: duckdb.DuckDBPyConnection,
    trained: TrainedSets | None,
) -> Iterator[list[_ChainPoint]]:
    if name == _NORM or (name == _LOCAL_NORM and not both.split):
        per_rank = name == _LOCAL_NORM
        known = trained and (trained.rank_norms if per_rank else trained.norms)
        yield _norms(*(known or (_read_norms(side, per_rank=per_rank) for side in (both.connection, theirs))))
    for kind in kinds:
        values = {"kind": str(kind), "is_split": bool(both.split)}
        yield [_ChainPoint(*row) for row in both.connection.execute(_ROWS, values).fetchall()]


def _link(name: str, series: Sequence[list[_ChainPoint]], first_limit: float) -> GradientLink:
    steps = {point.step for points in series for point in points}
    if not steps:
        return GradientLink(link=name, state=NOT_STORED)
    found = [point for points in series if (point := _first_beyond(points, first_limit)) is not None]
    if not found:
        noise = max((point.relative for points in series for point in points), default=0.0)
        return GradientLink(link=name, state=AGREES, num_steps=len(steps), relative=noise or None)
    first = min(found, key=lambda point: (point.step, -point.relative))
    return GradientLink(
        link=name,
        state=DIFFERS,
        num_steps=len(steps),
        step=first.step,
        relative=math.nan if math.isinf(first.relative) else first.relative,
        rank=first.rank,
        series=first.series,
    )


def _first_beyond(points: Sequence[_ChainPoint], first_limit: float) -> _ChainPoint | None:
    """Return the first point that differs by a bit after one that did not, else by more than the noise before it."""
    first = next((place for place, point in enumerate(points) if point.differs), None)
    if first is None:
        return None
    if first > 0 or points[0].relative > first_limit:
        return points[first]
    noise = points[0].relative
    for place, point in enumerate(points[1:], start=1):
        if point.relative > max(_NOISE_FLOOR, NOISE_GROWTH * noise):
            return point
        if place < NOISE_STEPS:
            noise = max(noise, point.relative)
    return None


def _read_norms(side: duckdb.DuckDBPyConnection, *, per_rank: bool) -> Norms:
    return {(step, rank): norm for step, rank, norm in side.execute(_NORMS[per_rank]).fetchall()}


def _norms(here: Norms, there: Norms) -> list[_ChainPoint]:
    points: dict[int, _ChainPoint] = {}
    for key in sorted(here.keys() & there.keys(), key=lambda key: (key[0], key[1] or 0)):
        one, other = here[key], there[key]
        same = one == other or (math.isnan(one) and math.isnan(other))
        finite = math.isfinite(one) and math.isfinite(other)
        apart = 0.0 if same else abs(one - other) / max(abs(one), abs(other)) if finite else math.inf
        step, rank = key
        point = _ChainPoint(step, not same, apart, rank, "")
        if step not in points or (point.differs, point.relative) > (points[step].differs, points[step].relative):
            points[step] = point
    return list(points.values())


_NORMS = {
    True: "SELECT step, rank, grad_norm FROM step_values WHERE grad_norm IS NOT NULL",
    False: "SELECT step, NULL, grad_norm FROM steps WHERE grad_norm IS NOT NULL",
}

_LARGEST = "greatest(abs(ours.min), abs(ours.max), abs(theirs.min), abs(theirs.max))"
# The three parts of `compare.metrics.relative_size`; a term of which the size is zero is 0.
_SIZES = (
    f"greatest(abs(ours.min - theirs.min), abs(ours.max - theirs.max)) / nullif({_LARGEST}, 0)",
    "abs(ours.norm - theirs.norm) / nullif(greatest(ours.norm, theirs.norm), 0)",
    "abs(ours.mean - theirs.mean) / nullif(greatest(ours.rms, theirs.rms), 0)",
)
_RELATIVE = f"""CASE
    WHEN ours.nans <> theirs.nans OR ours.infs <> theirs.infs THEN 'inf'::DOUBLE
    WHEN ours.finite = 0 OR theirs.finite = 0 THEN 0.0
    ELSE greatest({", ".join(f"coalesce({size}, 0.0)" for size in _SIZES)}) END"""
_ROWS = f"""
    WITH apart AS (
        SELECT ours.step, ours.rank, ours.kind, ours.name,
            CASE WHEN $is_split THEN {DIFFER[True]} ELSE {DIFFER[False]} END AS differs, {_RELATIVE} AS relative
        FROM {OURS} ours JOIN {REFERENCE} theirs ON ours.step = theirs.step AND ours.rank = theirs.rank
            AND ours.kind = theirs.kind AND ours.name = theirs.name AND ours.slot = theirs.slot
            AND ours.call = theirs.call AND ours.stage = theirs.stage AND ours.num_steps = theirs.num_steps
            AND coalesce(ours.micro_step, -1) = coalesce(theirs.micro_step, -1)
        WHERE ours.kind = $kind AND (ours.count = theirs.count OR NOT $is_split)
    )
    SELECT step, bool_or(differs), coalesce(max(relative) FILTER (differs), 0.0),
        arg_max(rank, relative) FILTER (differs), coalesce(arg_max(kind || ' ' || name, relative) FILTER (differs), '')
    FROM apart GROUP BY step ORDER BY step
"""  # noqa: S608  # our own names


def chain_texts(chain: Sequence[GradientLink]) -> list[str]:
    """Return the stations as lines of a table for a terminal; [] if nothing differs at any."""
    if not any(link.state == DIFFERS for link in chain):
        return []
    width = max(len(link.link) for link in chain)
    return [f"{link.link:<{width}}  {_words(link)}" for link in chain]


def _words(link: GradientLink) -> str:
    if link.state != DIFFERS:
        return f"{link.state} but for noise of up to {link.relative:.2g}" if link.relative else link.state
    assert link.relative is not None
    size = "finite on one side only" if math.isnan(link.relative) else f"apart by {link.relative:.2g}"
    where = "" if link.rank is None else f", rank {link.rank}"
    return f"differs from step {link.step} on, {size}{where}{f', {link.series}' if link.series else ''}"
