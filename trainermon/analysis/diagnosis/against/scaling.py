"""Whether all gradients of a step are the reference's but for one factor, and what number of the run that factor is.

One factor for all is no rounding and no module's doing: a loss that was divided once too often, ranks or micro steps
that were summed instead of averaged, a loss scale that was not taken out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from trainermon.analysis.diagnosis.against.sides import RunSide
from trainermon.core.values import Kind

if TYPE_CHECKING:
    import duckdb

GRADIENTS = (Kind.ACTV_GRAD, Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED)
"""In the order in which they arise."""

_MIN_SERIES = 3
_MAX_SERIES = 100_000
_SPREAD = 0.01  # factors of gradients in bfloat16 are apart by no more
_MIN_CHANGE = 0.02
_SHARE = 0.9  # of all extrema; norms have it all
_SAME = 0.01
_LOSS_SCALE = 2.0**10  # from here on a power of two is a loss scale
_NEGLIGIBLE = 1e-3  # so far below the median, a gradient is the rounding of zero
_AXES = {"dp": "data parallel ranks", "cp": "context parallel ranks", "tp": "tensor parallel ranks"}


class Scaling(NamedTuple):
    """What all gradients of one kind are multiplied by.

    Attributes:
        kind: The kind of gradients, the first to arise that are off by one factor.
        factor: This run's gradients divided by the reference's.
        num_series: How many there are.
        meaning: Which number of a run the factor or its inverse is, as `1 / 2, the number of micro steps`; "": none.
    """

    kind: Kind
    factor: float
    num_series: int
    meaning: str = ""


class Gradient(NamedTuple):
    """The extrema, norm and root mean square of a gradient in this run, and in the reference."""

    ours: tuple[float, float, float, float]
    theirs: tuple[float, float, float, float]


def find_scaling(connection: duckdb.DuckDBPyConnection, step: int, sides: Sequence[RunSide]) -> Scaling | None:
    """Return by what the gradients of a step are off that arise first and are not equal; None: not by one factor.

    The view `pairs` holds the rows of both runs, `sides` are these. Cost: one query for each kind of gradients.
    """
    for kind in GRADIENTS:
        rows = connection.execute(_QUERY, {"step": step, "kind": str(kind)}).fetchall()
        if any(row[0] for row in rows):
            found = [Gradient(tuple(row[1:5]), tuple(row[5:9])) for row in rows if None not in row]
            factor = common_factor(found)
            meaning = "" if factor is None else meaning_of(factor, _numbers(connection, step, sides))
            return None if factor is None else Scaling(kind, factor, len(found), meaning)
    return None


_QUERY = f"""
    SELECT differs, min, max, sqrt(sum_sq), sqrt(sum_sq / nullif(count, 0)),
        their_min, their_max, sqrt(their_sum_sq), sqrt(their_sum_sq / nullif(their_count, 0))
    FROM pairs WHERE step = $step AND kind = $kind AND nans + infs + their_nans + their_infs = 0 LIMIT {_MAX_SERIES}
"""  # noqa: S608  # our own number


def common_factor(gradients: Sequence[Gradient]) -> float | None:
    """Return the one factor of all gradients that are not the rounding of zero; None if there is none, or it is 1."""
    typical = statistics.median([one.theirs[3] for one in gradients] or [0.0])
    sizes = [_sizes(one) for one in gradients if one.theirs[3] > _NEGLIGIBLE * typical]
    if len(sizes) < _MIN_SERIES:
        return None
    norms = [ours / theirs for *_, (ours, theirs) in sizes]
    factor = statistics.median(norms)
    extrema = [ours / theirs for *both, _ in sizes for ours, theirs in both if theirs]
    near = sum(math.isclose(ratio, factor, rel_tol=_SPREAD) for ratio in extrema)
    is_one = all(math.isclose(ratio, factor, rel_tol=_SPREAD) for ratio in norms) and near >= _SHARE * len(extrema)
    return factor if factor and is_one and abs(factor - 1) > _MIN_CHANGE else None


def _sizes(one: Gradient) -> list[tuple[float, float]]:
    """Return extrema and norm of both sides; of a gradient with the other sign the extrema change places."""
    low, high, norm, _ = one.ours
    their_low, their_high, their_norm, _ = one.theirs
    if math.isclose(low * their_norm, -their_high * norm, rel_tol=_SPREAD) and not math.isclose(
        low * their_norm, their_low * norm, rel_tol=_SPREAD
    ):
        low, high, norm = high, low, -norm
    return [(low, their_low), (high, their_high), (norm, their_norm)]


def _numbers(connection: duckdb.DuckDBPyConnection, step: int, sides: Sequence[RunSide]) -> dict[str, int]:
    """Return what a factor may be, by name: on either side, the ranks on an axis and the micro steps of a step."""
    (last,) = connection.execute("SELECT coalesce(max(micro_step), 0) FROM pairs WHERE step = ?", [step]).fetchall()[0]
    found = {"micro steps of a step": last + 1}
    for side in sides:
        for axis, name in _AXES.items():
            size = 1 + max((place.get(axis, 0) for place in side.places.values()), default=0)
            found[name] = max(size, found.get(name, 1))
    return found


def meaning_of(factor: float, numbers: Mapping[str, int]) -> str:
    """Return which of `numbers` a factor or its inverse is, in words, or that it is like a loss scale; "": neither.

    >>> meaning_of(0.5, {"micro steps of a step": 4, "data parallel ranks": 2})
    '1 / 2, with 2 the number of data parallel ranks'
    >>> meaning_of(65536.0, {})
    '2^16, as loss scales are'
    """
    size = abs(factor)
    whole = size if size >= 1 else 1 / size
    names = [name for name, number in numbers.items() if number > 1 and math.isclose(whole, number, rel_tol=_SAME)]
    over = "1 / " if size < 1 else ""
    if names:
        return f"{over}{round(whole)}, with {round(whole)} the number of {' and of '.join(names)}"
    exponent = math.log2(whole)
    is_scale = whole >= _LOSS_SCALE and math.isclose(exponent, round(exponent), abs_tol=_SAME)
    return f"{over}2^{round(exponent)}, as loss scales are" if is_scale else ""


def describe(scaling: Scaling) -> str:
    """Return a scaling as a sentence."""
    meaning = f" ({scaling.meaning})" if scaling.meaning else ""
    return f"All {scaling.num_series:,} gradients are {scaling.factor:.4g} times the reference's{meaning}"
