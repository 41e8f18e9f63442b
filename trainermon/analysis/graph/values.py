"""Which tensors of a dump are one value: the same unchanged tensor, wherever a call takes or returns it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from enum import IntEnum
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
        norm: Root of the sum of squares; NaN: not known.
        is_finite: No element is NaN or infinite.
    """

    use: ValueUse
    slot: str
    identity: int | tuple[object, ...] | None
    num_bytes: int
    norm: float
    is_finite: bool


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
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
_USES = (
    (ValueUse.TAKEN, "input_args", "input"),
    (ValueUse.TAKEN, "input", "input"),
    (ValueUse.TAKEN, "input_kwargs", "kwargs"),
    (ValueUse.GIVEN, "output", "output"),
    (ValueUse.GIVEN, "output_kwargs", "kwargs"),
    (ValueUse.HELD, "parameters", "parameters"),
)


def values_of(entry: Mapping[str, Any], direction: str) -> list[GraphValue]:
    """Return the tensors in an entry of dump.json, in its order; gradients of parameters are given."""
    if direction == PARAMETERS_GRAD:
        forms = {name: form for name, form in entry.items() if isinstance(form, list)}
        return [_value(ValueUse.GIVEN, name, form) for name, form in _tensors(forms, "")]
    return [
        _value(use, slot, form)
        for use, name, prefix in _USES
        if name in entry
        for slot, form in _tensors(entry[name], prefix)
        if direction != BACKWARD or use is not ValueUse.HELD
    ]


def _tensors(value: Any, slot: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, (dict, list)):
                yield from _tensors(item, f"{slot}.{index}")
    elif isinstance(value, dict):
        if isinstance(value.get("dtype"), str) and isinstance(value.get("shape"), list):
            yield slot, value
        elif not isinstance(value.get("type"), str):
            for name, item in value.items():
                if isinstance(item, (dict, list)):
                    yield from _tensors(item, f"{slot}.{name}" if slot else name)


def _value(use: ValueUse, slot: str, form: Mapping[str, Any]) -> GraphValue:
    norm = form.get("Norm")
    nans, infs = form.get("nans"), form.get("infs")
    if nans is None or infs is None:
        numbers = (_number(form.get(name)) for name in ("Max", "Min", "Mean"))
        is_finite = all(number is None or math.isfinite(number) for number in numbers)
    else:
        is_finite = nans == 0 and infs == 0
    known = _number(norm)
    return GraphValue(use, slot, _identity(form), _bytes(form), math.nan if known is None else known, is_finite)


def _number(value: object) -> float | None:
    """Return a statistic as a number; older dumps of msprobe's write NaN as a text, and None for what has none."""
    try:
        return None if value is None else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _identity(form: Mapping[str, Any]) -> int | tuple[object, ...] | None:
    order = form.get("order")
    if isinstance(order, int):
        return order
    largest, smallest = form.get("Max"), form.get("Min")
    if form.get("md5"):
        return ("md5", form["md5"])
    if not isinstance(largest, (int, float)) or largest == smallest or math.isnan(largest):
        return None
    return (form["dtype"], *form["shape"], largest, smallest, form.get("Mean"), form.get("Norm"))


def _bytes(form: Mapping[str, Any]) -> int:
    width = _WIDTHS.get(str(form["dtype"]).lower().rpartition(".")[2], 0)
    try:
        return int(math.prod(form["shape"])) * width
    except TypeError:
        return 0
