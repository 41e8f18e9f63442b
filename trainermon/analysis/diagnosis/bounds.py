"""What the statistics of a call's inputs prove about its result, without the tensors.

Decides only what is certain: a result that the inputs bound below the largest number of its type cannot have become
infinite by arithmetic, and an exponential of more than 709.8 is infinite in float64 too. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from trainermon.dump.files.records import EntryRecord, TensorRecord
from trainermon.dump.files.verdicts import NonfiniteCause

# Largest finite numbers, IEEE 754 and the OCP 8-bit formats.
LARGEST = {
    "torch.float8_e4m3fn": 448.0,
    "torch.float8_e5m2": 57344.0,
    "torch.float16": 65504.0,
    "torch.bfloat16": 3.3895313892515355e38,
    "torch.float32": 3.4028234663852886e38,
    "torch.float64": 1.7976931348623157e308,
}
_NARROW = ("torch.float8_e4m3fn", "torch.float8_e5m2", "torch.float16", "torch.bfloat16")
# Room for rounding on the way to a sum.
_MARGIN = 1.05
_BOUNDED_BY_ONE = frozenset({"softmax", "sigmoid", "tanh"})
_NO_LARGER = frozenset(
    {"relu", "gelu", "silu", "embedding", "identity", "max_pool2d", "avg_pool2d", "maximum", "minimum"}
)
_PRODUCTS = frozenset(
    {"linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "mv", "dot", "conv1d", "conv2d"}
)
_SUMS = frozenset({"add", "__add__", "__iadd__", "__radd__", "add_", "sub", "__sub__", "__isub__", "sub_"})
_FACTORS = frozenset({"mul", "__mul__", "__imul__", "__rmul__", "mul_"})
_RATIOS = frozenset({"div", "__div__", "__truediv__", "__itruediv__", "true_divide", "div_"})


def proven_cause(entry: EntryRecord) -> tuple[NonfiniteCause, str] | None:
    """Return why the result of a dumped forward is NaN or Inf, as far as the statistics of its inputs prove it.

    Returns:
        The cause and a sentence, or None if they prove nothing.
    """
    output = next((record for record in entry.outputs if record.nonfinite), None)
    inputs = (*entry.inputs, *entry.parameters)
    if output is None or output.dtype not in LARGEST or not inputs:
        return None
    if any(record.nonfinite and not _is_masking(record) for record in inputs):
        return NonfiniteCause.INHERITED, "what it was given was not finite"
    if any(record.nonfinite for record in inputs) or not all(
        record.max is not None and record.min is not None for record in inputs
    ):
        return None
    name = (entry.class_name if entry.key.startswith("Module.") else entry.module.split(".")[-1]).lower()
    if name in _UNDEFINED:
        return _UNDEFINED[name](entry.inputs, output)
    reach = _reach(name, entry.inputs, entry.parameters)
    return None if reach is None else _by_reach(reach * _MARGIN, output)


def _is_masking(record: TensorRecord) -> bool:
    """Return whether infinities may be a mask's: there is no NaN, and nothing that is above zero."""
    return not record.nans and (record.max is None or record.max <= 0)


def _by_reach(reach: float, output: TensorRecord) -> tuple[NonfiniteCause, str] | None:
    name = output.dtype.removeprefix("torch.")
    bounded = f"its inputs bound the result by {reach:.3g}"
    if reach < LARGEST[output.dtype]:
        return (
            NonfiniteCause.KERNEL,
            f"{bounded}, which {name} holds: not its arithmetic, but the device or the code that ran",
        )
    if output.dtype in _NARROW and reach < LARGEST["torch.float32"]:
        return (
            NonfiniteCause.PRECISION,
            f"{bounded}: float32 would have held it, {name} ends at {LARGEST[output.dtype]:.3g}",
        )
    return None


def _reach(name: str, inputs: Sequence[TensorRecord], parameters: Sequence[TensorRecord]) -> float | None:
    """Return what the magnitude of a result cannot exceed; None for an operation that is not known."""
    records = [*inputs, *parameters]
    if name in _BOUNDED_BY_ONE:
        return 1.0
    if name in _NO_LARGER:
        return max(map(_size, records))
    if name in _PRODUCTS:
        return _reach_of_product(name, records)
    combined = sum if name in _SUMS else math.prod if name in _FACTORS else None
    if combined is None or len(inputs) != 2:  # with one tensor the other operand is a number, which nothing tells
        return None
    return combined(map(_size, inputs))


def _reach_of_product(name: str, records: Sequence[TensorRecord]) -> float | None:
    added = 1 if name in ("addmm", "baddbmm") else 0
    if len(records) < added + 2 or not records[added].shape:
        return None
    left, right = records[added : added + 2]
    terms = math.prod(right.shape[1:]) if name.startswith("conv") else left.shape[-1]
    rest = [record for record in records if record not in (left, right)]
    return terms * _size(left) * _size(right) + sum(map(_size, rest))


def _size(record: TensorRecord) -> float:
    return max(abs(record.max or 0.0), abs(record.min or 0.0))


def _of_exponential(inputs: Sequence[TensorRecord], output: TensorRecord) -> tuple[NonfiniteCause, str] | None:
    largest = inputs[0].max or 0.0
    ends = {name: math.log(number) for name, number in LARGEST.items()}
    given = f"its input reaches {largest:.5g}"
    if largest > ends["torch.float64"]:
        return NonfiniteCause.RANGE, f"{given}: float64 overflows too, beyond {ends['torch.float64']:.5g}"
    if largest > ends["torch.float32"] and output.dtype != "torch.float64":
        return NonfiniteCause.RANGE, f"{given}: float32 overflows beyond {ends['torch.float32']:.4g}, float64 holds it"
    if largest > ends[output.dtype]:
        return NonfiniteCause.PRECISION, f"{given}: {output.dtype.removeprefix('torch.')} overflows, float32 holds it"
    return _by_reach(math.exp(largest) * _MARGIN, output)


def _of_logarithm(inputs: Sequence[TensorRecord], _output: TensorRecord) -> tuple[NonfiniteCause, str] | None:
    least = inputs[0].min if inputs[0].min is not None else 1.0
    return (
        (NonfiniteCause.RANGE, f"its input goes down to {least:.3g}, where it has no finite value")
        if least <= 0
        else None
    )


def _of_root(inputs: Sequence[TensorRecord], _output: TensorRecord) -> tuple[NonfiniteCause, str] | None:
    least = inputs[0].min if inputs[0].min is not None else 1.0
    return (
        (NonfiniteCause.RANGE, f"its input goes down to {least:.3g}, where it has no real value") if least < 0 else None
    )


def _of_reciprocal(inputs: Sequence[TensorRecord], _output: TensorRecord) -> tuple[NonfiniteCause, str] | None:
    zeros = inputs[-1].zeros
    return (NonfiniteCause.RANGE, f"it divides by {zeros:,} zeros") if zeros else None


def _of_ratio(inputs: Sequence[TensorRecord], output: TensorRecord) -> tuple[NonfiniteCause, str] | None:
    return _of_reciprocal(inputs, output) if len(inputs) == 2 else None


_Rule = Callable[[Sequence[TensorRecord], TensorRecord], "tuple[NonfiniteCause, str] | None"]
_UNDEFINED: dict[str, _Rule] = {
    "exp": _of_exponential,
    "exp_": _of_exponential,
    "log": _of_logarithm,
    "log_": _of_logarithm,
    "log2": _of_logarithm,
    "log10": _of_logarithm,
    "sqrt": _of_root,
    "sqrt_": _of_root,
    "rsqrt": _of_reciprocal,
    "reciprocal": _of_reciprocal,
    **dict.fromkeys(_RATIOS, _of_ratio),
}
