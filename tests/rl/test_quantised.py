"""Quantised engines: what a quantisation gives passes, at every scheme; what it does not give is named."""

import numpy as np
import pytest
import torch

from trainermon.rl import names
from trainermon.rl.digest import WeightDigest, digest_tensors
from trainermon.rl.holding import hold
from trainermon.rl.quantised import moments_of
from trainermon.rl.weights import check_weights, wholes_of

E4M3, LARGEST = torch.float8_e4m3fn, 448.0


def quantised(weight, scheme):
    """Return a weight in 8 bits and its scale, by row, by blocks of 16 x 16, or one for all, as engines do."""
    if scheme == "int8 by row":
        scale = weight.abs().amax(1, keepdim=True) / 127
        return (weight / scale).round().to(torch.int8), scale
    if scheme == "float8 by block":
        blocks = weight.unflatten(0, (-1, 16)).unflatten(2, (-1, 16))
        scale = blocks.abs().amax((1, 3)) / LARGEST
        spread = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)
        return (weight / spread).to(E4M3), scale
    scale = weight.abs().max() / LARGEST
    return (weight / scale).to(E4M3), scale


SCHEMES = ("int8 by row", "float8 by block", "float8")


def sent_weights():
    torch.manual_seed(0)
    shapes = {"q": (64, 32), "k": (32, 32), "v": (32, 32)}
    weights = {f"layers.0.self_attn.{part}_proj.weight": 0.02 * torch.randn(shape) for part, shape in shapes.items()}
    return weights | {"layers.0.o_proj.weight": 0.02 * torch.randn(32, 64), "norm.weight": torch.ones(32)}


def engine_weights(weights, scheme):
    q, k, v = (weights[f"layers.0.self_attn.{part}_proj.weight"] for part in "qkv")
    held = {"norm.weight": weights["norm.weight"]}
    for name, weight in {
        "layers.0.self_attn.qkv_proj": torch.cat([q, k, v]),
        "layers.0.o_proj": weights["layers.0.o_proj.weight"],
    }.items():
        held[f"{name}.weight"], held[f"{name}.weight_scale"] = quantised(weight, scheme)
    return held


def check(held, *, dtype="float8"):
    sent = digest_tensors(sent_weights(), dtype=dtype)
    wholes = wholes_of([WeightDigest(version=1, tensors=sent)])
    engine = hold(held, version=1, name_map=names.hf_to_vllm, sent=wholes)
    return check_weights(1, wholes, {"engine": wholes_of([engine])}, name_map=names.hf_to_vllm, others={})


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_quantising_gives_is_equal(scheme):
    found = check(engine_weights(sent_weights(), scheme))

    assert found.is_equal
    assert (found.equal, found.uncompared, found.unexpected) == (5, (), ())


@pytest.mark.parametrize("rounded", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("knows_sent", [True, False])
def test_what_such_an_engine_does_not_quantise_is_compared_in_its_own_type(rounded, knows_sent):
    torch.manual_seed(1)
    norms = {f"norm.{number}": 1 + 0.1 * torch.randn(64, dtype=torch.float64) for number in range(3)}
    held = {name: norm.to(rounded) for name, norm in norms.items()} | {"other_scale": torch.ones(())}
    held["norm.1"] = held["norm.1"] * 1.1
    held["norm.2"] = torch.zeros_like(held["norm.2"])
    wholes = wholes_of([WeightDigest(version=1, tensors=digest_tensors(norms, dtype="float8"))])

    engine = hold(held, version=1, sent=wholes if knows_sent else None)
    found = check_weights(1, wholes, {"engine": wholes_of([engine])}, name_map=names.same, others={})

    assert ([each.name for each in found.differing], found.equal, found.uncompared) == (["norm.1", "norm.2"], 1, ())


def test_one_element_that_such_an_engine_does_not_quantise_is_seen_in_the_same_type():
    held = engine_weights(sent_weights(), "float8")
    held["norm.weight"] = torch.cat([torch.full((1,), 1 + 1e-7), torch.ones(31)])

    assert [each.name for each in check(held).differing] == ["norm.weight"]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("fault", ["never loaded", "another layer", "scale forgotten", "scale of another"])
def test_what_it_does_not_give_is_named(fault, scheme):
    held = engine_weights(sent_weights(), scheme)
    name = "layers.0.o_proj.weight"
    torch.manual_seed(7)
    if fault == "never loaded":
        held[name] = torch.zeros_like(held[name])
    elif fault == "another layer":
        held[name], held[f"{name}_scale"] = quantised(0.02 * torch.randn(32, 64) + 0.002, scheme)
    elif fault == "scale forgotten":
        held[f"{name}_scale"] = torch.ones_like(held[f"{name}_scale"])
    else:
        held[f"{name}_scale"] = held[f"{name}_scale"] * 1.1

    found = check(held)

    assert [each.name for each in found.differing] == [name]
    assert found.differing[0].found == "other numbers than a quantisation gives, or another scale"


def test_without_moments_nothing_is_said_of_quantised_weights():
    found = check(engine_weights(sent_weights(), "float8"), dtype="")

    assert found.is_equal
    assert found.equal == 1
    assert len(found.uncompared) == 4
    assert found.advice.endswith('rl.Watch(dtype="float8")')


@pytest.mark.parametrize("scheme", SCHEMES)
def test_moments_are_those_of_float64(scheme):
    weight = sent_weights()["layers.0.o_proj.weight"]
    held, scale = quantised(weight, scheme)
    spread = scale.repeat_interleave(16, 0).repeat_interleave(16, 1) if "block" in scheme else scale
    plain = held.double().numpy() * spread.double().numpy()

    found = moments_of(held, scale)

    assert found.total == pytest.approx(plain.sum())
    assert found.squares == pytest.approx(np.square(plain).sum())
    assert np.square(plain - weight.double().numpy()).sum() <= 1.5 * found.variance + 1e-12


def test_a_scale_that_does_not_fit_gives_no_moments():
    assert moments_of(torch.ones(4, 6).to(E4M3), torch.ones(5)) is None
