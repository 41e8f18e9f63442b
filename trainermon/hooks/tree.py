"""The tensors inside whatever a module takes or returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

MAX_DEPTH = 32


def tensors_of(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) for every tensor in nested tuples, lists, mappings and dataclasses, in their order.

    A path is such as `0.mask`; a lone tensor has "". What contains itself is entered once, a field that is not set is
    passed over, and nothing deeper than 32 is looked at. Cost: one isinstance for the usual lone tensor; nothing is
    copied.
    """
    if isinstance(value, Tensor):
        yield "", value
    else:
        yield from _walk(value, "", ())


def _walk(value: Any, path: str, outer: tuple[Any, ...]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
        return
    inside = _inside(value)
    # no set of ids: torch.compile, which may trace this, would guard on each
    if inside is None or len(outer) >= MAX_DEPTH or any(value is other for other in outer):
        return
    for name, item in inside:
        yield from _walk(item, f"{path}.{name}", (*outer, value))


def _inside(value: Any) -> Iterator[tuple[Any, Any]] | None:
    """Return the items of a container with their names, None for anything else."""
    if isinstance(value, tuple | list):
        return enumerate(value)
    if isinstance(value, Mapping):
        return iter(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return ((name, getattr(value, name)) for name in names if hasattr(value, name))
    return None
