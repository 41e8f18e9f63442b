"""Which tensors of a dump are one value: the same unchanged tensor, wherever a call takes or returns it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import IntEnum
from functools import cache
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

from trainermon.dump.files.records import BACKWARD, PARAMETERS_GRAD


class ValueUse(IntEnum):
    """What an entry does with a tensor: it takes it, gives it, or holds it as a parameter."""

    TAKEN = 0
    GIVEN = 1
    HELD = 2


class GraphValue(NamedTuple):
    """A tensor of an entry, as far as the graph needs it.

    Attributes:
        use: What the entry does with it.
        slot: Its place, `input.0`, `output.1`, `parameters.weight`, as in every tool.
        identity: Equal for one unchanged tensor in several places: its order, or what it looks like (a tuple) in dumps
            that tell no order. None: it looks like others.
        num_bytes: Size of its elements; 0 where the type is not known.
        dtype: Type of its elements as the dump writes it, `torch.float32`; "": not known.
        norm: Root of the sum of squares; NaN: not known.
        is_finite: No element is NaN or infinite, as far as is known.
        is_unread: It may have elements, and the dump has no number of them.
    """

    use: ValueUse
    slot: str
    identity: int | tuple[object, ...] | None
    num_bytes: int
    dtype: str
    norm: float
    is_finite: bool
    is_unread: bool = False


_WIDTHS = {
    "float64": 8,
    "int64": 8,
    "complex64": 8,
    "complex128": 16,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "uint64": 8,
    "uint32": 4,
    "complex32": 4,
    "uint16": 2,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "bool": 1,
}
_MAX_NUMBERED = 16
_NUMBERED = {name: tuple(f"{name}.{index}" for index in range(_MAX_NUMBERED)) for name in ("input", "output")}
_OURS = ("dtype", "shape", "order", "Norm", "nans", "infs", "Max")
_as_ours = itemgetter(*_OURS)
_new = tuple.__new__  # what the constructor of a named tuple comes to, in a third of the time
_USES = {
    "input_args": (ValueUse.TAKEN, "input"),
    "input": (ValueUse.TAKEN, "input"),
    "input_kwargs": (ValueUse.TAKEN, "kwargs"),
    "output": (ValueUse.GIVEN, "output"),
    "output_kwargs": (ValueUse.GIVEN, "kwargs"),
    "parameters": (ValueUse.HELD, "parameters"),
}


def values_of(entry: Mapping[str, Any], direction: str) -> list[GraphValue]:
    """Return the tensors in an entry of dump.json, in its order; gradients of parameters are given."""
    found: list[GraphValue] = []
    if direction == PARAMETERS_GRAD:
        for name, forms in entry.items():
            if isinstance(forms, list):
                _collect(found, ValueUse.GIVEN, name, forms)
        return found
    for name, value in entry.items():
        if value and name in _USES:
            use, slot = _USES[name]
            if direction != BACKWARD or use is not ValueUse.HELD:
                _collect(found, use, slot, value)
    return found


def value_of(use: ValueUse, slot: str, form: Mapping[str, Any]) -> GraphValue:
    """Return the tensor that `form` describes, as an entry of dump.json does."""
    try:
        dtype, shape, order, norm, nans, infs, largest = _as_ours(form)
    except KeyError:
        dtype, shape, order, norm, nans, infs, largest = map(form.get, _OURS)
    identity = order if type(order) is int else _looks(form)
    is_finite = nans == infs == 0 if type(nans) is type(infs) is int else _is_finite(form)
    size = norm if type(norm) is float else _number(norm)
    is_unread = largest is None and form.get("Mean") is None
    try:
        num_bytes = prod(shape) * _width(dtype)
        is_unread = is_unread and 0 not in shape
    except TypeError:  # a shape that is none
        num_bytes = 0
    return _new(GraphValue, (use, slot, identity, num_bytes, dtype, size, is_finite, is_unread))


def _collect(found: list[GraphValue], use: ValueUse, slot: str, value: Any) -> None:
    """Add the tensors within `value`, parsed JSON. A good part of the time to read a dump goes by here.

    So plain arguments, and tensors in lists, cost no call of their own.
    """
    if type(value) is dict:
        if "dtype" in value and type(value["dtype"]) is str and type(value.get("shape")) is list:
            found.append(value_of(use, slot, value))
        elif type(value.get("type")) is not str:
            for name, item in value.items():
                if (type(item) is dict and ("type" not in item or "dtype" in item)) or type(item) is list:
                    _collect(found, use, f"{slot}.{name}", item)
    elif type(value) is list:
        names = _NUMBERED.get(slot) if len(value) <= _MAX_NUMBERED else None
        for index, item in enumerate(value):
            if type(item) is dict or type(item) is list:
                _collect(found, use, names[index] if names else f"{slot}.{index}", item)


def _is_finite(form: Mapping[str, Any]) -> bool:
    return all(math.isfinite(_number(form.get(name), unknown=0.0)) for name in ("Max", "Min", "Mean"))


def _number(value: object, unknown: float = math.nan) -> float:
    """Return a statistic as a number; older dumps of msprobe's write NaN as a text, and None for what has none."""
    try:
        return unknown if value is None else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return unknown


def _looks(form: Mapping[str, Any]) -> tuple[object, ...] | None:
    largest, smallest = form.get("Max"), form.get("Min")
    if form.get("md5"):
        return ("md5", form["md5"])
    if not isinstance(largest, (int, float)) or largest == smallest or math.isnan(largest):
        return None
    return (form["dtype"], *form["shape"], largest, smallest, form.get("Mean"), form.get("Norm"))


@cache
def _width(dtype: str) -> int:
    return _WIDTHS.get(dtype.lower().rpartition(".")[2], 0)
