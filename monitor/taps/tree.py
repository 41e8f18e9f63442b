"""The tensors inside whatever a module takes or returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_of(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) for every tensor in nested tuples, lists, mappings and dataclasses, in their order.

    A lone tensor has the path "". Cost: one isinstance for the usual lone tensor; nothing is copied.
    """
    if isinstance(value, Tensor):
        yield "", value
    else:
        yield from _walk(value, "")


def _walk(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _walk(item, f"{path}.{index}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(item, f"{path}.{key}")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _walk(getattr(value, field.name), f"{path}.{field.name}")
