"""What a dump says beyond its tensors: generators, strides, what an assignment wrote."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn import functional

from tests.recorded_dumps import recorded
from trainermon.accuracy.judge import Status
from trainermon.analysis.check.checking import check_dump
from trainermon.dump.files.reader import load_raw, read_dump
from trainermon.replay.drawn_calls import drawn_again
from trainermon.replay.dumped_calls import rebuild

DRAWN = ["Functional.dropout.0.forward", "Torch.bernoulli.0.forward", "Torch.randperm.0.forward",
         "Functional.scaled_dot_product_attention.0.forward", "Tensor.normal_.0.forward"]  # fmt: skip


def step():
    torch.manual_seed(5)
    x = torch.ones(6, 5)
    functional.dropout(x, 0.5)
    functional.dropout(x, 0.5, training=False)
    torch.bernoulli(x * 0.5, generator=torch.Generator().manual_seed(3))
    torch.randperm(7)
    wide = torch.randn(1, 1, 4, 4)
    functional.scaled_dot_product_attention(wide, wide, wide, dropout_p=0.5)
    functional.scaled_dot_product_attention(wide, wide, wide)
    torch.empty(3).normal_()
    torch.exp(x.t())
    torch.exp(x[:, ::2])
    torch.exp(x[:1].expand(4, 5))
    x[2:4, ::2] = wide[0, 0, :2, :3]
    torch.zeros(2, 3).as_strided_((3,), (2,))
    torch.zeros(2, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("facts"), step, risk_level="ALL")


def rebuilt(dump, key):
    [entry] = [one for one in read_dump(dump).entries if one.key == key]
    return rebuild(dump, load_raw(dump).data, entry)


@pytest.mark.parametrize("key", DRAWN)
def test_a_call_draws_the_same_numbers_again_bit_for_bit(dump, key):
    torch.manual_seed(99)
    before = torch.get_rng_state()

    called = rebuilt(dump, key)

    assert torch.equal(drawn_again(called), called.result[0])
    assert torch.equal(torch.get_rng_state(), before)


def test_calls_that_draw_nothing_have_no_generator(dump):
    named = {key: value["trainermon"].get("generator") for key, value in load_raw(dump).data.items()}

    assert {key for key, generator in named.items() if generator} == {*DRAWN, "Torch.randn.0.forward"}
    assert named["Torch.randperm.0.forward"]["device"] == "cpu"


def test_calls_that_could_not_be_judged_by_a_distribution_are_judged_by_their_bits(dump):
    found = {call.key: call for call in check_dump(dump).calls}

    assert {found[key].status for key in DRAWN} == {Status.PASS}
    data = load_raw(dump).data
    path = dump / "dump_tensor_data" / data["Torch.randperm.0.forward"]["output"][0]["data_name"]
    whole = path.read_bytes()
    torch.save(torch.arange(7), path)
    try:
        again = {call.key: call for call in check_dump(dump).calls}
    finally:
        path.write_bytes(whole)
    assert again["Torch.randperm.0.forward"].reason == "random"


@pytest.mark.parametrize(
    ("key", "stride"),
    [("Torch.exp.0.forward", (1, 5)), ("Torch.exp.1.forward", (5, 2)), ("Torch.exp.2.forward", (5, 1))],
)
def test_an_input_lies_in_memory_as_it_did(dump, key, stride):
    """One whose elements share memory cannot be written to, and lies in order."""
    [tensor] = rebuilt(dump, key).call.tensors

    assert tensor.stride() == stride
    assert torch.equal(tensor, torch.ones(tensor.shape))


@pytest.mark.parametrize("stride", [[1, 1], [2, 1], [-5, 1], ["5", 1], [10**12, 1], [5], "5,1"])
def test_strides_that_cannot_be_are_passed_over(dump, stride):
    [entry] = [one for one in read_dump(dump).entries if one.key == "Torch.exp.0.forward"]
    value = json.loads(json.dumps(load_raw(dump).data[entry.key]))
    value["input_args"][0]["stride"] = stride

    [tensor] = rebuild(dump, {entry.key: value}, entry).call.tensors

    assert tensor.is_contiguous()


def test_an_assignment_has_what_it_wrote(dump):
    called = rebuilt(dump, "Tensor.__setitem__.0.forward")
    target, index, value = called.call.args
    expected = target.clone()
    expected[2:4, ::2] = value

    [result] = called.result

    assert index == (slice(2, 4), slice(None, None, 2))
    assert torch.equal(result, expected)
    assert torch.equal(called.call.function(target, index, value), expected)
    assert not torch.equal(expected, torch.ones(6, 5))


def test_what_holds_no_tensor_is_no_call(dump):
    assert not [key for key in load_raw(dump).data if key.startswith("Torch.device")]


def test_a_view_is_made_in_place_again(dump):
    called = rebuilt(dump, "Tensor.as_strided_.0.forward")

    assert called.call.function(*called.call.args).shape == (3,)
