"""Whether a result moved as mathematics says when its inputs were moved: the observed change beside the predicted one.

Rounding that both runs share cancels, so a call need not be right to pass; it must react rightly. A function that is
itself unstable moves far, as predicted: that is no fault of the kernel, and told apart by its condition.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainermon.accuracy.calls import OperationCall, plain
from trainermon.accuracy.families import Family
from trainermon.accuracy.judge import Judgement, Status, coarsest_roundoff, family_of_call
from trainermon.accuracy.places import index_at, place_of
from trainermon.accuracy.reference import Reference, unit_roundoff
from trainermon.accuracy.screen import QuickReference

_SINGLE = 2.0**-24
_NEAR = 3.0
_UNJUDGED = (Family.RANDOM, Family.UNDEFINED, Family.GAUGE)


class MovedCall(NamedTuple):
    """A call and the same one with moved inputs, and what the device gave for both.

    Attributes:
        name: The operation's name.
        call: The call with its inputs as the kernel saw them.
        moved: The same with moved inputs.
        given: What the device gave for `call`.
        observed: What it gave for `moved`.
    """

    name: str
    call: OperationCall
    moved: OperationCall
    given: Any
    observed: Any


class JudgedChange(NamedTuple):
    """The verdict on how one tensor of a result moved.

    Attributes:
        judgement: `device_value` is the observed change of the worst element, `golden_value` the predicted one.
        condition: The predicted relative change of the result over that of the inputs, by norms; NaN: not measured.
    """

    judgement: Judgement
    condition: float = math.nan


def judge_change(pair: MovedCall, *, inside: torch.dtype | None = None) -> list[JudgedChange]:
    """Return a verdict for every tensor of the results of `pair`.

    `inside` is the type it computed in where that is coarser than float32 by intention. Nothing given is written to.
    Cost: one or two runs in a finer type where the result is; if they do not settle it, up to ten more in float64.

    Raises:
        Exception: Whatever the operation raises in a finer type.
    """
    given, observed = _tensors(pair.given), _tensors(pair.observed)
    family = family_of_call(pair.name, pair.call)
    if family in _UNJUDGED:
        return [JudgedChange(_of(tensor, Status.SKIP, family.value)) for tensor in given]
    if [tensor.shape for tensor in given] != [tensor.shape for tensor in observed]:
        return [JudgedChange(_of(tensor, Status.SKIP, "its shape depends on its input")) for tensor in given]
    after = QuickReference(pair.name, pair.moved, pair.given)
    if after.accepts(pair.observed) and all(_is_near(one, after, number) for number, one in enumerate(given)):
        return [JudgedChange(_of(tensor, Status.PASS, "")) for tensor in given]
    quick = [QuickReference(pair.name, pair.call, pair.given), after]
    relative = _relative_change(pair)
    found = [_quick(number, given[number], observed[number], quick, relative) for number in range(len(given))]
    if all(found):
        return [one for one in found if one is not None]
    exact = [Reference(call, family, pair.name) for call in (pair.call, pair.moved)]
    coarsest = max(coarsest_roundoff([*pair.call.tensors, *given]), unit_roundoff(inside) if inside else 0.0)
    return [
        found[number] or _PreciseChange(given[number], observed[number], exact, number).judged(coarsest, relative)
        for number in range(len(given))
    ]


def _is_near(given: Tensor, after: QuickReference, number: int) -> bool:
    """Return whether a result hardly moved: it is within a few bounds of the finer result of the moved call."""
    finer = after.results[number]
    if not given.is_floating_point():
        return torch.equal(given, finer)
    return after.within(given, number, _NEAR)


def _quick(
    number: int, given: Tensor, observed: Tensor, quick: list[QuickReference], relative: float
) -> JudgedChange | None:
    """Return a pass if the change is what the finer runs predict within their bounds, None if that is not sure."""
    before, after = (reference.results[number] for reference in quick)
    if before.shape != given.shape or given.is_complex():
        return None
    if not given.is_floating_point():
        return JudgedChange(_of(given, Status.PASS, "")) if torch.equal(observed.to(after.dtype), after) else None
    predicted = after - before
    off = observed.to(after.dtype, copy=True).sub_(given).sub_(predicted).abs_()
    allowed = sum(reference.bound(number, given.dtype) for reference in quick)
    if not bool((off <= allowed).all()):
        return None
    return JudgedChange(_of(given, Status.PASS, ""), _condition(predicted, before, relative))


class _PreciseChange:
    """One floating result before and after, beside what float64 gives for both."""

    def __init__(self, given: Tensor, observed: Tensor, references: list[Reference], number: int) -> None:
        self._given, self._observed, self._number = plain(given), plain(observed), number
        self._references = references
        self._before, self._after = (reference.results[number] for reference in references)

    def judged(self, coarsest: float, relative: float) -> JudgedChange:
        given = self._given
        if given.shape != self._before.shape:
            return JudgedChange(_of(given, Status.SKIP, "of another shape in float64"))
        if not (given.is_floating_point() or given.is_complex()):
            differs = self._observed.to(self._after.dtype) != self._after
            jumps = differs & (given.to(self._before.dtype) == self._before)
            return JudgedChange(self._verdict(jumps.double() * math.inf if bool(jumps.any()) else jumps.double(), 0.0))
        predicted = self._after - self._before
        seen = self._observed.to(predicted.dtype) - given.to(predicted.dtype)
        off = torch.where(self._same(), 0.0, (seen - predicted).abs())
        fine = self._ratios(off, _SINGLE)
        rough = self._ratios(off, coarsest) if coarsest > _SINGLE else fine
        worst = float(rough.max()) if rough.numel() else 0.0
        judgement = self._verdict(fine, worst, (seen, predicted))
        return JudgedChange(judgement, _condition(predicted, self._before, relative))

    def _same(self) -> Tensor:
        """Return where the runs cannot be compared: float64 leaves the range of the type, or is NaN, as they are."""
        pairs = ((self._given, self._before), (self._observed, self._after))
        same = torch.ones(self._given.shape, dtype=torch.bool)
        is_nan: list[tuple[Tensor, Tensor]] = []
        for value, exact in pairs:
            rounded = exact.to(value.dtype)
            same &= (value == rounded) | (value.isnan() & rounded.isnan())
            is_nan.append((value.isnan(), rounded.isnan()))
        alike = torch.stack([one == other for one, other in is_nan]).all(0)
        return same | (alike & torch.stack([one for one, _ in is_nan]).any(0))

    def _ratios(self, off: Tensor, unit: float) -> Tensor:
        allowed = sum(reference.allowed(self._number, self._given.dtype, unit) for reference in self._references)
        ratio = torch.where(off == 0, 0.0, off / allowed)
        return torch.where(ratio.isnan(), math.inf, ratio)

    def _verdict(self, ratios: Tensor, rough: float, changes: tuple[Tensor, Tensor] | None = None) -> Judgement:
        above = ratios > 1
        if not bool(above.any()):
            return dataclasses.replace(_of(self._given, Status.PASS, ""), worst=float(ratios.max()))
        at = int(ratios.argmax())
        seen, predicted = changes or (self._observed, self._after)
        is_coarse = changes is not None and rough <= 1
        finite = bool(self._observed.isfinite().all()) or not bool(self._after.isfinite().all())
        reason = "coarse" if is_coarse else "unexplained change" if finite else "not finite"
        return dataclasses.replace(
            _of(self._given, Status.WARNING if is_coarse else Status.ERROR, reason),
            worst=float(ratios.max()),
            index=index_at(at, self._given.shape),
            device_value=seen.flatten()[at].item(),
            golden_value=predicted.flatten()[at].item(),
            share_above=float(above.double().mean()),
            place=place_of(above),
        )


def _condition(predicted: Tensor, before: Tensor, relative: float) -> float:
    size, change = float(before.abs().norm()), float(predicted.abs().norm())
    if not (size and relative and math.isfinite(size) and math.isfinite(change)):
        return math.nan
    return change / size / relative


def _relative_change(pair: MovedCall) -> float:
    """Return the relative change of all inputs together, by norms."""
    change = 0.0
    for one, other in zip(pair.call.tensors, pair.moved.tensors, strict=True):
        if one.is_floating_point() and one.shape == other.shape:
            norm = float(torch.linalg.vector_norm(one.detach(), dtype=torch.float32))
            if math.isfinite(norm) and norm:
                off = torch.linalg.vector_norm(other.detach() - one.detach(), dtype=torch.float32)
                change = max(change, float(off) / norm)
    return change


def _tensors(output: Any) -> list[Tensor]:
    return [leaf.detach() for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def _of(tensor: Tensor, status: Status, reason: str) -> Judgement:
    name = str(tensor.dtype).removeprefix("torch.")
    return Judgement(status=status, reason=reason, dtype=name, shape=tuple(tensor.shape))
