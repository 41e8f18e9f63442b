"""Whether what a call gave is right: each element against float64, within its allowance."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainermon.accuracy.calls import OperationCall, plain, written_by
from trainermon.accuracy.families import Family, family_of
from trainermon.accuracy.gauge import RESIDUALS, residual_error
from trainermon.accuracy.legacy_metrics import LegacyVerdict
from trainermon.accuracy.places import Place, index_at, place_of
from trainermon.accuracy.products import GradientSum, RankSum
from trainermon.accuracy.randomness import is_drawn, is_idle, odds_against
from trainermon.accuracy.reference import Reference, computing_roundoff, smallest_number, unit_roundoff

_SINGLE = 2.0**-24
_SIGNS_TESTED = 1000
_SIGN_Z = 8.0
_LOST_STEPS = 4.0
# A computation that rounds on the way is off in many elements: so few, so far off, are something else.
_MANY, _FEW, _FAR_OFF, _USUAL = 8, 1e-3, 8.0, 4.0
# Of complex numbers they are, or divide by, square roots of sums.
_MODULI = frozenset(["abs", "absolute", "sgn"])
_WRITING = ("batch_norm", "native_batch_norm", "instance_norm", "embedding", "embedding_bag")
# They address the memory that their argument is a view of.
_BY_MEMORY = ("as_strided", "as_strided_copy", "as_strided_scatter")
# By operation the argument, and its place, with which it is no longer of its family.
# How many results of these are unique; the factors behind them depend on how the input lies in memory.
_UNIQUE = {"_linalg_det": 1, "_linalg_slogdet": 2}
_NOT_UNIQUE = "its result is not unique"
_WITH_MORE = {
    "embedding": ("max_norm", 3),
    "div": ("rounding_mode", None),
    "divide": ("rounding_mode", None),
    "index_put": ("accumulate", 3),
    "put": ("accumulate", 3),
    "scatter": ("reduce", 4),
}


UNDERFLOW = "range: below the smallest number of float16; use a loss scale"
"""The reason of a gradient that is lost, and of what is made of it."""
UNKNOWN_MEMORY = "it takes memory around its argument, which is not known"
WRITTEN = "what it writes into its argument is not judged: the dump has it from before the call"
"""The reason of what stands behind the results of a call that has side effects, as running statistics."""


class Status(enum.Enum):
    """The verdict on one result of a call.

    Attributes:
        PASS: As good as a computation in float32 inside, rounded once.
        WARNING: No worse than a computation in the recorded type throughout, or at the end of that type's range.
        ERROR: Worse than both, of another shape or kind of number, or NaN or infinite where float64 is not.
        SKIP: Not judged; the reason is in `Judgement.reason`.
    """

    PASS = "pass"  # noqa: S105  # a verdict
    WARNING = "warning"
    ERROR = "error"
    SKIP = "SKIP"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict on one tensor that a call returned.

    Attributes:
        status: The verdict.
        reason: A word or a short sentence: `coarse`, `range`, `biased`, `not finite`, `inexact`; "" of a pass.
        dtype: Type of the result as it was recorded, `bfloat16`.
        shape: Its shape.
        worst: The largest error of an element, in allowances of a computation with float32 inside; NaN: not judged.
        index: Where that is.
        device_value: What the call gave there.
        golden_value: What float64 gives there.
        device_nonfinite: Elements that are NaN or infinite in what the call gave.
        golden_nonfinite: The same in float64, rounded to the result's type.
        share_above: Share of elements beyond their allowance.
        digits: Decimal digits of the worst element that are right; infinite if it is exact.
        bias: Share of elements above the float64 result among those that differ from it; NaN below 1 000 of them.
        place: Where the elements beyond their allowance are.
        standard: The family by which it was judged.
        legacy: msprobe's measures and verdict, where they were asked for.
    """

    status: Status
    reason: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    worst: float = math.nan
    index: tuple[int, ...] | None = None
    device_value: complex | float = math.nan
    golden_value: complex | float = math.nan
    device_nonfinite: int = 0
    golden_nonfinite: int = 0
    share_above: float = 0.0
    digits: float = math.nan
    bias: float = math.nan
    place: Place | None = None
    standard: str = ""
    legacy: LegacyVerdict | None = None


Review = Callable[[Judgement, Tensor, Tensor], Judgement]
"""Is given the judgement on a result, the result, and what float64 gives; returns the judgement that counts."""


def judge_call(
    name: str,
    call: OperationCall,
    output: Any,
    *,
    inside: torch.dtype | None = None,
    review: Review | None = None,
) -> list[Judgement]:
    """Return a judgement of every tensor in `output`, what the call was recorded to return.

    `name` is the operation's, `linalg.svd` or `linear`. `inside` is the type it computed in where that is coarser than
    float32 by intention (autocast, TF32 stated as bfloat16 or float16). `review` has the last word on each result that
    float64 gives too. Nothing given is written to. Cost: one to six runs in float64 on the CPU. A call that cannot be
    run there has judgements SKIP.
    """
    recorded = [plain(leaf) for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    family = family_of_call(name, call)
    if family is Family.RANDOM:
        return [_judge_random(name, call, tensor) for tensor in recorded]
    if family is Family.UNDEFINED:
        return [_skip(tensor, family.value, family) for tensor in recorded]
    try:
        reference = Reference(call, family, name)
    except Exception as error:  # noqa: BLE001  # whatever a foreign kernel raises: there is no such kernel
        why = (str(error).splitlines() or [type(error).__name__])[0][:160]
        return [_skip(tensor, f"cannot be run in float64: {why}", family) for tensor in recorded]
    if len(reference.results) != len(recorded):
        numbers = f"{len(recorded)} results, {len(reference.results)} in float64"
        return [_of(tensor, Status.ERROR, f"outputs: {numbers}", family) for tensor in recorded]
    if family is Family.GAUGE:
        found = _judge_gauge(name, call, recorded)
    else:
        coarsest = max(coarsest_roundoff([*call.tensors, *recorded]), unit_roundoff(inside) if inside else 0.0)
        judged = recorded[: _UNIQUE.get(name)]
        found = [_judge(tensor, reference, number, coarsest, family) for number, tensor in enumerate(judged)]
        found += [_skip(tensor, _NOT_UNIQUE, family) for tensor in recorded[len(judged) :]]
    if any(_is_part(tensor) for tensor in call.tensors):
        found = without_unknown_memory(name, found)
    if review is None:
        return found
    return [review(*each) for each in zip(found, recorded, reference.results, strict=True)]


def without_unknown_memory(name: str, found: list[Judgement]) -> list[Judgement]:
    """Return judgements of a call one of whose arguments may be a part of memory that is not known.

    What an operation takes from around its argument is neither right nor wrong then.
    """
    if name.rpartition(".")[2].rstrip("_") not in _BY_MEMORY or all(one.status is not Status.ERROR for one in found):
        return found
    return [dataclasses.replace(one, status=Status.SKIP, reason=UNKNOWN_MEMORY) for one in found]


def _is_part(tensor: Tensor) -> bool:
    """Return whether a tensor is a view of more memory than its own, or in another order."""
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        return True
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


def unjudged_writes(name: str, call: OperationCall) -> list[Judgement]:
    """Return a SKIP for each argument that a call writes to besides its results: a dump does not say what it wrote.

    Functions of torch that do so are few, and known; custom ones are tried. Cost: one run of these.
    """
    if name.rpartition(".")[2].rstrip("_") not in _WRITING and not call.is_custom:
        return []
    try:
        return [_skip(tensor, WRITTEN, family_of(name)) for tensor in written_by(call)]
    except Exception:  # noqa: BLE001  # whatever a foreign kernel raises: then its result is not judged either
        return []


def judge_gradient(
    given: Tensor,
    gradient: GradientSum | RankSum,
    coarsest: float,
    review: Review | None = None,
    family: Family = Family.GRADIENT,
) -> Judgement:
    """Return a judgement of `given`, the recorded gradient of a tensor, or what ranks summed.

    `coarsest` is the largest unit roundoff of the types of the calls whose products make it up; `review` has the last
    word.
    """
    given, exact = plain(given), gradient.results[0]
    if given.shape != exact.shape:
        return _of(given, Status.ERROR, f"shape: {tuple(exact.shape)} in float64", family)
    if not given.numel():
        return _of(given, Status.PASS, "", family)
    coarsest = max(coarsest, coarsest_roundoff([given]))
    found = _FloatingResult(given, exact, family).judgement(gradient, 0, coarsest)
    return found if review is None else review(found, given, exact)


def family_of_call(name: str, call: OperationCall) -> Family:
    """Return the family by which a call of the operation `name` is judged; its arguments may make it GENERIC."""
    if is_drawn(name, call):
        return Family.RANDOM
    if is_idle(name, call):
        return Family.EXACT
    return Family.GENERIC if _computes_more(name, call) else family_of(name)


def coarsest_roundoff(tensors: Sequence[Tensor]) -> float:
    """Return the `computing_roundoff` of the types of `tensors`."""
    return computing_roundoff(tensor.dtype for tensor in tensors)


def _judge(given: Tensor, reference: Reference, number: int, coarsest: float, family: Family) -> Judgement:
    exact = reference.results[number]
    if given.shape != exact.shape:
        return _of(given, Status.ERROR, f"shape: {tuple(exact.shape)} in float64", family)
    floating = given.is_floating_point() or given.is_complex()
    if floating != (exact.is_floating_point() or exact.is_complex()) or given.is_complex() != exact.is_complex():
        return _of(given, Status.ERROR, f"dtype: {str(exact.dtype).removeprefix('torch.')} in float64", family)
    if not given.numel():
        return _of(given, Status.PASS, "", family)
    if not floating:
        return _judge_whole(given, exact, reference.alternatives(number), family)
    return _FloatingResult(given, exact, family).judgement(reference, number, coarsest)


def _computes_more(name: str, call: OperationCall) -> bool:
    """Return whether an argument makes the operation do more than its family says: round, scale rows, add up."""
    last = name.rpartition(".")[2].strip("_")
    if last in _MODULI and any(tensor.is_complex() for tensor in call.tensors):
        return True
    keyword, place = _WITH_MORE.get(last, ("", None))
    given = call.args[place] if place is not None and len(call.args) > place else None
    return call.kwargs.get(keyword, given) not in (None, False)


class _FloatingResult:
    """A floating result beside what float64 gives."""

    def __init__(self, given: Tensor, exact: Tensor, family: Family) -> None:
        self._given, self._exact, self._family = given, exact, family
        self._rounded = exact.to(given.dtype).to(exact.dtype)
        self._wide = given.to(exact.dtype)  # of types of 8 bits torch does not say what is finite
        self._error = (self._wide - self._rounded).abs()

    def judgement(self, reference: Reference | GradientSum | RankSum, number: int, coarsest: float) -> Judgement:
        ends = self._range_ends()
        wrong = self._nonfinite_mismatch() & ~ends
        same = (self._wide == self._rounded) | (self._wide.isnan() & self._rounded.isnan()) | ends | self._flushed()
        error = torch.where(same, 0.0, self._error)
        if not bool(error.any()) and not bool(wrong.any()):
            return self._result(Status.PASS, "", error.double(), torch.zeros_like(wrong), ends)
        allowed = reference.allowed(number, self._given.dtype, _SINGLE)
        fine = self._ratios(error, allowed, wrong)
        above = fine > 1
        if not bool(above.any()):
            return self._result(Status.PASS, "", fine, above, ends)
        if bool(wrong.any()):
            return self._result(Status.ERROR, "not finite", fine, above, ends)
        if self._jumps(above, allowed, reference.alternatives(number)):
            return self._result(Status.PASS, "", torch.where(above, 1.0, fine), torch.zeros_like(above), ends)
        if coarsest > _SINGLE and self._family is not Family.EXACT:
            lost = self._below_smallest(coarsest, reference.num_roundings)
            reasons = [(0.0, "coarse"), (lost, UNDERFLOW)]
            if self._is_all_below_normal(above, error - lost, allowed):
                reasons.reverse()
            for step, reason in reasons:
                if self._is_rough((error - step).clamp(min=0), fine, reference, number, coarsest):
                    return self._result(Status.WARNING, reason, fine, above, ends)
        return self._result(
            Status.ERROR, "inexact" if self._family is not Family.EXACT else "differs", fine, above, ends
        )

    def _is_rough(
        self, error: Tensor, fine: Tensor, reference: Reference | GradientSum | RankSum, number: int, coarsest: float
    ) -> bool:
        """Return whether errors are those of a computation in the coarsest type throughout."""
        off = torch.where(error == 0, 0.0, (self._wide - self._rounded).sgn() * error)
        if float(error.norm()) > reference.allowed_norm(number, coarsest) or reference.is_scaled(number, off, coarsest):
            return False
        allowed = reference.allowed(number, self._given.dtype, coarsest)
        return not bool((error > allowed).any()) and not _is_isolated(torch.where(error > 0, fine, 0.0), error)

    def _below_smallest(self, coarsest: float, num_roundings: float) -> float:
        """Return how much of each element may be lost below the smallest number of float16, if that is computed in.

        Some steps for each number that adds to it, with signs at random: its result, and what it makes on the way.
        """
        is_half = coarsest == unit_roundoff(torch.float16)
        return _LOST_STEPS * num_roundings * smallest_number(torch.float16) if is_half else 0.0

    def _is_all_below_normal(self, above: Tensor, remaining: Tensor, allowed: Tensor) -> bool:
        """Return whether what is lost below the smallest number explains all, of numbers that are not normal."""
        are_small = self._exact[above].abs() < torch.finfo(torch.float16).tiny
        return bool(are_small.all()) and not bool((remaining > allowed).any())

    def _range_ends(self) -> Tensor:
        """Return where float64 leaves the type's range, and the result is infinite or its largest number."""
        if self._given.is_complex():
            return torch.zeros(self._given.shape, dtype=torch.bool)
        most = torch.finfo(self._given.dtype).max
        is_largest = (self._wide.abs() >= most) & (self._wide.sign() == self._exact.sign())
        if self._given.dtype.itemsize == 1:  # beyond their range some devices give NaN, others the largest number
            beyond = self._exact.isfinite() & (self._exact.abs() > most) & (is_largest | self._wide.isnan())
            return beyond & (self._wide != self._rounded) & ~(self._wide.isnan() & self._rounded.isnan())
        return self._rounded.isinf() & self._exact.isfinite() & is_largest

    def _flushed(self) -> Tensor:
        """Return where the result is zero because float64 gives less than the type's smallest normal number."""
        if self._given.is_complex():
            return torch.zeros(self._given.shape, dtype=torch.bool)
        return (self._wide == 0) & (self._exact.abs() < torch.finfo(self._given.dtype).tiny)

    def _nonfinite_mismatch(self) -> Tensor:
        given, golden = self._wide, self._rounded
        if given.is_complex():
            return given.isfinite() != golden.isfinite()
        return (given.isnan() != golden.isnan()) | (
            (given.isinf() | golden.isinf()) & (given != golden) & ~given.isnan()
        )

    def _ratios(self, error: Tensor, allowed: Tensor, wrong: Tensor) -> Tensor:
        if self._family is Family.EXACT:
            ratio = torch.where(error == 0, 0.0, math.inf)
        else:
            ratio = torch.where(error == 0, 0.0, error / allowed)
        return torch.where(wrong | ratio.isnan(), math.inf, ratio)

    def _jumps(self, above: Tensor, allowed: Tensor, alternatives: list[Tensor]) -> bool:
        """Return whether each element beyond its allowance jumps to what was given if inputs move by a roundoff."""
        explained = torch.zeros_like(above)
        unit = 4 * unit_roundoff(self._given.dtype)
        for other in alternatives:
            close = (self._wide - other).abs() <= unit * other.abs()
            explained |= close & ((other - self._exact).abs() > allowed)
        return bool((explained | ~above).all()) and self._family is not Family.ROUNDED

    def _result(self, status: Status, reason: str, ratios: Tensor, above: Tensor, ends: Tensor) -> Judgement:
        at = int(ratios.argmax()) if ratios.numel() else 0
        index = index_at(at, self._given.shape)
        given, golden = self._wide.flatten()[at].item(), self._exact.flatten()[at].item()
        bias = self._bias()
        if status is Status.PASS and bool(ends.any()):
            status, reason = Status.WARNING, "range"
        if status is Status.PASS and _is_biased(bias):
            status, reason = Status.WARNING, "biased"
        return Judgement(
            status=status,
            reason=reason,
            dtype=_name(self._given.dtype),
            shape=tuple(self._given.shape),
            worst=float(ratios.max()),
            index=index,
            device_value=given,
            golden_value=golden,
            device_nonfinite=int((~self._wide.isfinite()).sum()),
            golden_nonfinite=int((~self._rounded.isfinite()).sum()),
            share_above=float(above.double().mean()),
            digits=_digits(given, golden),
            bias=bias[0],
            place=place_of(above) if bool(above.any()) else None,
            standard=self._family.value,
        )

    def _bias(self) -> tuple[float, int]:
        """Return which share of the results that are not float64's, rounded, is larger in magnitude, and how many are.

        A result that is rounded to the nearest may lie on one side all the time: the sine of small numbers does.
        """
        if self._given.is_complex() or self._family in (Family.EXACT, Family.GENERIC, Family.GRADIENT):
            return math.nan, 0
        differs = self._wide.isfinite() & self._exact.isfinite() & (self._error != 0)
        off = (self._wide.abs() - self._exact.abs())[differs]
        if off.numel() < _SIGNS_TESTED:
            return math.nan, off.numel()
        return float((off > 0).double().mean()), off.numel()


def _is_isolated(ratios: Tensor, error: Tensor) -> bool:
    """Return whether a few elements are far off among many that are as good as float32 makes them.

    An error like those of the others is not far off: where a result cancels, least is allowed.
    """
    above = ratios > 1
    number = int(above.sum())
    if number > max(1, int(_FEW * ratios.numel())) or ratios.numel() < _MANY:
        return False
    usual = error[~above].max()
    return bool(ratios.max() > _FAR_OFF) and bool(error[above].max() > _USUAL * usual)


def _judge_whole(given: Tensor, exact: Tensor, alternatives: list[Tensor], family: Family) -> Judgement:
    """Judge integers and booleans: equal, or what the call gives for inputs that are moved by a roundoff."""
    differs = given.to(exact.dtype) != exact
    for other in alternatives:
        differs &= given.to(other.dtype) != other
    if not bool(differs.any()):
        return _of(given, Status.PASS, "", family)
    at = int(differs.flatten().to(torch.uint8).argmax())
    return dataclasses.replace(
        _of(given, Status.ERROR, "differs", family),
        worst=math.inf,
        index=index_at(at, given.shape),
        device_value=given.flatten()[at].item(),
        golden_value=exact.flatten()[at].item(),
        share_above=float(differs.double().mean()),
        digits=0.0,
        place=place_of(differs),
    )


def _judge_random(name: str, call: OperationCall, given: Tensor) -> Judgement:
    wrong = odds_against(name, call, given)
    if wrong is None:
        return _skip(given, "random", Family.RANDOM)
    return _of(given, Status.ERROR if wrong else Status.PASS, wrong, Family.RANDOM)


def _judge_gauge(name: str, call: OperationCall, recorded: list[Tensor]) -> list[Judgement]:
    residuals = RESIDUALS.get(name.rpartition(".")[2])
    if residuals is None or not all(part.numel() for part in recorded):
        return [_skip(tensor, "its result is not unique", Family.GAUGE) for tensor in recorded]
    ratio = residual_error(residuals, call, recorded)
    status = Status.PASS if ratio <= 1 else Status.ERROR
    reason = "" if ratio <= 1 else "what it returns does not make up its input"
    return [dataclasses.replace(_of(tensor, status, reason, Family.GAUGE), worst=ratio) for tensor in recorded]


def _is_biased(bias: tuple[float, int]) -> bool:
    share, number = bias
    return number >= _SIGNS_TESTED and abs(share - 0.5) * 2 * math.sqrt(number) > _SIGN_Z and not 0.1 < share < 0.9


def _digits(given: complex | float, golden: complex | float) -> float:
    if given == golden:
        return math.inf
    if not golden or not math.isfinite(abs(golden)) or not math.isfinite(abs(given)):
        return 0.0
    return max(0.0, -math.log10(abs(given - golden) / abs(golden)))


def _skip(tensor: Tensor, reason: str, family: Family) -> Judgement:
    return _of(tensor, Status.SKIP, reason, family)


def _of(tensor: Tensor, status: Status, reason: str, family: Family) -> Judgement:
    return Judgement(
        status=status, reason=reason, dtype=_name(tensor.dtype), shape=tuple(tensor.shape), standard=family.value
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
