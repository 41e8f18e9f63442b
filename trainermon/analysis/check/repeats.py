"""Which calls of a dump repeat an earlier one: the same operation of arguments of the same types and shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# What a dump says of a tensor that is not about its numbers, or which one it is.
_OF_KIND = ("type", "dtype", "shape", "requires_grad")
_KEPT_ELSEWHERE = frozenset(["md5", "data_name", "tensor_stat_index", "trainermon"])


def repeated_calls(data: Mapping[str, Any]) -> set[str]:
    """Return the names of the calls (`Functional.linear.3`) in the `data` of a dump that repeat an earlier one.

    An argument that is no tensor must have the same value.
    """
    seen: set[str] = set()
    repeated = set()
    for key, entry in data.items():
        call, _, direction = key.rpartition(".")
        if direction == "forward" and isinstance(entry, dict):
            given = _without_numbers([entry.get("input_args"), entry.get("input_kwargs")])
            signature = json.dumps([call.rpartition(".")[0], given], sort_keys=True, default=str)
            if signature in seen:
                repeated.add(call)
            seen.add(signature)
    return repeated


def _without_numbers(value: Any) -> Any:
    match value:
        case {"dtype": _, "shape": _}:
            return {name: value.get(name) for name in _OF_KIND}
        case dict():
            return {name: _without_numbers(item) for name, item in value.items() if name not in _KEPT_ELSEWHERE}
        case list():
            return [_without_numbers(item) for item in value]
        case _:
            return value
