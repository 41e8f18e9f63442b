"""Random tensors with given statistics: largest and smallest element, mean, norm, zeros, NaNs and infinities.

Both ends are planted. The rest is drawn from a beta distribution between them, which has any mean and variance that
numbers in an interval can have: nearly normal where they are narrow, uniform, or at both ends. What chance makes of
that is then moved and stretched until both are met.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainermon.core.errors import DumpError

Floats = np.ndarray[Any, np.dtype[np.float64]]

_ROUNDS, _PAIR_ROUNDS = 300, 60
_CLOSE = 1e-4
# Beyond this share of the largest variance, numbers lie at both ends.
_TWO_SIDED = 0.999
_NARROW = 1e-12
_SMALL = 1e-6
_TRIES, _FEW = 8, 1024
# Beta distributions are normal ones beyond this sum of their parameters.
_NORMAL = 1e8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorNumbers:
    """What is known of the elements of a tensor.

    Attributes:
        dtype: Their type.
        shape: Their dimensions.
        low: The smallest finite element; None: not known. So with the next three; of complex ones, of magnitudes.
        high: The largest.
        mean: Their mean.
        norm: The root of the sum of their squares.
        nans: How many are NaN.
        infs: How many are infinite.
        zeros: How many are zero; None: not known.
        is_positive: Whether the infinities are positive.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    low: float | None = None
    high: float | None = None
    mean: float | None = None
    norm: float | None = None
    nans: int = 0
    infs: int = 0
    zeros: int | None = None
    is_positive: bool = False

    @classmethod
    def of_form(cls, form: Mapping[str, Any]) -> TensorNumbers:
        """Return what the JSON form of a tensor in a dump says; msprobe's statistics are over all elements.

        Raises:
            DumpError: It names a type that torch does not have.
        """
        dtype = getattr(torch, str(form["dtype"]).removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise DumpError(f"torch has no type {form['dtype']}")
        high, low = _number(form.get("Max")), _number(form.get("Min"))
        ends = [value for value in (high, low) if value is not None]
        return cls(
            dtype=dtype,
            shape=tuple(int(size) for size in form["shape"]),
            low=_finite(low, form.get("Min_except_inf_nan")),
            high=_finite(high, form.get("Max_except_inf_nan")),
            mean=_finite(_number(form.get("Mean"))),
            norm=_finite(_number(form.get("Norm"))),
            nans=form["nans"] if "nans" in form else int(any(map(math.isnan, ends))),
            infs=form["infs"] if "infs" in form else int(any(map(math.isinf, ends))),
            zeros=form.get("zeros"),
            is_positive=high == math.inf,
        )

    @property
    def count(self) -> int:
        """Number of elements, from the shape."""
        return math.prod(self.shape)


def tensor_like(numbers: TensorNumbers, rng: np.random.Generator) -> Tensor:
    """Return a contiguous tensor of the CPU with these statistics, the mean and the norm within 2 %.

    What is not known is chosen: numbers without ends are standard normal, integers zero, booleans either. Cost: about
    0.1 µs an element, 1 µs where both ends are near.
    """
    dtype, count = numbers.dtype, numbers.count
    if dtype is torch.bool:
        return _arranged(_booleans(numbers, rng).reshape(numbers.shape))
    nans = min(numbers.nans, count)
    infs = min(numbers.infs, count - nans)
    finite = _finite_elements(numbers, count - nans - infs, rng)
    if not (dtype.is_floating_point or dtype.is_complex):
        return _shuffled(_integers(numbers, finite, rng), rng).reshape(numbers.shape)
    if dtype.is_complex:
        angles = rng.uniform(0, 2 * math.pi, finite.size)
        kept = torch.from_numpy(finite * np.exp(1j * angles)).to(dtype)
    else:
        kept = _rounded(torch.from_numpy(finite), dtype, numbers)
    infinity = torch.full((infs,), math.inf if numbers.is_positive else -math.inf)
    odd = torch.cat([torch.full((nans,), math.nan), infinity])
    whole = torch.cat([kept.to(torch.float32), odd]) if _is_tiny(dtype) else torch.cat([kept, odd.to(dtype)])
    return _arranged(_shuffled(whole, rng).to(dtype).reshape(numbers.shape))


def _number(value: Any) -> float | None:
    """Return a statistic; msprobe writes some as text."""
    try:
        return None if value is None else value if isinstance(value, int) else float(value)
    except (TypeError, ValueError):
        return None


def _finite(value: float | None, other: Any = None) -> float | None:
    if value is not None and math.isfinite(value):
        return value
    other = _number(other)
    return other if other is not None and math.isfinite(other) else None


def _is_tiny(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def _booleans(numbers: TensorNumbers, rng: np.random.Generator) -> Tensor:
    count = numbers.count
    zeros = numbers.zeros
    if zeros is None:
        least, most = int(not numbers.low), count - int(bool(numbers.high))
        zeros = 0 if numbers.low else count if numbers.high is not None and not numbers.high else count // 2
        zeros = min(max(zeros, min(least, most)), most) if numbers.high is not None else zeros
    return _shuffled(torch.arange(count) >= zeros, rng)


def _shuffled(tensor: Tensor, rng: np.random.Generator) -> Tensor:
    return tensor[torch.from_numpy(rng.permutation(tensor.numel()))]


def _finite_elements(numbers: TensorNumbers, count: int, rng: np.random.Generator) -> Floats:
    """Return so many finite elements, the two ends first; those of integers are not whole yet."""
    if numbers.low is None or numbers.high is None:
        return rng.standard_normal(count) if numbers.dtype.is_floating_point else np.zeros(count)
    low, high = float(numbers.low), float(max(numbers.high, numbers.low))
    if low == high or count < 2:
        return np.full(count, low)
    zeros = min(max(0, (numbers.zeros or 0) - (low == 0) - (high == 0)), count - 2)
    others = count - 2 - zeros
    size = max(abs(low), abs(high))
    bounds = _bounds_of_others(numbers, low, high)
    ends = (low / size, high / size)
    mean = (bounds[0] + bounds[1]) / 2 / size
    if numbers.mean is not None and others:
        mean = (count * (numbers.mean / size) - sum(ends)) / others
    mean = min(max(mean, bounds[0] / size), bounds[1] / size)
    variance = ((bounds[1] - bounds[0]) / size) ** 2 / 12
    if numbers.norm is not None and others:
        squares = (numbers.norm / size) ** 2 - ends[0] ** 2 - ends[1] ** 2
        variance = squares / others - mean**2
    drawn = _drawn(others, (bounds[0] / size, bounds[1] / size), (mean, variance), rng)
    return np.concatenate([[low, high], np.clip(drawn * size, low, high), np.zeros(zeros)])


def _bounds_of_others(numbers: TensorNumbers, low: float, high: float) -> tuple[float, float]:
    """Return between what the other elements are: where zeros are counted, they are not zero."""
    if numbers.zeros is None:
        return low, high
    is_whole = not (numbers.dtype.is_floating_point or numbers.dtype.is_complex)
    least = 1.0 if is_whole else _SMALL * (high - low)
    return low + least * (low == 0), high - least * (high == 0)


def _drawn(count: int, ends: tuple[float, float], moments: tuple[float, float], rng: np.random.Generator) -> Floats:
    """Return so many numbers between the ends with this mean and variance, or as near as that can be."""
    (low, high), (mean, variance) = ends, moments
    most = (high - mean) * (mean - low)
    if count < 2 or high <= low or variance <= _NARROW * most or most <= 0:
        return np.full(count, mean)
    if variance >= _TWO_SIDED * most:
        at_high = count * (mean - low) / (high - low)
        found = np.where(np.arange(count) < int(at_high), high, low)
        found[min(int(at_high), count - 1)] += (at_high % 1) * (high - low) * (int(at_high) < count)
        return found
    found = np.full(count, mean)
    for _ in range(_TRIES if count < _FEW else 1):
        found = _fitted(_raw(count, (mean - low) / (high - low), most / variance - 1, rng), ends, moments)
        if _is_close(found, moments):
            return found
    return _two_levels(count, ends, moments, found)


def _two_levels(count: int, ends: tuple[float, float], moments: tuple[float, float], other: Floats) -> Floats:
    """Return a few numbers far from all others, with this mean and variance; `other` if they do not fit."""
    (low, high), (mean, variance) = ends, moments
    least = count * variance / (variance + (high - mean) ** 2)
    most = count * (mean - low) ** 2 / (variance + (mean - low) ** 2)
    number = math.ceil(least)
    if not 0 < number <= most or number >= count:
        return other
    above, below = math.sqrt(variance * (count - number) / number), math.sqrt(variance * number / (count - number))
    return np.where(np.arange(count) < number, mean + above, mean - below)


def _raw(count: int, share: float, width: float, rng: np.random.Generator) -> Floats:
    """Return so many distinct numbers, of mean 0 and variance 1, from the beta distribution a = share · width, b."""
    if width > _NORMAL:
        raw = rng.standard_normal(count)
    else:
        raw = rng.beta(max(share * width, 1e-3), max((1 - share) * width, 1e-3), count)
        raw += 1e-6 * rng.standard_normal(count)
    raw -= raw.mean()
    raw /= max(float(raw.std()), float(np.finfo(np.float64).tiny))
    return raw


def _fitted(raw: Floats, ends: tuple[float, float], moments: tuple[float, float]) -> Floats:
    """Return `raw` moved, stretched and cut at the ends until it has the mean and the variance."""
    mean, variance = moments
    shift, scale = mean, math.sqrt(variance)
    found = np.clip(shift + scale * raw, *ends)
    for _ in range(_ROUNDS):
        if _is_close(found, moments):
            break
        spread = float(found.var())
        shift += mean - float(found.mean())
        scale *= min(4.0, math.sqrt(variance / spread)) if spread else 4.0
        found = np.clip(shift + scale * raw, *ends)
    return found


def _is_close(found: Floats, moments: tuple[float, float]) -> bool:
    mean, variance = moments
    allowed = _CLOSE * max(abs(mean), _CLOSE * math.sqrt(variance))
    return abs(mean - float(found.mean())) <= allowed and abs(float(found.var()) - variance) <= _CLOSE * variance


def _rounded(values: Tensor, dtype: torch.dtype, numbers: TensorNumbers) -> Tensor:
    """Return float64 numbers in the type; what becomes zero there, and is not known to be, gets its smallest number."""
    found = values.to(torch.float32).to(dtype) if _is_tiny(dtype) else values.to(dtype)
    if numbers.zeros is None or dtype.itemsize < 2:
        return found
    tiny = torch.finfo(dtype).tiny
    lost = (found == 0) & (values != 0)
    return torch.where(lost, torch.where(values < 0, -tiny, tiny).to(dtype), found)


def _integers(numbers: TensorNumbers, values: Floats, rng: np.random.Generator) -> Tensor:
    """Return whole numbers of the type with the sum, and nearly the sum of squares, that they should have."""
    info = torch.iinfo(numbers.dtype)
    if numbers.low is None or numbers.high is None:
        return torch.zeros(values.size, dtype=numbers.dtype)
    low, high = (max(info.min, min(info.max, int(end))) for end in (numbers.low, numbers.high))
    if max(abs(low), abs(high)) >= 1 << 50:  # a roundoff of float64 is more than 1
        inner = torch.from_numpy(np.clip(np.rint(values), -(2.0**63), 2.0**63 - 2048)).to(torch.int64)
        found = torch.minimum(torch.maximum(inner, torch.tensor(low)), torch.tensor(high))
        found[: 2 if values.size > 1 else 1] = torch.tensor([low, high][: min(2, values.size)])
        return found.to(numbers.dtype)
    whole = np.rint(values)
    first, last = 2, values.size - max(0, min((numbers.zeros or 0) - (low == 0) - (high == 0), values.size - 2))
    inner_bounds = _bounds_of_others(numbers, low, high)
    part = whole[first:last]
    part[:] = np.clip(part, *inner_bounds)
    if numbers.zeros is not None and low < 0 < high:
        part[part == 0] = 1.0
    if numbers.mean is not None:
        _settle_sum(part, round(values.size * numbers.mean) - float(whole.sum()), inner_bounds, rng)
    if numbers.norm is not None:
        _settle_squares(part, numbers.norm**2 - float((whole**2).sum()), inner_bounds, rng)
    return torch.from_numpy(whole).to(numbers.dtype)


def _settle_sum(part: Floats, missing: float, bounds: tuple[float, float], rng: np.random.Generator) -> None:
    """Add one to, or take one from, as many elements as the sum lacks."""
    step = math.copysign(1.0, missing)
    for _ in range(_PAIR_ROUNDS):
        free = np.flatnonzero((part + step <= bounds[1]) & (part + step >= bounds[0]))
        number = min(int(abs(missing)), free.size)
        if not number:
            return
        part[rng.permutation(free)[:number]] += step
        missing -= step * number


def _settle_squares(part: Floats, missing: float, bounds: tuple[float, float], rng: np.random.Generator) -> None:
    """Move pairs of elements apart by one each, or together, until the sum of squares is met; their sum stays."""
    for _ in range(_PAIR_ROUNDS):
        if abs(missing) < 1.5 or part.size < 2:  # each move changes it by two at least
            return
        order = rng.permutation(part.size)
        half = part.size // 2
        first, second = order[:half], order[half : 2 * half]
        lower = np.where(part[first] <= part[second], first, second)
        upper = np.where(part[first] <= part[second], second, first)
        step = math.copysign(1.0, missing)
        gained = 2 * step * (part[upper] - part[lower]) + 2
        useful = (np.sign(gained) == step) & (part[lower] - step >= bounds[0]) & (part[upper] + step <= bounds[1])
        useful &= np.abs(gained) <= abs(missing) + 0.5
        gained = np.where(useful, gained, 0.0)
        taken = useful & (np.abs(np.cumsum(gained)) <= abs(missing) + 0.5)
        part[lower[taken]] -= step
        part[upper[taken]] += step
        missing -= float(gained[taken].sum())


def _arranged(tensor: Tensor) -> Tensor:
    """Return a mask of as many elements as a triangle has as that triangle; anything else as it is.

    A mask has two values: booleans, or a number to be added and zero.
    """
    if tensor.dim() < 2 or tensor.shape[-1] != tensor.shape[-2] or not tensor.numel():
        return tensor
    is_bool = tensor.dtype is torch.bool
    if not is_bool and not (tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1):
        return tensor
    zeros = int((tensor == 0).sum())
    other = tensor[tensor != 0]
    if not zeros or not other.numel() or (not is_bool and not bool((other == other[0]).all())):
        return tensor
    lower = torch.ones(tensor.shape, dtype=torch.bool).tril()
    kept = int(lower.sum())
    if not is_bool:
        return torch.where(lower, torch.zeros_like(tensor), other[0]) if zeros == kept else tensor
    return lower if other.numel() == kept else ~lower if zeros == kept else tensor
