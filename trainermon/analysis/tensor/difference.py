"""How two tensors differ: the metrics of `trainermon compare`, and where, in one pass and bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainermon.analysis.compare.noise import MAX_ROUNDING
from trainermon.analysis.compare.tensors import ElementSums
from trainermon.analysis.tensor.dtypes import parts
from trainermon.analysis.tensor.extremes import ExtremeElement, check_shapes, distances, largest_differences
from trainermon.analysis.tensor.files import StoredTensor
from trainermon.analysis.tensor.profile import position_of
from trainermon.analysis.tensor.screen import line, number, position, table
from trainermon.core.terminal.escapes import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """How the tensor `ours` differs from `theirs`, with the metrics of `trainermon compare`.

    Metrics are over the elements that are finite on both sides.

    Attributes:
        ours: Name of the one tensor.
        theirs: Name of the other.
        dtypes: Types of both.
        shape: Their shape.
        count: Number of elements.
        differing: Number of elements that are further apart than the tolerance, or finite on one side only.
        relative: Norm of the difference over the larger norm; NaN if a value is finite on one side alone.
        cosine: Cosine of the angle between them; None where a norm is zero.
        distance: Norm of the difference.
        max_absolute: Largest difference.
        max_relative: Largest difference relative to the element of `theirs`.
        mean_relative: Mean of these.
        below_thousandth: Share of elements whose relative difference is below 0.001.
        below_five_thousandths: Share below 0.005.
        max_ulps: Largest difference in units in the last place.
        norm_ratio: Norm of `ours` over that of `theirs`.
        nonfinite: Number of elements that are not finite, on either side.
        first: The first differing elements.
        largest: The elements that are furthest apart.
    """

    ours: str
    theirs: str
    dtypes: tuple[str, str]
    shape: tuple[int, ...]
    count: int
    differing: int
    relative: float | None
    cosine: float | None
    distance: float
    max_absolute: float
    max_relative: float
    mean_relative: float
    below_thousandth: float
    below_five_thousandths: float
    max_ulps: float
    norm_ratio: float
    nonfinite: tuple[int, int]
    first: tuple[ExtremeElement, ...] = ()
    largest: tuple[ExtremeElement, ...] = ()

    @property
    def is_apart(self) -> bool:
        """Whether they differ: in an element, or as a whole by more than a tolerance ever explains.

        Within a tolerance that is larger than the numbers themselves, zeros would be equal to anything.
        """
        return bool(self.differing) or (self.relative or 0.0) > MAX_ROUNDING


def diff_tensors(
    ours: StoredTensor, theirs: StoredTensor, *, rtol: float = 0.0, atol: float = 0.0, number: int = 5
) -> TensorDiff:
    """Return how two tensors differ; an element differs if it is further apart than `atol + rtol · |theirs|`.

    Raises:
        DumpError: the shapes differ.
    """
    check_shapes(ours, theirs)
    sums = ElementSums()
    first: list[ExtremeElement] = []
    differing = count = 0
    with np.errstate(over="ignore", invalid="ignore"):
        for mine, other in zip(ours.chunks(), theirs.chunks(), strict=True):
            sums.add(parts(mine), parts(other), theirs.kind, ours.kind)
            gap = distances(mine, other)
            apart = np.flatnonzero(np.isnan(gap) | (gap > atol + rtol * np.abs(other)))
            first += [
                _element(i, (mine, other, gap), ours.shape, count)
                for i in apart[: max(0, number - len(first))].tolist()
            ]
            differing += len(apart)
            count += mine.size
    found = sums.difference()
    cosine, distance, most, most_relative, thousandth, five, mean, ulps, ratio, bad, their_bad = found.columns
    return TensorDiff(
        ours=str(ours.path) + (f"::{ours.name}" if ours.name else ""),
        theirs=str(theirs.path) + (f"::{theirs.name}" if theirs.name else ""),
        dtypes=(ours.kind, theirs.kind),
        shape=ours.shape,
        count=count,
        differing=differing,
        relative=found.relative,
        cosine=cosine,
        distance=distance,
        max_absolute=most,
        max_relative=most_relative,
        mean_relative=mean,
        below_thousandth=thousandth,
        below_five_thousandths=five,
        max_ulps=ulps,
        norm_ratio=ratio,
        nonfinite=(bad, their_bad),
        first=tuple(first),
        largest=largest_differences(ours, theirs, number) if differing or found.relative else (),
    )


def _element(index: int, columns: tuple[Any, ...], shape: tuple[int, ...], start: int) -> ExtremeElement:
    return ExtremeElement(
        position=position_of(start + index, shape), values=tuple(column[index].item() for column in columns)
    )


def render_diff(diff: TensorDiff) -> Iterator[str]:
    """Yield lines of text for a terminal that say how two tensors differ."""
    yield line("ours", printable(diff.ours))
    yield line("theirs", printable(diff.theirs))
    types = diff.dtypes[0] if len(set(diff.dtypes)) == 1 else " and ".join(diff.dtypes)
    yield line("", f"{types}{list(diff.shape)}, {diff.count:,} elements")
    if not diff.is_apart:
        yield line("differ", "none: the elements are equal, or within the tolerance")
        return
    beyond = f"{diff.differing:,} elements, {diff.differing / diff.count:.3%}"
    as_whole = "the tensors; each element is within the tolerance, which is too large for numbers like these"
    yield line("differ", beyond if diff.differing else as_whole)
    if any(diff.nonfinite):
        yield line("not finite", f"{diff.nonfinite[0]:,} in ours, {diff.nonfinite[1]:,} in theirs")
    relative = diff.relative is not None and math.isfinite(diff.relative)
    share = f", relative to the norm {number(diff.relative)}" if relative else ""
    yield line("distance", f"{number(diff.distance)}{share}")
    yield line("largest", f"{number(diff.max_absolute)}, relative {number(diff.max_relative)}{_ulps(diff)}")
    shares = f"below 1e-3 {diff.below_thousandth:.2%}, below 5e-3 {diff.below_five_thousandths:.2%}"
    yield line("relative", f"mean {number(diff.mean_relative)}, {shares}")
    yield line("alike", f"cosine {number(diff.cosine)}, ratio of norms {number(diff.norm_ratio)}")
    for title, found in (("first", diff.first), ("furthest", diff.largest)):
        yield f"  {title}"
        rows = [(position(extreme.position), *map(number, extreme.values)) for extreme in found]
        yield from ("  " + text for text in table(("position", "ours", "theirs", "difference"), rows))


def _ulps(diff: TensorDiff) -> str:
    return f", {number(diff.max_ulps)} units in the last place" if diff.max_ulps else ""


def diff_row(diff: TensorDiff, name: str) -> tuple[str, ...]:
    """Return the cells for one pair of tensors in a table of many, with the columns `DIFF_HEAD`.

    `name` is the first.
    """
    values = (diff.relative, diff.max_absolute, diff.cosine)
    return (printable(name), f"{diff.differing:,}", f"{diff.count:,}", *map(number, values))


DIFF_HEAD = ("tensor", "differ", "of", "relative", "largest", "cosine")
