"""The encodings of msprobe 26.2, as observed on its own dumps (`Mean` and `Norm` of more dtypes are ours)."""

import collections
import dataclasses
import enum
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from tests.core.environment.secret_kinds import NAMES, WORDS
from tests.strategies import fixed
from trainermon.dump.encode import encode, encode_output, tensor_form
from trainermon.dump.files.records import UNSEEN
from trainermon.dump.forms import MAX_ITEMS, LaterText, TensorReading, json_text
from trainermon.dump.statistics import TensorMemory, TensorStatistics
from trainermon.statistics.kernel import kernel_name, write, write_single

Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    size: int


def slots(value, encoder=lambda value, leaves: encode(value, "input.0", leaves)):
    leaves = []
    encoder(value, leaves)
    return [leaf.slot for leaf in leaves]


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (2.0, {"type": "float", "value": 2.0}),
        (3, {"type": "int", "value": 3}),
        (True, {"type": "bool", "value": True}),
        ("mean", {"type": "str", "value": "mean"}),
        (slice(1, 2), {"type": "slice", "value": [1, 2, None]}),
        (..., {"type": "ellipsis", "value": "..."}),
        (None, None),
        (2 + 1j, {"type": "complex", "value": [2.0, 1.0]}),
        (b"x", None),
        (range(3), None),
        (object(), None),
        (torch.Size([2, 3]), {"type": "torch.Size", "value": [2, 3]}),
        (torch.float32, {"type": "torch.dtype", "value": "torch.float32"}),
        (torch.device("cpu"), {"type": "torch.device", "value": "cpu"}),
        (torch.contiguous_format, {"type": "torch.memory_format", "format": "contiguous_format"}),
        ([1, (2.0, None)], [{"type": "int", "value": 1}, [{"type": "float", "value": 2.0}, None]]),
        ({"k": {"n": 1}}, {"k": {"n": {"type": "int", "value": 1}}}),
    ],
)
def test_value_has_msprobes_form(value, form):
    assert encode(value, "input.0", []) == form


@fixed
@given(name=NAMES, word=WORDS)
def test_a_text_is_a_secret_by_every_name_on_the_way_to_it(name, word):
    taken = {name: {"of": [word, (word,)], "other": "mean"}, "header": [f"{name}: {word}"]}

    assert word not in str(encode(taken, "input.0", []))
    assert "'value': 'mean'" in str(encode({"mode": {"of": ["mean"]}}, "input.0", []))


def test_tensors_in_any_structure_are_found_with_their_place():
    tensor = torch.ones(2)

    assert slots([tensor, (tensor, {"mask": tensor})]) == ["input.0.0", "input.0.1.0", "input.0.1.1.mask"]
    assert slots(Pair(tensor, [tensor])) == ["input.0.a", "input.0.b.0"]
    assert slots(Output(tensor, 3)) == ["input.0.logits"]


@pytest.mark.parametrize(
    ("output", "places"),
    [
        (torch.ones(1), ["output.0"]),
        ((torch.ones(1), torch.ones(1)), ["output.0", "output.1"]),
        ([torch.ones(1), torch.ones(1)], ["output.0.0", "output.0.1"]),
        ({"u": torch.ones(1)}, ["output.0.u"]),
        (Pair(torch.ones(1), {"k": [torch.ones(1)]}), ["output.a", "output.b.k.0"]),
        (Output(torch.ones(1), 3), ["output.0.logits"]),
    ],
)
def test_output_places_are_msprobes(output, places):
    assert slots(output, encode_output) == places


def test_what_is_endless_is_cut():
    endless = []
    endless.append(endless)

    assert len(encode(list(range(5000)), "input.0", [])) == MAX_ITEMS
    assert str(encode(endless, "input.0", [])).count("[") <= 16


def filled(tensor):
    leaves = []
    encode(tensor, "input.0", leaves)
    form = leaves[0].form
    form.reading = TensorReading(order=1)
    statistics = TensorStatistics()
    statistics.fill([(tensor, form.reading)])
    statistics.resolve()
    return json.loads(json_text(form))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64]
)
def test_four_numbers_for_every_dtype(dtype):
    values = np.array([3, -4, 0, 12], dtype=np.float64)

    form = filled(torch.tensor(values).to(dtype))

    assert (form["Max"], form["Min"], form["Mean"], form["Norm"]) == (12, -4, 2.75, 13)
    assert (form["nans"], form["infs"], form["zeros"]) == (0, 0, 1)
    assert isinstance(form["Max"], int) == ("int" in str(dtype))


def test_one_nan_does_not_hide_the_rest():
    form = filled(torch.tensor([3.0, math.nan, -4.0, math.inf, -math.inf]))

    assert (form["Max"], form["Min"], form["Mean"], form["Norm"]) == (3, -4, -0.5, 5)
    assert (form["nans"], form["infs"], form["zeros"]) == (1, 2, 0)


@pytest.mark.parametrize(
    ("tensor", "numbers"),
    [
        (torch.zeros(0), (None, None, None, None)),
        (torch.ones(3, device="meta"), (None, None, None, None)),
        (torch.full((2,), math.nan), (None, None, None, None)),
        (torch.tensor(-2.5), (-2.5, -2.5, -2.5, 2.5)),
        (torch.tensor(3), (3, 3, 3, 3)),
        (torch.tensor([True, False]), (True, False, None, None)),
        (torch.tensor([3 + 4j, 0]), (5.0, 0.0, 2.5, 5.0)),
    ],
)
def test_odd_tensors(tensor, numbers):
    form = filled(tensor)

    assert tuple(form[name] for name in ("Max", "Min", "Mean", "Norm")) == numbers
    assert form["shape"] == list(tensor.shape)
    assert form["dtype"] == str(tensor.dtype)


def test_dtensor_form_has_mesh_and_placements(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1))
        form = filled(distribute_tensor(torch.tensor([3.0, 4.0]), mesh, [Shard(0), Replicate()]))
        group = encode(dist.group.WORLD, "input.0", [])
    finally:
        dist.destroy_process_group()

    assert form["type"] == "torch.distributed.tensor.DTensor"
    assert form["device_mesh"] == [[0]]
    assert form["placements"] == [{"Shard": {"dim": 0}}, {"Replicate": {}}]
    assert form["local_shape"] == [2]
    assert form["Norm"] == 5
    assert group == {"type": "torch.ProcessGroup", "group_ranks": [0], "group_id": "553403f9"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int16, torch.uint8, torch.bool])
@pytest.mark.parametrize(
    "view",
    [torch.clone, torch.t, lambda tensor: tensor[:, 1:], lambda tensor: tensor[::2].t(), lambda tensor: tensor[0, 0]],
    ids=["dense", "turned", "columns", "turned rows", "one"],
)
@pytest.mark.parametrize("count", [2, 31, 7001])
def test_the_row_of_a_single_tensor_is_that_of_the_general_way(dtype, count, view):
    tensor = view((torch.randn(count, 10) * 3).to(dtype))
    rows = torch.full((2, 8), 7.0, dtype=torch.float64)
    write([tensor.view(torch.uint8) if dtype is torch.bool else tensor], rows, 0)

    is_written = write_single(tensor, rows[1].data_ptr())

    assert is_written == (kernel_name() == "c")
    assert torch.equal(rows[1], rows[0] if is_written else torch.full((8,), 7.0, dtype=torch.float64))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(4).expand(3, 4),
        torch.ones(3, 4, 5, 6)[:, 1:, 1:, 1:],
        torch.complex(torch.ones(1), torch.ones(1)).conj().imag,
        torch.ones(0),
        torch.ones(2, device="meta"),
        torch.ones(2, dtype=torch.complex64),
        torch.eye(2).to_sparse(),
        torch.ones(2).as_subclass(type("Own", (torch.Tensor,), {})),
    ],
    ids=["expanded", "cut", "negated", "empty", "meta", "complex", "sparse", "subclass"],
)
def test_what_does_not_lie_in_runs_is_left_to_the_general_way(tensor):
    row = torch.full((8,), 7.0, dtype=torch.float64)

    assert not write_single(tensor, row.data_ptr())
    assert torch.equal(row, torch.full((8,), 7.0, dtype=torch.float64))


def test_memory_knows_only_the_unchanged_object():
    memory = TensorMemory()
    tensor = torch.ones(2)
    memory.remember(tensor, "note")

    assert memory.recall(tensor) == "note"
    assert memory.recall(torch.ones(2)) is None
    assert memory.recall(tensor.detach()) is None
    tensor.add_(1)
    assert memory.recall(tensor) is None


def test_inference_tensors_are_taken_as_they_come():
    with torch.inference_mode():
        assert filled(torch.ones(2))["Norm"] == pytest.approx(math.sqrt(2))
    assert json.loads(tensor_form(torch.ones(2, requires_grad=True)).text())["requires_grad"] is True


class _Name(str):
    __slots__ = ()


class _Count(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, 1, -(10**30), 0.0, -0.0, 1.5, 1e300, math.nan, -math.inf),
        *("", 'é"\\\n\x00\u2028', "\ud800", _Name("h.3"), _Count.ONE),
        {"input": [1, True, {"a": None, "b": "c"}], "": []},
    ],
)
def test_the_text_of_an_entry_is_that_of_the_standard_library(value):
    assert json_text(value) == json.dumps(value)


def test_what_stands_in_several_entries_is_the_same_text_in_each():
    value = {"p": 0.5, "bounds": [-math.inf, 1], "inplace": False}

    shared = LaterText(value)

    assert json_text({"first": shared, "second": [shared]}) == json.dumps({"first": value, "second": [value]})


class Slotted:
    __slots__ = ("__hidden", "size", "unset")

    def __init__(self, hidden):
        self.__hidden, self.size = hidden, 3


class Keeping:
    def __init__(self, **kept):
        vars(self).update(kept)


def returned(value):
    return slots(value, lambda value, leaves: encode(value, "output.0", leaves))


def test_what_an_object_of_any_class_keeps_is_told_where_it_holds_tensors():
    tensor = torch.ones(2)
    layer = Keeping(keys=tensor, size=3, config=Keeping(name="small"))
    cache = Keeping(layers=[layer, layer], empty=[], module=torch.nn.Linear(2, 2), owner=layer)
    vars(layer).update(owner=cache)

    assert returned(Slotted(tensor)) == ["output.0._Slotted__hidden"]
    assert returned(cache) == ["output.0.layers.0.keys"]
    assert returned({"cache": [Keeping(state=(tensor, None))]}) == ["output.0.cache.0.state.0"]
    assert returned(collections.deque([tensor])) == ["output.0.0"]
    assert returned({0: tensor}.values()) == ["output.0.0"]
    assert slots(cache) == []  # a cache that each layer is given would be told as often as there are layers
    for none in (Keeping(size=3), Keeping, Keeping(module=torch.nn.Linear(2, 2)), torch, lambda: tensor):
        assert encode(none, "output.0", []) is None


def test_what_cannot_be_looked_at_is_told():
    tensor = torch.ones(2)
    deep: Any = tensor
    for _ in range(20):
        deep = [deep]
    many = Keeping(objects=[Keeping(tensor=tensor) for _ in range(MAX_ITEMS)])

    for value, kind in (({tensor}, "set"), (iter([tensor]), "list_iterator")):
        assert encode(Keeping(inside=value), "output.0", []) == {"inside": {"type": kind, "value": UNSEEN}}
    assert json.dumps(encode(deep, "output.0", [])).strip("[]") == json.dumps({"type": "list", "value": UNSEEN})
    assert encode(many, "output.0", [])["objects"][-1] == {"type": "Keeping", "value": UNSEEN}
