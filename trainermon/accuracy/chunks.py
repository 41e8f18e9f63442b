"""Operations on elements, judged in chunks: what float64 takes beside a large result stays small."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trainermon.accuracy.calls import OperationCall, mapped, plain
from trainermon.accuracy.families import Family
from trainermon.accuracy.judge import Judgement, Review, Status, family_of_call, judge_call
from trainermon.accuracy.places import Place

MAX_ELEMENTS = 2**22
"""Elements of a chunk, about."""
_NOT_OF_ELEMENTS = frozenset(["glu", "linspace", "logspace", "arange"])
_EXACT = frozenset(
    ["abs", "bfloat16", "clamp", "float", "half", "masked_fill", "maximum", "minimum", "neg", "relu", "to", "where"]
)
_WORSE = (Status.SKIP, Status.PASS, Status.WARNING, Status.ERROR)


def judge_in_chunks(
    name: str, call: OperationCall, output: Any, *, inside: torch.dtype | None, review: Review | None
) -> list[Judgement]:
    """Return what `judge_call` does; an operation on elements is judged in chunks of about 2^22 of them.

    A dimension is cut, the first one that has more than one place. Only `review` has float64's whole result.
    """
    given = output[0] if isinstance(output, list | tuple) and len(output) == 1 else output
    if not isinstance(given, Tensor) or given.numel() <= MAX_ELEMENTS or not _is_of_elements(name, call):
        return judge_call(name, call, output, inside=inside, review=review)
    goldens: list[Tensor] = []

    def kept(judgement: Judgement, _given: Tensor, golden: Tensor) -> Judgement:
        goldens.append(golden)
        return judgement

    given, found = plain(given), []
    along = next(place for place, size in enumerate(given.shape) if size > 1)
    for chunk in _chunks(given, along):
        cut = _cut(call, given, along, chunk)
        part = given[(slice(None),) * along + (chunk,)]
        judged = [] if cut is None else judge_call(name, cut, part, inside=inside, review=kept if review else None)
        if [one.status for one in judged] in ([], [Status.SKIP]) or judged[0].reason.startswith("shape"):
            return judge_call(name, call, output, inside=inside, review=review)
        found.append((chunk.start, part.numel(), judged[0]))
    merged = _merged(given, along, found)
    return [merged if review is None else review(merged, given, torch.cat(goldens, along))]


def _is_of_elements(name: str, call: OperationCall) -> bool:
    last = name.rpartition(".")[2].rstrip("_")
    family = family_of_call(name, call)
    return last in _EXACT or (family in (Family.ROUNDED, Family.FUNCTION) and last not in _NOT_OF_ELEMENTS)


def _chunks(given: Tensor, along: int) -> Iterator[slice]:
    size = given.shape[along]
    step = max(1, MAX_ELEMENTS * size // given.numel())
    return (slice(first, min(first + step, size)) for first in range(0, size, step))


def _cut(call: OperationCall, given: Tensor, along: int, chunk: slice) -> OperationCall | None:
    """Return the call that gives a chunk of its result; None if the shapes do not say which."""
    fits: list[bool] = []

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        place = along - (given.dim() - value.dim())
        if place < 0 or value.shape[place] == 1:
            return value
        fits.append(value.shape[place] == given.shape[along])
        return value[(slice(None),) * place + (chunk,)]

    args, kwargs = mapped(cut, list(call.args)), mapped(cut, dict(call.kwargs))
    return call._replace(args=args, kwargs=kwargs) if fits and all(fits) else None


def _merged(given: Tensor, along: int, found: Sequence[tuple[int, int, Judgement]]) -> Judgement:
    """Return the judgement of a whole result from those of its chunks, each with where it begins and its elements."""
    start, _, worst = max(found, key=lambda one: (_WORSE.index(one[2].status), one[2].worst))
    every = [judgement for _, _, judgement in found]
    shares = [one.bias for one in every if not math.isnan(one.bias)]
    return dataclasses.replace(
        worst,
        shape=tuple(given.shape),
        worst=max(one.worst for one in every),
        index=worst.index and _moved(worst.index, along, start),
        device_nonfinite=sum(one.device_nonfinite for one in every),
        golden_nonfinite=sum(one.golden_nonfinite for one in every),
        share_above=sum(number * one.share_above for _, number, one in found) / given.numel(),
        bias=sum(shares) / len(shares) if shares else math.nan,
        place=_place(given, along, [(begin, one.place) for begin, _, one in found if one.place is not None]),
    )


def _place(given: Tensor, along: int, found: Sequence[tuple[int, Place]]) -> Place | None:
    """Return the place of wrong elements from those in chunks; what goes on from one to the next is a box of them."""
    if not found:
        return None
    begins, ends = ([_moved(getattr(one, side), along, first) for first, one in found] for side in ("begin", "end"))
    number = sum(one.number for _, one in found)
    kinds = {one.kind for _, one in found}
    kind = "everywhere" if number > given.numel() / 2 else kinds.pop() if len(found) == 1 else "scattered"
    begin, end = (tuple(map(most, zip(*one, strict=True))) for most, one in ((min, begins), (max, ends)))
    return Place(kind=kind, begin=begin, end=end, number=number)


def _moved(index: Sequence[int], along: int, start: int) -> tuple[int, ...]:
    return tuple(place + start * (number == along) for number, place in enumerate(index))
