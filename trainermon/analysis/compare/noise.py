"""How much two sound computations of the same operation may differ: rounding, and how inputs' errors grow in it.

Source: Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis" (2019): the error of a sum of K
terms grows with the square root of K; Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., sections 3
and 4, for the condition of sums and products.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from trainermon.analysis.compare.items import INPUT, MODULE, OUTPUT, DumpCall, DumpRow
from trainermon.analysis.compare.merging.buffers import fills
from trainermon.dump.files.records import BACKWARD, FORWARD, PARAMETERS_GRAD

ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "tf32": 2.0**-11,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e4m3fnuz": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "float8_e5m2fnuz": 2.0**-3,
    "float8_e8m0fnu": 2.0**-1,
    "float4_e2m1fn_x2": 2.0**-2,
    "complex32": 2.0**-11,
    "complex64": 2.0**-24,
    "complex128": 2.0**-53,
}
"""Unit roundoff by dtype: half the distance from 1 to the next number."""

LARGEST = {
    "float64": 2.0**1023 * (2 - 2.0**-52),
    "float32": 2.0**127 * (2 - 2.0**-23),
    "float16": 65504.0,
    "bfloat16": 2.0**127 * (2 - 2.0**-7),
    "complex64": 2.0**127 * (2 - 2.0**-23),
    "complex128": 2.0**1023 * (2 - 2.0**-52),
}
"""Largest finite number by dtype, where masks are made of it."""

_SOURCES = tuple(ROUNDOFF[name] for name in ("bfloat16", "float16", "float32", "float64"))

PLAIN = "<class 'float'>"
"""Dtype of a row that is a plain number."""


def is_limit(value: float, dtype: str) -> bool:
    """Return whether a number is next to the limits of its type, as it stands in masks for minus infinity.

    A plain number, which has no such type, is one if it is the largest of any.

    >>> is_limit(-65504.0, "float16"), is_limit(-65504.0, "float32"), is_limit(-65504.0, "<class 'float'>")
    (True, False, True)
    """
    if dtype == PLAIN:
        return abs(value) in LARGEST.values()
    return abs(value) >= LARGEST.get(dtype, math.inf) / 2


_MINDSPORE = {"Float64": "float64", "Float32": "float32", "Float16": "float16", "BFloat16": "bfloat16"}
_BY_DTYPE = (
    ROUNDOFF
    | {f"torch.{name}": unit for name, unit in ROUNDOFF.items()}
    | {name: ROUNDOFF[same] for name, same in _MINDSPORE.items()}
)

SAFETY = 8.0
"""How many times what is expected is taken for sound. Statistics show only a part of an error: a blame must not rest on
the part that happened to be seen."""

MAX_ROUNDING = 0.25
"""The most that is ever put down to rounding alone: the distance from 1 to the next number of a type with two bits of
mantissa (float8_e5m2). A bound that grew on with the type would pass a tensor that is zero, or has the other sign."""

COARSE = 2.0**-4
"""Unit roundoff from which on a type is coarse: that of the finest 8-bit floats."""

ELEMENTWISE_SAFETY = 3.0
"""The same of what inputs explain, where the whole of their difference is known, element by element."""

# By how much an operation of which nothing is known may enlarge a relative error. Measured on sound transformers in
# float32 and bfloat16 with perturbed weights: forwards twofold, backwards up to thirtyfold in their statistics.
_FORWARD_GROWTH = 5.0
_BACKWARD_GROWTH = 10.0
_LINEAR = frozenset(("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "__matmul__", "conv1d", "conv2d"))
_LINEAR_MODULES = ("Linear", "Conv1d", "Conv2d")  # ColumnParallelLinear too
# |f(x) - f(y)| is at most 1.13 |x - y| for each of these (gelu has the steepest slope)
_STEEPEST = 1.13
_LIPSCHITZ = frozenset(
    ["relu", "gelu", "silu", "tanh", "sigmoid", "softmax", "abs", "clamp", "hardtanh", "elu", "softplus"]
)
_LIPSCHITZ_MODULES = ("ReLU", "GELU", "SiLU", "Tanh", "Sigmoid", "Softmax", "Activation")
_NORMALISATIONS = frozenset(["layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "normalize"])
_NORMALISATION_MODULES = ("Norm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d")
# Functions of which the slope jumps somewhere.
_KINKED = frozenset(
    ["relu", "relu_", "relu6", "leaky_relu", "threshold", "clamp", "hardtanh", "abs", "max", "min", "amax"]
)
_KINKED |= frozenset(["amin", "maximum", "minimum", "max_pool1d", "max_pool2d", "max_pool3d", "topk", "sort", "where"])
_SMOOTH = frozenset(["silu", "gelu", "tanh", "sigmoid", "softmax", "softplus", "layer_norm", "rms_norm", "embedding"])
_SMOOTH_MODULES = ("Linear", "Conv1d", "Conv2d", "Norm", "BatchNorm2d", "Embedding", "SiLU", "GELU", "Tanh", "Sigmoid")
_WEIGHTED = frozenset(["linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "embedding"])
_WEIGHTED |= frozenset(["batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm", "bilinear"])
_WEIGHTS = frozenset(["input.1", "input.2", "input.weight", "input.bias"])
_WRITES = frozenset(["__setitem__", "copy_", "fill_", "zero_", "normal_", "uniform_"])
_RECURRENT = frozenset(["lstm", "gru", "rnn_tanh", "rnn_relu"])
_RECURRENT_MODULES = ("LSTM", "GRU", "RNN")
# Kernels that transform before they sum (Winograd's convolutions) lose a digit.
_SUMS_SAFETY = 16.0
# Beside a power of two, which all types hold, a number of more bits tells from which type a tensor was cast.
_FEW_BITS = 4
# Below so many elements that can be expected beyond a kink, there is none.
_RARE = 1e-2
# Relative errors of factors add up, and large elements may have the larger ones.
_PRODUCTS = frozenset(["mul", "mul_", "__mul__", "__rmul__", "__imul__", "div", "div_", "__truediv__", "__itruediv__"])
_PRODUCT_GROWTH = 2.5
_REDUCTIONS = frozenset(["sum", "mean"])
_SUMS = frozenset(
    ("add", "add_", "sub", "sub_", "__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__", "sum", "mean")
)
_MOVES = frozenset(
    [
        "view",
        "reshape",
        "transpose",
        "permute",
        "contiguous",
        "clone",
        "expand",
        "squeeze",
        "unsqueeze",
        "flatten",
        "cat",
        "stack",
        "split",
        "chunk",
        "__getitem__",
        "narrow",
        "dropout",
        "relu",
        "max_pool2d",
        "embedding",
    ]
)


def roundoff(items: Iterable[DumpRow]) -> float:
    """Return the coarsest unit roundoff (half the distance from 1 to the next number) among tensors.

    0 if none is floating.
    """
    return max([_BY_DTYPE.get(item.dtype or "", 0.0) for item in items if item.is_tensor], default=0.0)


def roundoff_of(dtype: str | None) -> float:
    """Return the unit roundoff of a type as dumps name it (`torch.float32`); 0 if it is not floating, or None."""
    return _BY_DTYPE.get(dtype or "", 0.0)


def is_coarse(*rows: DumpRow) -> bool:
    """Return whether the tensors of any of the rows have at most four bits of mantissa, as 8-bit floats.

    Their statistics differ by rounding as much as those of other values of the same spread.
    """
    return any(roundoff_of(row.dtype) >= COARSE for row in rows if row.is_tensor)


def is_product(call: DumpCall) -> bool:
    """Return whether a call multiplies matrices or convolves: what the precision of a run is set for."""
    return call.name in _LINEAR or (call.family == MODULE and call.name.endswith(_LINEAR_MODULES))


def makes_weight_gradient(call: DumpCall, place: str) -> bool:
    """Return whether the result at `place` of a function's backward is the gradient of its weight or bias."""
    return call.direction == BACKWARD and call.name in _WEIGHTED and place != "output.0"


def rounding(call: DumpCall, inner: int, unit: float) -> float:
    """Return the relative difference that two sound computations of one call may have, given the same inputs.

    A function rounds once on either side, and sums with the error of its accumulator (float32, or what is finer); a
    module has operations of its own that were not dumped, of which four are allowed for: their errors add up as
    squares. What the calls within a module round is not its own, and is seen on them. `inner` is the number of calls
    within, `unit` the coarsest unit roundoff. At most `MAX_ROUNDING`.
    """
    if not inner and call.name in _MOVES:
        return min(3 * unit, MAX_ROUNDING)
    own = (2.0 if call.family != MODULE else 4.0) * unit * _passes(call)
    accumulation = _SUMS_SAFETY * math.sqrt(_terms(call)) * min(unit, ROUNDOFF["float32"])
    return min((own + accumulation) * (1.0 if call.direction == FORWARD else 2.0), MAX_ROUNDING)


def least_rounding(unit: float) -> float:
    """Return the least relative difference that rounding may cause in a function that computes.

    `unit` is the unit roundoff of its dtype. At most `MAX_ROUNDING`.
    """
    return min(2 * unit + _SUMS_SAFETY * min(unit, ROUNDOFF["float32"]), MAX_ROUNDING)


def flips(call: DumpCall, inner: int, error: float) -> float:
    """Return the relative difference that a backward may have as elements pass a kink, such as zero in relu.

    `error` is that of its forward. The share of elements that lie within `error` of the kink is about `error`, and each
    of them has a gradient on one side and none on the other: the norm grows with the square root of the share. `inner`
    is the number of calls within.
    """
    if not error or not math.isfinite(error):
        return 0.0
    if not inner and (call.name in _SMOOTH or call.name in _LINEAR or call.name.endswith(_SMOOTH_MODULES)):
        return 0.0
    if call.family != MODULE and call.name not in _KINKED:
        return 0.0
    count = max((item.num_elements for item in call.items if item.is_tensor), default=1)
    return 2 * math.sqrt(error + (1 / count if error * count > _RARE else 0.0))


def cancelled(call: DumpCall, unit: float, spread: float) -> float:
    """Return the relative difference that a parameter's gradient may have because its sum was rounded in another order.

    Of `spread` terms for each element, which cancel one another, each is off by a rounding (`unit`).
    """
    if call.direction == PARAMETERS_GRAD:
        return 2 * unit * math.sqrt(max(1.0, spread))
    return 2 * unit * math.sqrt(_terms(call)) if call.name in _NORMALISATIONS or call.name in _WEIGHTED else 0.0


def is_sparse(ours: DumpRow, theirs: DumpRow) -> bool:
    """Return whether two floating tensors seem to differ in few elements only: their extrema are equal.

    False for other types, and where the extrema are not known.
    """
    return bool(roundoff((ours,))) and ours.max is not None and (ours.max, ours.min) == (theirs.max, theirs.min)


def cast_roundoff(ours: DumpRow, theirs: DumpRow) -> float:
    """Return by how much a cast may have changed one of two tensors that now have the same type: dumps hold no casts.

    A tensor comes of the coarsest type that holds its extrema exactly. 0 if this is the same on both sides, or is not
    known: powers of two are held by all types.
    """
    units = {_source_roundoff(item) for item in (ours, theirs)}
    return max(units) if len(units) > 1 and all(units) else 0.0


def _source_roundoff(item: DumpRow) -> float:
    extrema = [item.max, item.min]
    if not roundoff((item,)) or not all(isinstance(each, int | float) and math.isfinite(each) for each in extrema):
        return 0.0
    bits = [_significant_bits(float(each)) for each in extrema]
    is_told = min(bits) > 1 or max(bits) > _FEW_BITS
    return next(unit for unit in _SOURCES if unit <= 2.0 ** -max(bits)) if is_told else 0.0


def _significant_bits(number: float) -> int:
    mantissa = int(math.ldexp(math.frexp(number)[0], 53))
    return 53 - ((mantissa & -mantissa).bit_length() - 1) if mantissa else 0


class TensorSize(NamedTuple):
    """How large a tensor is, or all tensors together that a module was given.

    Attributes:
        norm: Square root of the sum of squares.
        number: Number of elements.
    """

    norm: float = 0.0
    number: int = 0


def size_of(item: DumpRow) -> TensorSize:
    """Return norm and number of elements of a row's tensor; zeros if they are not known."""
    if not roundoff((item,)) or not isinstance(item.norm, int | float) or not math.isfinite(item.norm):
        return TensorSize()
    return TensorSize(float(item.norm), item.num_elements)


def sums_up(call: DumpCall, item: DumpRow, given: TensorSize) -> bool:
    """Return whether a row of a backward is a sum over positions: a parameter's gradient, or that of a broadcast input.

    `given` is the size of the gradient that the call was given.
    """
    if call.direction == PARAMETERS_GRAD:
        return True
    if call.direction == FORWARD or call.family == MODULE or item.state != OUTPUT:
        return False
    if call.name in _WEIGHTED or call.name == "addmm":
        return item.place != "output.0" or call.name == "addmm"
    return (call.name in _SUMS or call.name in _PRODUCTS) and item.num_elements < given.number


def condition(item: DumpRow, norm: float, given: TensorSize, taken: TensorSize) -> float:
    """Return the condition of a gradient's sum: the norm of its terms over its own, at least 1; infinite for 0.

    Rounding of a sum, and errors of its terms, are as large as the terms make them, however much of these cancels: the
    gradient of a bias before softmax is nothing but rounding. `given` is the gradient that the operation was given,
    of which a bias is the sum; a weight sums the products with `taken`, what the forward was given, taken as
    independent of one another. A row of N numbers is then made of (given × taken ÷ N) ** 0.5 positions.
    """
    terms = given.norm
    if len(item.shape or ()) > 1 and taken.number:
        terms *= taken.norm / math.sqrt(math.sqrt(max(1.0, given.number * taken.number / max(1, item.num_elements))))
    return max(1.0, terms / norm) if norm else math.inf


def gap_growth(direction: str) -> float:
    """Return by what factor code that was not dumped may magnify a relative error, in the forward or the backward."""
    return _FORWARD_GROWTH if direction == FORWARD else _BACKWARD_GROWTH


def is_trivial(call: DumpCall) -> bool:
    """Return whether a call computes nothing that could be wrong: it only passes on or adds up its inputs."""
    return call.name in _MOVES or call.name in _SUMS


def overwrites(call: DumpCall, place: str) -> bool:
    """Return whether a call writes into its argument at `place` (`input.0`), so that its old content is chance."""
    return (call.name in _WRITES and place == "input.0") or fills(call, place)


def takes_weight(call: DumpCall, place: str) -> bool:
    """Return whether the argument at `place` (`input.1`) of a function is a weight or a bias."""
    return call.name in _WEIGHTED and place in _WEIGHTS


def _passes(call: DumpCall) -> float:
    """Return by how much rounding adds up in a call that goes through a sequence step by step."""
    if call.name not in _RECURRENT and not call.name.endswith(_RECURRENT_MODULES):
        return 1.0
    shape = next((item.shape for item in call.items if item.is_tensor and len(item.shape or ()) > 1), None) or (1, 1)
    return math.sqrt(max(shape[:2]))


def growth(call: DumpCall, inner: int) -> float:
    """Return by what factor, at least 1, a call may magnify the relative error of its inputs.

    `inner` is the number of calls within.
    """
    if call.direction != FORWARD:
        return _BACKWARD_GROWTH
    inputs, outputs = _norms(call, INPUT), _norms(call, OUTPUT)
    if not any(inputs) or not outputs or not all(outputs):
        return _FORWARD_GROWTH
    return max(1.0, _forward_growth(call, inner, inputs, min(outputs)))


def _forward_growth(call: DumpCall, inner: int, inputs: list[float], output: float) -> float:
    if call.name in _LINEAR or call.name.endswith(_LINEAR_MODULES):
        return _product(call) / output
    if call.name in _LIPSCHITZ or call.name.endswith(_LIPSCHITZ_MODULES):
        return _STEEPEST * max(inputs) / output
    if call.name in _NORMALISATIONS or call.name.endswith(_NORMALISATION_MODULES):
        return 2.0 * _cancellation(call)
    if not inner and call.name in _SUMS:
        return sum(inputs) * (math.sqrt(_terms(call)) if call.name in _REDUCTIONS else 1.0) / output
    if not inner and call.name in _PRODUCTS:
        return _PRODUCT_GROWTH
    return 1.0 if not inner and call.name in _MOVES else _FORWARD_GROWTH


def _cancellation(call: DumpCall) -> float:
    """Return the norm of the first input over its norm without its mean, which normalisations take away."""
    item = next(item for item in call.items if item.state == INPUT and item.is_tensor)
    if not isinstance(item.norm, int | float) or not isinstance(item.mean, int | float) or not item.norm:
        return _FORWARD_GROWTH
    share = item.num_elements * (item.mean / item.norm) ** 2  # of the square of the norm that the mean makes up
    return 1 / math.sqrt(max(1 - share, 1e-6))


def _product(call: DumpCall) -> float:
    """Return the norm of the product of two tensors that have nothing to do with one another."""
    factors = [item for item in call.items if item.state != OUTPUT and item.is_tensor and len(item.shape or ()) > 1]
    norms = [float(item.norm) for item in factors if isinstance(item.norm, int | float)]
    if len(norms) < 2:
        return sum(norms)
    return norms[0] * norms[1] / math.sqrt(_terms(call))


def _norms(call: DumpCall, state: str) -> list[float]:
    found = (item.norm for item in call.items if item.state == state and item.is_tensor)
    return [float(norm) for norm in found if isinstance(norm, int | float) and math.isfinite(norm)]


def _terms(call: DumpCall) -> float:
    """Return how many numbers are summed up into one element of the result, as far as the shapes tell."""
    return _terms_of(tuple((item.state, item.shape or ()) for item in call.items if item.is_tensor))


@lru_cache(maxsize=4096)
def _terms_of(shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> float:
    inputs = [shape for state, shape in shapes if state != OUTPUT]
    outputs = [math.prod(shape) for state, shape in shapes if state == OUTPUT]
    width = max((shape[-1] for shape in inputs if shape), default=1)
    smallest = max(1, min(outputs, default=1))
    return max(1.0, width, max((math.prod(shape) for shape in inputs), default=1) / smallest)
