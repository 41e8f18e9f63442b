"""Weights of quantised engines: not the bits are compared but sum and sum of squares, which quantising hardly moves.

An engine that holds a weight in 8 bits has a scale beside it. What it stands for is q * scale, and each element is off
by at most half a quantisation step. These errors are as good as independent, so that a sum of n of them is known to
within a few standard deviations: that finds weights that were never loaded, of another layer, or with a wrong scale,
but not an update that is smaller than a step. What such an engine does not quantise, as norms, may be rounded to
another type than the trainer's: that is a smaller step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

STANDARD_DEVIATIONS = 8.0
_MANTISSA_BITS = {
    "float8_e4m3fn": 3,
    "float8_e4m3fnuz": 3,
    "float8_e5m2": 2,
    "float8_e5m2fnuz": 2,
    "bfloat16": 7,
    "float16": 10,
    "float32": 23,
}
_SCALES = ("_scale", "_scale_inv")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorSums:
    """Sums over the elements of a tensor, or of the part of one. They add up over shards and fused tensors.

    Attributes:
        total: Sum.
        squares: Sum of squares.
        variance: Sum of the variances of the errors of quantisation; 0 where there is none.
        square_variance: Sum of the variances of the errors of the squares.
    """

    total: float
    squares: float
    variance: float = 0.0
    square_variance: float = 0.0


def is_quantised(dtype: str) -> bool:
    """Return whether weights of this type, as `float8_e4m3fn`, `float8` or `int8`, stand for others by a scale."""
    return dtype.startswith(("float8", "fp8", "int8"))


def moments_of(tensor: Any, scale: Any = None) -> TensorSums | None:
    """Return the moments of a tensor of torch, in float64; of a quantised one with its scale, of what it stands for.

    The scale is one number, one per row or column, or one per block. None: it is none of these. Waits for the device.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    values = tensor.double()
    factors: Any = 1.0 if scale is None else _spread(scale.double(), values)
    if factors is None:
        return None
    values = values * factors
    squares = values.square()
    if dtype in _MANTISSA_BITS:
        step_squares = squares * 4.0 ** -_MANTISSA_BITS[dtype]  # a step is at most this part of the element
    elif dtype == "int8":
        step_squares = values.new_ones(values.shape) * factors**2
    else:
        step_squares = values.new_zeros(())
    variance, square_variance = step_squares.sum() / 12.0, (4.0 * squares * step_squares).sum() / 12.0
    return TensorSums(
        total=float(values.sum()),
        squares=float(squares.sum()),
        variance=float(variance),
        square_variance=float(square_variance),
    )


def scale_of(name: str, tensors: Mapping[str, Any]) -> Any:
    """Return the scale that an engine holds beside a tensor, `NAME_scale` or `NAME_scale_inv`; None: it has none."""
    return next((tensors[name + end] for end in _SCALES if name + end in tensors), None)


def is_scale(name: str) -> bool:
    """Return whether a tensor of this name scales another one."""
    return name.endswith(_SCALES)


def added_moments(parts: Iterable[TensorSums | None]) -> TensorSums | None:
    """Return the moments of what parts make together; None: those of some part are not known."""
    found = list(parts)
    known = [part for part in found if part is not None]
    if not known or len(known) < len(found):
        return None
    fields = (field.name for field in dataclasses.fields(TensorSums))
    return TensorSums(**{name: math.fsum(getattr(part, name) for part in known) for name in fields})


def is_within_steps(exact: TensorSums, quantised: TensorSums) -> bool:
    """Return whether quantisation explains how far the moments of two tensors are apart."""
    bias = quantised.variance  # squares grow by the errors' own
    return (
        abs(exact.total - quantised.total) <= STANDARD_DEVIATIONS * math.sqrt(quantised.variance)
        and abs(exact.squares - quantised.squares)
        <= STANDARD_DEVIATIONS * math.sqrt(quantised.square_variance) + 2.0 * bias
    )


def _spread(scale: Any, values: Any) -> Any:
    """Return a scale in a shape that multiplies the values; None: it does not fit."""
    if scale.numel() == 1:
        return scale.reshape(())
    if values.dim() == 2 and scale.dim() == 2 and 1 not in scale.shape:
        blocks = [-(-size // count) for size, count in zip(values.shape, scale.shape, strict=True)]
        spread = scale.repeat_interleave(blocks[0], 0).repeat_interleave(blocks[1], 1)
        return spread[: values.shape[0], : values.shape[1]]
    if scale.numel() == values.shape[0]:
        return scale.reshape(-1, *[1] * (values.dim() - 1))
    return scale.reshape(1, -1) if values.dim() == 2 and scale.numel() == values.shape[1] else None
