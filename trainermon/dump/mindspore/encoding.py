"""What a cell takes and returns, in the form that msprobe's dump.json gives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Any

from mindspore import Tensor
from mindspore._c_expression import typing
from mindspore.nn import Cell

from trainermon.core.environment.secrets import clean_argument
from trainermon.dump.forms import (
    MAX_DEPTH,
    MAX_ITEMS,
    TensorForm,
    TensorLeaf,
    form_head,
    named_items,
    object_form,
    ordered_items,
    unseen,
)

_TENSOR = "mindspore.Tensor"
_SCALARS: list[tuple[Any, Callable[[Any], dict[str, Any]]]] = [
    (bool | int | float, lambda scalar: {"type": type(scalar).__name__, "value": scalar}),
    (slice, lambda part: {"type": "slice", "value": [part.start, part.stop, part.step]}),
    (EllipsisType, lambda _: {"type": "ellipsis", "value": "..."}),
    (typing.Type, lambda dtype: {"type": "mindspore.dtype", "value": str(dtype)}),
]


def encode(
    value: Any, slot: str, leaves: list[TensorLeaf], depth: int = MAX_DEPTH, entered: set[int] | None = None
) -> Any:
    """Return what stands for `value` in dump.json, and append every tensor inside to `leaves`.

    As `dump.encode.encode` does for torch: a tensor becomes a `TensorForm` without statistics, a scalar a dict of its
    type and value; a container stays one, cut after 1 024 items; of an object of another class that a cell
    returns the attributes that hold tensors are told, of a cell nothing. What is deeper than 16 levels is `unseen`.
    """
    if isinstance(value, Tensor):
        form = tensor_form(value)
        leaves.append(TensorLeaf(slot, value, form))
        return form
    if value is None:
        return None
    if isinstance(value, str):
        return {"type": type(value).__name__, "value": clean_argument(slot, value)}
    for kind, encoder in _SCALARS:
        if isinstance(value, kind):
            return encoder(value)
    if depth == 0:
        return unseen(value)
    return _encode_container(value, slot, leaves, depth - 1, set() if entered is None else entered)


def _encode_container(value: Any, slot: str, leaves: list[TensorLeaf], depth: int, entered: set[int]) -> Any:
    def inner(name: object, item: Any) -> Any:
        return encode(item, f"{slot}.{name}", leaves, depth, entered)

    items = named_items(value)
    if items is not None:
        return {str(name): inner(name, item) for name, item in items[:MAX_ITEMS]}
    parts = ordered_items(value)
    if parts is not None:
        return [inner(number, item) for number, item in enumerate(parts)]
    return None if isinstance(value, Cell) else object_form(value, slot, entered, inner)


def taken(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], list[TensorLeaf]]:
    """Return the form of a call's arguments as a mapping, and the tensors in it."""
    leaves: list[TensorLeaf] = []
    value = {
        "input_args": [encode(item, f"input.{number}", leaves) for number, item in enumerate(args)],
        "input_kwargs": {name: encode(item, f"kwargs.{name}", leaves) for name, item in kwargs.items()},
    }
    return value, leaves


def encode_output(output: Any, leaves: list[TensorLeaf]) -> Any:
    """Return what stands for a cell's return value, as a list: the items of a tuple, or the value alone."""
    if isinstance(output, tuple) and not hasattr(output, "_fields"):
        return encode(output, "output", leaves)
    return [encode(output, "output.0", leaves)]


def tensor_form(tensor: Tensor) -> TensorForm:
    """Return the form of a tensor, with type, dtype and shape but without statistics; the device is not asked."""
    return TensorForm(form_head(_TENSOR, str(tensor.dtype), tuple(tensor.shape), is_followed(tensor)))


def is_followed(tensor: Tensor) -> bool:
    """Return whether gradients of a tensor are computed; a version of MindSpore that does not tell says yes."""
    return bool(getattr(tensor, "_requires_grad", True))
