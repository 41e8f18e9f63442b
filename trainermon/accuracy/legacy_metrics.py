"""msprobe's measures of how far a result is from the golden one, and the first verdict it draws from them.

They are for comparison with files of msprobe and for those who migrate; `judge` does not use them. Each is computed in
the types and the order in which msprobe does it, so that the numbers are the same. Where they are blind is not mended
here: elements that are NaN or infinite are left out of five of them, and every difference below 0.001 is a pass.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainermon.accuracy.legacy_standards import (
    FLOAT8,
    HALF,
    MEASURED,
    Edition,
    Standard,
    TypeLimits,
    standard_of,
    type_limits,
)

Array = NDArray[Any]
_COSINE, _SAME = 0.99, 1e-3
_HUNDREDTH, _THOUSANDTH, _TEN_THOUSANDTH = 1e-2, 1e-3, 1e-4
_NAMES = {_HUNDREDTH: "within_hundredth", _THOUSANDTH: "within_thousandth", _TEN_THOUSANDTH: "within_ten_thousandth"}
_LIMITS_OF_HALF, _LIMITS_OF_OTHERS = (_HUNDREDTH, _THOUSANDTH), (_THOUSANDTH, _TEN_THOUSANDTH)
_ZERO = float(np.finfo(float).eps)
_BFLOAT16_EPS, _BFLOAT16_MAX = 2.0**-8, float(torch.finfo(torch.bfloat16).max)
# By type the least exponent and the bits of the significand, and how many units in the last place are too many.
_ULP = {"float16": (-14, 10, 1), "bfloat16": (-126, 7, 1), "float32": (-126, 23, 32)}
_FLOAT8_LEAST_EXPONENT, _FLOAT8_BITS = -22, ((3, 3), (7, 2), (15, 1))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LegacyMetrics:
    """msprobe's measures of one result, in the order of its columns. None: not computed, a blank in its files.

    Attributes:
        cosine: Cosine between result and golden result.
        max_absolute: Largest difference.
        within_hundredth: Share of elements off by less than 1 % of the golden value.
        within_thousandth: The same for 0.1 %.
        within_ten_thousandth: The same for 0.01 %.
        unequal: Share of elements that differ at all.
        balance: Surplus of elements that are too large over those that are too small, or the reverse, as a share.
        rmse: Root of the mean squared difference of elements that are not small.
        small_share: Share of small elements that are off.
        max_relative: Largest relative difference of elements that are not small.
        mean_relative: The mean of it.
        nonfinite_share: Of the elements that are not finite on a side, the share that differ.
        relative_share: Share of other elements that are off by too large a share of them.
        absolute_share: Share of small elements that are off by too much.
        ulp_max: Largest difference in units of the last place.
        ulp_mean: The mean of it.
        ulp_share: Share of elements off by too many units.
    """

    cosine: float | None = None
    max_absolute: float | None = None
    within_hundredth: float | None = None
    within_thousandth: float | None = None
    within_ten_thousandth: float | None = None
    unequal: float | None = None
    balance: float | None = None
    rmse: float | None = None
    small_share: float | None = None
    max_relative: float | None = None
    mean_relative: float | None = None
    nonfinite_share: float | None = None
    relative_share: float | None = None
    absolute_share: float | None = None
    ulp_max: float | None = None
    ulp_mean: float | None = None
    ulp_share: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LegacyVerdict:
    """What msprobe says of one result.

    Attributes:
        status: Its word: `pass`, `warning`, `error` or `SKIP`.
        message: Why, in a sentence.
        golden_dtype: Type of the golden result, `torch.float32`.
        metrics: The measures that it took on the way.
    """

    status: str
    message: str
    golden_dtype: str
    metrics: LegacyMetrics = LegacyMetrics()


class LegacyCall(NamedTuple):
    """What msprobe's rules want to know of a call.

    Attributes:
        operation: What msprobe calls it, `linear`.
        edition: Whose rules.
        has_float8_inputs: An argument has a floating type of 8 bits.
        is_quantised: Its integer results may be off by one.
    """

    operation: str
    edition: Edition = Edition.V26
    has_float8_inputs: bool = False
    is_quantised: bool = False


def legacy_verdict(given: Tensor, exact: Tensor, call: LegacyCall) -> LegacyVerdict:
    """Return msprobe's measures and its word on `given`, a result of `call`, on the CPU.

    `exact` is the result in float64; msprobe's own golden result is the operation in float32 where the result has 16
    bits or fewer, and the measures are taken from `exact` rounded to that. Integers must be equal. Empty: SKIP, in
    version 8 an error. NaN: see the module. Cost: some 20 passes over the elements.
    """
    golden = exact.to(golden_dtype(given.dtype)) if exact.is_floating_point() else exact
    verdict = partial(LegacyVerdict, golden_dtype=str(golden.dtype))
    if given.shape != golden.shape:
        found = f"its shape is {tuple(given.shape)}, not {tuple(golden.shape)}"
        return verdict(status="error", message=found)
    if given.is_complex() or golden.is_complex() or given.is_floating_point() != golden.is_floating_point():
        found = f"{given.dtype} and {golden.dtype} are not compared"
        return verdict(status="error", message=found)
    if not given.numel():
        status = "SKIP" if call.edition is Edition.V26 else "error"
        return verdict(status=status, message="it is empty")
    with np.errstate(all="ignore"):
        if not given.is_floating_point():
            return _of_integers(given, golden, within_one=call.is_quantised)
        dtype = _name(given.dtype)
        standard = standard_of(call.operation, dtype, call.edition, has_float8_inputs=call.has_float8_inputs)
        measures = _Measures(_array(given), _array(golden), dtype)
        by_standard = measures.by(standard) if dtype in MEASURED else {}
        status, message, first = measures.first_verdict(call.edition)
    metrics = LegacyMetrics(**{name: float(value) for name, value in {**by_standard, **first}.items()})
    return verdict(status=status, message=message, metrics=metrics)


def _of_integers(given: Tensor, golden: Tensor, *, within_one: bool) -> LegacyVerdict:
    """Return the verdict on integers and booleans; the largest difference is taken only of quantised results."""
    verdict = partial(LegacyVerdict, golden_dtype=str(golden.dtype))
    if within_one:
        largest = float((given.double() - golden.double()).abs().max())
        status, message = ("error", "a difference is above 1") if largest > 1 else ("pass", "")
        return verdict(status=status, message=message, metrics=LegacyMetrics(max_absolute=largest))
    unequal = float((given != golden).double().mean())
    status, message = ("error", "it is not equal") if unequal else ("pass", "")
    return verdict(status=status, message=message, metrics=LegacyMetrics(unequal=unequal))


def golden_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the floating type in which msprobe computes the golden result of a result of type `dtype`."""
    return torch.float32 if dtype.itemsize <= 2 else torch.float64


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _array(tensor: Tensor) -> Array:
    """Return the elements as numpy has them: types that it lacks become float32, without loss."""
    narrow = tensor.is_floating_point() and _name(tensor.dtype) in FLOAT8 | {"bfloat16"}
    array: Array = (tensor.float() if narrow else tensor).detach().cpu().numpy()
    return array


class _Measures:
    """A floating result beside the golden one, both as arrays of one shape with at least one element."""

    def __init__(self, given: Array, golden: Array, dtype: str) -> None:
        self._given, self._golden, self._dtype = given, golden, dtype
        self._limits: TypeLimits = type_limits(dtype)
        self._error = np.abs(given - golden)

    def by(self, standard: Standard) -> dict[str, float]:
        """Return the measures that a standard takes, by name."""
        match standard:
            case Standard.BENCHMARK:
                return self._benchmark()
            case Standard.ABSOLUTE:
                return self._absolute()
            case Standard.ULP:
                return self._ulp()
            case Standard.THOUSANDTH:
                return {"within_thousandth": self._share_within(_THOUSANDTH)}
            case Standard.BINARY:
                return {"unequal": float((self._golden != self._given).sum() / self._golden.size)}

    def first_verdict(self, edition: Edition) -> tuple[str, str, dict[str, float]]:
        """Return word and reason of the check that needs no other device, and the measures up to its decision."""
        found: dict[str, float] = {}
        cosine, is_close = self._cosine(edition)
        if cosine is not None:
            found["cosine"] = cosine
        if not is_close:
            return "error", "the cosine is not above 0.99", found
        largest = found["max_absolute"] = self._error.max()
        if largest < _SAME:
            return "pass", "no difference reaches 0.001", found
        lax, strict = _LIMITS_OF_HALF if self._dtype in HALF else _LIMITS_OF_OTHERS
        if self._dtype not in HALF:
            found[_NAMES[strict]] = self._share_within(strict)
        for limit, word in ((lax, "error"), (strict, "warning")):
            share = found[_NAMES[limit]] = self._share_within(limit)
            if share <= 1 - limit:
                return word, f"too few relative differences are below {limit:g}", found
        return "pass", "", found

    def _cosine(self, edition: Edition) -> tuple[float | None, bool]:
        given, golden = self._given.reshape(-1), self._golden.reshape(-1)
        if given.size == 1:
            return None, True
        largest = np.max(np.abs(given)), np.max(np.abs(golden))
        zeros = [bool(each <= _ZERO) for each in largest]
        if any(zeros):
            return None, all(zeros)
        one, other = given.astype(float) / largest[0], golden.astype(float) / largest[1]
        cosine = np.dot(one, other) / (np.linalg.norm(one) * np.linalg.norm(other))
        if np.isnan(cosine):
            return math.nan, edition is Edition.V26
        cosine = float(np.clip(cosine, -1, 1))
        return cosine, cosine > _COSINE

    @property
    def _scale(self) -> Array:
        """Magnitudes of the golden result, never zero: what relative differences are shares of."""
        eps = _BFLOAT16_EPS if self._dtype == "bfloat16" else np.finfo(self._golden.dtype).eps
        scale: Array = np.abs(self._golden) + eps
        return scale

    def _share_within(self, limit: float) -> float:
        return float(np.sum(np.abs(self._error / self._scale) < limit) / self._error.size)

    def _finite(self) -> Array:
        finite: Array = np.isfinite(self._given) & np.isfinite(self._golden.astype(self._given.dtype))
        return finite

    def _small(self, finite: Array) -> Array:
        small: Array = (np.abs(self._golden) <= self._limits.small) & finite
        return small

    def _benchmark(self) -> dict[str, float]:
        finite = self._finite()
        small = self._small(finite)
        counted = finite & ~small
        relative = (self._error / self._scale)[counted]
        squares = float(np.mean(np.square(np.where(counted, self._error, 0))))
        mean_square = squares * (counted.size / (int(counted.sum()) + 0.0001) + 0.0001)
        differences = self._given - self._golden.astype(self._given.dtype)
        surplus = abs(int((differences > 0).sum()) - int((differences < 0).sum()))
        return {
            "small_share": _share((self._error > self._limits.small_error) & small, small),
            "rmse": math.sqrt(mean_square),
            "balance": surplus / differences.size,
            "max_relative": np.max(relative, initial=0),
            "mean_relative": np.mean(relative) if relative.size else 0.0,
        }

    def _absolute(self) -> dict[str, float]:
        finite = self._finite()
        small = self._small(finite)
        normal = finite & ~small
        return {
            "nonfinite_share": _share(~self._agrees_at_the_ends() & ~finite, ~finite),
            "relative_share": _share((self._error / self._scale > self._limits.relative) & normal, normal),
            "absolute_share": _share((self._error > self._limits.absolute) & small, small),
        }

    def _agrees_at_the_ends(self) -> Array:
        """Return where both are NaN, or close if infinities are taken for the largest number of the type."""
        largest = _BFLOAT16_MAX if self._dtype == "bfloat16" else float(np.finfo(self._given.dtype).max)
        golden = np.clip(self._golden.astype(self._given.dtype), -largest, largest)
        error = np.abs(np.clip(self._given, -largest, largest) - golden)
        close = error / self._scale <= self._limits.relative
        agrees: Array = close | (np.isnan(self._given) & np.isnan(golden))
        return agrees

    def _ulp(self) -> dict[str, float]:
        errors = ulp_errors(self._given, self._golden, self._dtype)
        too_many = _ULP.get(self._dtype, (0, 0, 1))[2]
        return {
            "ulp_max": np.max(errors),
            "ulp_mean": np.mean(errors),
            "ulp_share": np.sum(errors > too_many) / errors.size,
        }


def ulp_errors(given: Array, golden: Array, dtype: str) -> Array:
    """Return the difference of each element in units of the last place that `dtype` has at the golden value.

    Of the types of 8 bits msprobe keeps the sign, so that what is too small is never too far off, and has equal zeros
    978 units apart. Neither is done here.
    """
    if dtype in FLOAT8:
        return _float8_ulp_errors(given.astype(np.float64), golden.astype(np.float64))
    least, bits, _ = _ULP[dtype]
    magnitude = np.abs(golden)
    exponent = np.maximum(np.where(magnitude == 0, 0, np.floor(np.log2(magnitude))), least)
    kind = np.float64 if dtype == "float32" else np.float32
    difference = (given.astype(kind) - golden).astype(kind)
    errors: Array = np.abs(difference * np.exp2(-exponent + bits).astype(kind))
    return errors


def _float8_ulp_errors(given: Array, golden: Array) -> Array:
    """The same for 8 bits: the nearer a magnitude is to 1, the more bits there are; with none, powers of two count."""
    power = np.maximum(np.log2(np.abs(golden) + 2.0**-1000), _FLOAT8_LEAST_EXPONENT)
    exponent = np.floor(power)
    bits = np.zeros_like(golden)
    for distance, number in reversed(_FLOAT8_BITS):
        bits[np.abs(exponent) <= distance] = number
    given_power = np.log2(np.abs(given) + 2.0**-1000)
    powers = np.where(given >= 0, given_power, -given_power) - np.where(golden >= 0, power, -power)
    errors = np.abs(np.where(bits == 0, powers, (given - golden) * 2.0 ** (bits - exponent)))
    equal: Array = np.where(given == golden, 0.0, errors)
    return equal


def _share(found: Array, among: Array) -> float:
    number = int(among.sum())
    return int(found.sum()) / number if number else 0.0
