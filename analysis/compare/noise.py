"""How much two sound computations of the same operation may differ: rounding, and how inputs' errors grow in it.

Source: Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis" (2019): the error of a sum of K
terms grows with the square root of K; Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., sections 3
and 4, for the condition of sums and products.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

from trainermon.analysis.compare.items import INPUT, OUTPUT, Call, Item
from trainermon.dump.records import FORWARD

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
    "complex64": 2.0**-24,
    "complex128": 2.0**-53,
}
"""Unit roundoff by dtype: half the distance from 1 to the next number."""

_MINDSPORE = {"Float64": "float64", "Float32": "float32", "Float16": "float16", "BFloat16": "bfloat16"}
_BY_DTYPE = (
    ROUNDOFF
    | {f"torch.{name}": unit for name, unit in ROUNDOFF.items()}
    | {name: ROUNDOFF[same] for name, same in _MINDSPORE.items()}
)

SAFETY = 8.0  # statistics show only a part of an error: a blame must not rest on the part that happened to be seen
_COMPOSITE_GROWTH = 10.0
_LINEAR = frozenset(("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "__matmul__", "conv1d", "conv2d"))
_LINEAR_MODULES = ("Linear", "Conv1d", "Conv2d")
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


def roundoff(items: Iterable[Item]) -> float:
    """Return the coarsest unit roundoff among tensors; 0 if there is no floating point tensor."""
    return max([_BY_DTYPE.get(item.dtype or "", 0.0) for item in items if item.is_tensor], default=0.0)


def rounding(call: Call, inner: int, unit: float) -> float:
    """Return the relative error that rounding may cause within one call, of which `inner` calls were dumped as well."""
    if not inner and call.name in _MOVES:
        return unit
    accumulation = min(unit, ROUNDOFF["float32"])
    return 2 * unit * math.sqrt(1 + inner) + math.sqrt(_terms(call)) * accumulation


def growth(call: Call, inner: int) -> float:
    """Return by how much a call may make the relative error of its inputs larger, at least 1."""
    inputs, outputs = _norms(call, INPUT), _norms(call, OUTPUT)
    if inner or call.direction != FORWARD or not any(inputs) or not all(outputs) or not outputs:
        return _COMPOSITE_GROWTH
    if call.name in _MOVES:
        return 1.0
    if call.name in _SUMS:
        return max(1.0, sum(inputs) * math.sqrt(_terms(call)) / min(outputs))
    if call.name in _LINEAR or call.name.endswith(_LINEAR_MODULES):
        return max(1.0, _product(call) / min(outputs))
    return _COMPOSITE_GROWTH


def _product(call: Call) -> float:
    """Return the norm of the product of two tensors that have nothing to do with one another."""
    factors = [item for item in call.items if item.state != OUTPUT and item.is_tensor and len(item.shape or ()) > 1]
    norms = [float(item.norm) for item in factors if isinstance(item.norm, int | float)]
    if len(norms) < 2:
        return sum(norms)
    return norms[0] * norms[1] / math.sqrt(_terms(call))


def _norms(call: Call, state: str) -> list[float]:
    found = (item.norm for item in call.items if item.state == state and item.is_tensor)
    return [float(norm) for norm in found if isinstance(norm, int | float) and math.isfinite(norm)]


def _terms(call: Call) -> float:
    """Return how many numbers are summed up into one element of the result, as far as the shapes tell."""
    return _terms_of(tuple((item.state, item.shape or ()) for item in call.items if item.is_tensor))


@lru_cache(maxsize=4096)
def _terms_of(shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> float:
    inputs = [shape for state, shape in shapes if state != OUTPUT]
    outputs = [math.prod(shape) for state, shape in shapes if state == OUTPUT]
    width = max((shape[-1] for shape in inputs if shape), default=1)
    smallest = max(1, min(outputs, default=1))
    return max(1.0, width, max((math.prod(shape) for shape in inputs), default=1) / smallest)
