"""The standards by which msprobe's checker judges: which one an operation has, and its limits.

The first line of numbers of each table is for float16, then bfloat16, float32 and what is none of them. Two editions
differ: version 8 looks an operation up by name, version 26 takes `BENCHMARK` for every floating result.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

FLOAT8 = frozenset(["float8_e4m3fn", "float8_e5m2"])
HALF = frozenset(["float16", "bfloat16"])
MEASURED = FLOAT8 | HALF | {"float32"}
"""Floating types of which more than cosine, absolute and relative error is measured."""
NOT_COMPARED = frozenset(["float64", "complex64", "complex128"])
"""Types whose rows two files of details say nothing of."""


class Edition(enum.Enum):
    """Whose rules: those of msprobe 8, or of msprobe 26."""

    V8 = "msprobe8"
    V26 = "msprobe"


class Standard(enum.Enum):
    """How a result is judged; the value is what msprobe calls it in its files."""

    ABSOLUTE = "绝对阈值法"
    BENCHMARK = "标杆比对法"
    BINARY = "二进制一致法"
    THOUSANDTH = "双千指标法"
    ULP = "ULP误差比对法"


_BY_NAME = {
    Standard.ABSOLUTE: """
        add add_ __add__ __iadd__ __radd__ div div_ __div__ __idiv__ divide divide_ leaky_relu leaky_relu_ mul mul_
        __mul__ __imul__ __rmul__ prelu reciprocal reciprocal_ rsqrt rsqrt_ square square_ sub sub_ __sub__ __isub__
        rsub
    """,
    Standard.BINARY: """
        abs abs_ absolute absolute_ argmin bitwise_and bitwise_and_ broadcast_to ceil ceil_ equal fill_ flatten floor
        floor_ gather greater greater_ greater_equal greater_equal_ histc isfinite isnan less less_ less_equal
        less_equal_ logical_and logical_and_ logical_not logical_not_ logical_or logical_or_ masked_fill masked_fill_
        max_pool3d maximum minimum neg neg_ nonzero not_equal not_equal_ one_hot pad relu reshape round round_ select
        sign sign_ sort tile topk transpose transpose_ tril tril_ triu triu_ type_as
    """,
    Standard.ULP: """
        __matmul__ addbmm addbmm_ addmm addmm_ baddbmm baddbmm_ bilinear bmm chain_matmul hspmm linear matmul mm mv smm
        sspaddmm
    """,
    Standard.THOUSANDTH: "conv1d conv2d",
}
_STANDARDS = {name: standard for standard, names in _BY_NAME.items() for name in names.split()}


class RatioLimits(NamedTuple):
    """How many times as far off as the golden device the other may be."""

    max_relative: float
    mean_relative: float
    rmse: float
    small_share: float = 2.0


_LEVEL_0, _LEVEL_1, _LEVEL_2 = RatioLimits(10.0, 2.0, 2.0), RatioLimits(5.0, 1.5, 1.5), RatioLimits(2.0, 1.2, 1.2)
_LEVELS = {
    _LEVEL_1: "embedding npu_fusion_attention npu_fusion_attention_grad scatter_ scatter_add_",
    _LEVEL_2: """
        GELU addmm index layer_norm matmul mm nonzero npu_cross_entropy_loss npu_cross_entropy_loss_backward
        npu_rms_norm npu_rms_norm_backward one_hot sum
    """,
}
_LIMITS = {name: limits for limits, names in _LEVELS.items() for name in names.split()}


class TypeLimits(NamedTuple):
    """The limits of a type.

    Attributes:
        small: Golden values up to this magnitude are small.
        small_error: What a small value may be off, by `BENCHMARK`.
        absolute: What a small value may be off, by `ABSOLUTE`.
        relative: What another one may be off, as a share of it, by `ABSOLUTE`.
        floor: What the golden device's error counts as at least.
    """

    small: float
    small_error: float
    absolute: float
    relative: float
    floor: float


_TYPE_LIMITS = {
    "float16": TypeLimits(2**-10, 1e-16, 2**-16, 2**-10, 2**-11),
    "bfloat16": TypeLimits(2**-10, 1e-16, 1e-16, 2**-8, 2**-8),
}
_OTHER_LIMITS = TypeLimits(2**-20, 2**-30, 2**-30, 2**-20, 2**-14)


def type_limits(dtype: str) -> TypeLimits:
    """Return the limits of a type (`bfloat16`); those of float32 for one that has none of its own."""
    return _TYPE_LIMITS.get(dtype, _OTHER_LIMITS)


def ratio_limits(operation: str, edition: Edition) -> RatioLimits:
    """Return how many times as far off as the golden device an operation may be; version 8 has one limit for all."""
    return _LIMITS.get(operation, _LEVEL_0) if edition is Edition.V26 else _LEVEL_0


def standard_of(operation: str, dtype: str, edition: Edition, *, has_float8_inputs: bool = False) -> Standard:
    """Return how msprobe judges a result of type `dtype` (`float32`) of `operation` (`linear`, `add_`)."""
    is_floating = dtype in MEASURED or dtype in NOT_COMPARED
    if not is_floating:
        return Standard.BINARY
    if edition is Edition.V8:
        return _STANDARDS.get(operation, Standard.BENCHMARK)
    if dtype in FLOAT8:
        return Standard.ULP
    if has_float8_inputs:
        return Standard.ABSOLUTE
    return Standard.BENCHMARK


def operation_of(key: str) -> str:
    """Return what msprobe calls the operation of a call: `linear` of `Functional.linear.3`; "" of another form.

    >>> operation_of("Functional.linear.3"), operation_of("Torch.linalg.svd.0"), operation_of("x")
    ('linear', 'linalg.svd', '')
    """
    _, *parts = key.split(".")
    return ".".join(parts[:-1]) if len(parts) in (2, 3) else ""
