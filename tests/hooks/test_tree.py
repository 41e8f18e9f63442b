"""Which tensors are found in what modules take and return."""

import collections
import dataclasses
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainermon.hooks.tree import MAX_DEPTH, tensors_of

Pair = collections.namedtuple("Pair", "a b")
TENSOR = torch.ones(1)


@dataclasses.dataclass
class Output:
    loss: object
    cache: object = dataclasses.field(init=False)


def paths(value):
    return [path for path, _ in tensors_of(value)]


def test_paths_name_positions_keys_and_fields_in_their_order():
    value = {"x": TENSOR, "pair": Pair(TENSOR, [3, TENSOR]), "output": Output(TENSOR), "none": None}

    assert paths(value) == [".x", ".pair.0", ".pair.1.1", ".output.loss"]
    assert paths(TENSOR) == [""]
    assert paths(Output) == []


def test_a_field_that_is_not_set_is_passed_over():
    assert paths(Output((TENSOR,))) == [".loss.0"]


def test_what_contains_itself_is_entered_once():
    items: list[Any] = [TENSOR]
    mapping: dict[str, Any] = {"x": TENSOR}
    output = Output(TENSOR)
    items.append(items)
    mapping["self"] = (mapping, TENSOR)
    output.cache = [output]

    assert paths(items) == [".0"]
    assert paths(mapping) == [".x", ".self.1"]
    assert paths(output) == [".loss"]


def test_one_container_in_two_places_is_found_in_both():
    shared = [TENSOR]

    assert paths([shared, shared]) == [".0.0", ".1.0"]


def test_depth_is_limited():
    value: Any = TENSOR
    for _ in range(MAX_DEPTH):
        value = [value]

    assert len(paths(value)) == 1
    assert paths([value]) == []
    for _ in range(10_000):
        value = [value]
    assert paths(value) == []


@given(st.recursive(st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text("ab"), inner)))
def test_every_leaf_is_found_once(nested):
    count = 0

    def with_tensors(value):
        nonlocal count
        if isinstance(value, list):
            return [with_tensors(item) for item in value]
        if isinstance(value, dict):
            return {key: with_tensors(item) for key, item in value.items()}
        count += value is not None
        return None if value is None else TENSOR

    assert len(list(tensors_of(with_tensors(nested)))) == count
