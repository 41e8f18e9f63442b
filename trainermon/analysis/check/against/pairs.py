"""The verdict on one result of two devices, each measured by itself: is the target about as good as the golden one?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from trainermon.accuracy.judge import Status
from trainermon.accuracy.legacy_standards import (
    FLOAT8,
    NOT_COMPARED,
    Edition,
    Standard,
    ratio_limits,
    standard_of,
    type_limits,
)
from trainermon.accuracy.rules import CANN_LARGEST, CANN_LIMITS, Rules
from trainermon.analysis.check.details_rows import DetailsRow

OWN, VENDORS = "trainermon", "CANN"
"""What the column of the algorithm says where the rules are not msprobe's."""
_PEER = 3.0
_THOUSANDTH_PASSES = 0.999
_ULP_MEAN, _ULP_SHARE, _ULP_SHARE_OF_HALF, _ULP_RATIO = 64.0, 0.05, 0.001, 1.0
_BALANCE_LIMIT = 2.0
_EMPTY_SHAPE = "(0,)"


class Graded(NamedTuple):
    """A number of the comparison, and what it means: `pass`, `error`, or "" where it decides nothing."""

    value: float
    status: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PairVerdict:
    """The verdict on one result of two devices.

    Attributes:
        status: `pass`, `warning`, `error` or `SKIP`.
        algorithm: By which standard, in msprobe's words; "" of a SKIP.
        message: Why.
        numbers: What was compared, by the name of the measure; `ulp_ratio` is that of `ulp_share`.
    """

    status: str
    algorithm: str = ""
    message: str = ""
    numbers: Mapping[str, Graded] = dataclasses.field(default_factory=dict)


class _MissingError(Exception):
    """A measure that a standard needs is blank."""


def pair_verdict(target: DetailsRow, golden: DetailsRow, rules: Rules) -> PairVerdict:
    """Return the verdict on the result `target`, which the golden device gave as `golden`, by `rules`.

    TRAINERMON: what is finite on the golden device alone is an error; else the file's own verdict where it is ours,
    with an error up to three times as far off as the golden device a warning; else msprobe's ratios. MSPROBE and
    MSPROBE8: msprobe's standards. CANN: the target's relative differences, of numbers that are not small.
    """
    if _is_skipped(target):
        if rules is Rules.TRAINERMON and target.is_ours:
            return _without_ratios(target, golden)
        return PairVerdict(status=Status.SKIP.value, message=target.message)
    try:
        match rules:
            case Rules.MSPROBE | Rules.MSPROBE8:
                return _by_standard(target, golden, rules.edition)
            case Rules.CANN:
                return _by_cann(target, golden)
            case _:
                return _by_ours(target, golden)
    except _MissingError as error:
        return PairVerdict(status=Status.SKIP.value, message=f"{error} is blank")


def _is_skipped(target: DetailsRow) -> bool:
    return not target.dtype or target.dtype in NOT_COMPARED or target.shape == _EMPTY_SHAPE


def _by_standard(target: DetailsRow, golden: DetailsRow, edition: Edition) -> PairVerdict:
    has_float8_inputs = target.metrics.relative_share is not None
    standard = standard_of(target.operation, target.dtype, edition, has_float8_inputs=has_float8_inputs)
    match standard:
        case Standard.BENCHMARK:
            return _by_ratios(target, golden, edition)
        case Standard.ULP:
            return _by_ulp(target, golden, edition)
        case Standard.ABSOLUTE:
            return _by_zero(target, standard, ("nonfinite_share", "relative_share", "absolute_share"))
        case Standard.BINARY:
            return _by_zero(target, standard, ("unequal",))
        case Standard.THOUSANDTH:
            value = _measure(target, "within_thousandth")
            status = _word(is_good=value >= _THOUSANDTH_PASSES)
            message = "" if status == Status.PASS.value else "too few relative differences are below 0.001"
            numbers = {"within_thousandth": Graded(value, status)}
            return PairVerdict(status=status, algorithm=standard.value, message=message, numbers=numbers)


def _by_zero(target: DetailsRow, standard: Standard, names: tuple[str, ...]) -> PairVerdict:
    """Judge by rates that must be zero."""
    values = {name: _measure(target, name) for name in names}
    numbers = {name: Graded(value, _word(is_good=value == 0)) for name, value in values.items()}
    return _of_numbers(standard.value, numbers, ", ".join(f"{n} is not zero" for n, v in values.items() if v != 0))


def _by_ratios(target: DetailsRow, golden: DetailsRow, edition: Edition) -> PairVerdict:
    """Judge by how many times as far off as the golden device the target is."""
    limits = {**ratio_limits(target.operation, edition)._asdict(), "balance": _BALANCE_LIMIT}
    numbers, found = {}, []
    for name in ("small_share", "rmse", "max_relative", "mean_relative", "balance"):
        ratio, is_alike = _ratio(target, golden, name, edition)
        numbers[name] = Graded(ratio, _word(is_good=is_alike and not ratio > limits[name]))
        if numbers[name].status == Status.ERROR.value:
            times = f"{ratio:.4g} times that of the golden device, limit {limits[name]:g}"
            found.append(f"{name}: {times if is_alike else 'NaN or infinite on one side'}")
    decided = {name: one for name, one in numbers.items() if name != "balance"}
    verdict = _of_numbers(Standard.BENCHMARK.value, decided, "; ".join(found))
    return dataclasses.replace(verdict, numbers=numbers)


def _by_ulp(target: DetailsRow, golden: DetailsRow, edition: Edition) -> PairVerdict:
    share = _measure(target, "ulp_share", edition)
    if target.dtype in FLOAT8:
        status = _word(is_good=share < _ULP_SHARE_OF_HALF)
        return _of_ulp(status, {"ulp_share": Graded(share), "ulp": Graded(math.nan, status)})
    mean, golden_mean = (_measure(row, "ulp_mean", edition) for row in (target, golden))
    ratio, is_alike = _ratio(target, golden, "ulp_share", edition)
    is_alike &= _are_alike(mean, golden_mean) or (math.isfinite(mean) and math.isfinite(golden_mean))
    if target.dtype == "float32":
        is_close = mean < _ULP_MEAN or share < _ULP_SHARE or ratio < _ULP_RATIO
    else:
        is_close = share < _ULP_SHARE_OF_HALF or ratio < _ULP_RATIO
    status = _word(is_good=is_alike and is_close)
    numbers = {"ulp_mean": Graded(mean), "ulp_share": Graded(share), "ulp_ratio": Graded(ratio)}
    return _of_ulp(status, {**numbers, "ulp": Graded(math.nan, status)})


def _of_ulp(status: str, numbers: Mapping[str, Graded]) -> PairVerdict:
    message = "" if status == Status.PASS.value else "too many units in the last place"
    return PairVerdict(status=status, algorithm=Standard.ULP.value, message=message, numbers=numbers)


def _by_cann(target: DetailsRow, golden: DetailsRow) -> PairVerdict:
    limit = CANN_LIMITS.get(target.dtype)
    if limit is None:
        if target.metrics.unequal is not None:
            return _by_standard(target, golden, Edition.V26)
        return PairVerdict(status=Status.SKIP.value, message=f"the rules cann have no limit for {target.dtype}")
    if _is_finite_on_one_side(target, golden):
        return PairVerdict(status=Status.ERROR.value, algorithm=VENDORS, message="NaN or infinite in the target alone")
    mean, largest = _measure(target, "mean_relative"), _measure(target, "max_relative")
    status = _word(is_good=mean < limit and largest < CANN_LARGEST * limit)
    found = f"relative differences: mean {mean:.3g}, largest {largest:.3g}"
    message = "" if status == Status.PASS.value else f"{found}; limits {limit:.3g} and {CANN_LARGEST * limit:.3g}"
    return PairVerdict(status=status, algorithm=VENDORS, message=message)


def _by_ours(target: DetailsRow, golden: DetailsRow) -> PairVerdict:
    ratios = _by_standard(target, golden, Edition.V26)
    if _is_finite_on_one_side(target, golden):
        message = "NaN or infinite in the target alone"
        return dataclasses.replace(ratios, status=Status.ERROR.value, algorithm=OWN, message=message)
    if not target.is_ours:
        blank = target.metrics.cosine is target.metrics.max_absolute is target.metrics.unequal is None
        if target.status == Status.ERROR.value and blank:  # another shape or type: there is nothing to compare
            return dataclasses.replace(ratios, status=Status.ERROR.value, algorithm=OWN, message=target.message)
        return ratios
    own = _without_ratios(target, golden)
    return dataclasses.replace(own, numbers=ratios.numbers)


def _without_ratios(target: DetailsRow, golden: DetailsRow) -> PairVerdict:
    """Return our own verdict on the target, with an error a warning where the golden device is about as far off."""
    if target.status == Status.ERROR.value and _is_peer(target, golden):
        found = "about as far off as on the golden device"
        return PairVerdict(status=Status.WARNING.value, algorithm=OWN, message=found)
    algorithm = "" if target.status == Status.SKIP.value else OWN
    return PairVerdict(status=target.status, algorithm=algorithm, message=target.message)


def _is_peer(target: DetailsRow, golden: DetailsRow) -> bool:
    """Return whether the golden device's result is at least a third as far off, by error and by allowance."""
    ours, theirs = target.metrics.rmse, golden.metrics.rmse
    if ours is not None and theirs is not None and not ours <= _PEER * theirs:
        return False
    return golden.is_ours and math.isfinite(target.worst) and target.worst <= _PEER * golden.worst


def _is_finite_on_one_side(target: DetailsRow, golden: DetailsRow) -> bool:
    """Return whether the target has NaN or infinite differences that the golden device lacks.

    The largest difference tells, and the cosine where a file has no more: the other measures leave these elements out.
    """
    pairs = [(getattr(target.metrics, name), getattr(golden.metrics, name)) for name in ("cosine", "max_absolute")]
    return any(one is not None and not math.isfinite(one) and _is_finite(other) for one, other in pairs)


def _is_finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def _ratio(target: DetailsRow, golden: DetailsRow, name: str, edition: Edition) -> tuple[float, bool]:
    """Return a measure as a multiple of the golden device's, and whether they are NaN or infinite together, if so."""
    one, other = (_measure(row, name, edition) for row in (target, golden))
    if math.isfinite(one) and math.isfinite(other):
        return abs(one) / max(abs(other), type_limits(target.dtype).floor), True
    return math.nan, _are_alike(one, other)


def _are_alike(one: float, other: float) -> bool:
    return (math.isnan(one) and math.isnan(other)) or (math.isinf(one) and one == other)


def _measure(row: DetailsRow, name: str, edition: Edition | None = None) -> float:
    """Return a measure; a blank counts as zero in version 26 where two devices are compared."""
    value: float | None = getattr(row.metrics, name)
    if value is None and edition is not Edition.V26:
        raise _MissingError(name)
    return value or 0.0


def _of_numbers(algorithm: str, numbers: Mapping[str, Graded], message: str) -> PairVerdict:
    status = _word(is_good=all(one.status == Status.PASS.value for one in numbers.values()))
    return PairVerdict(status=status, algorithm=algorithm, message=message, numbers=numbers)


def _word(*, is_good: bool) -> str:
    return Status.PASS.value if is_good else Status.ERROR.value
