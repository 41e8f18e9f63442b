"""Each formula against its definition, written out once more in float64."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, scaled_dot_product_attention

from trainermon.monitor.taps import pieces
from trainermon.monitor.taps.features import formulas
from trainermon.monitor.taps.features.formulas import AttentionInputs, SpectralNorm


def by_definition(call: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Entropy, largest probability and largest logit of every row, by loops over heads and queries in float64."""
    batch, heads, queries, _ = call.query.shape
    keys, share = call.key.shape[2], heads // call.key.shape[1]
    found = torch.full((3, batch, heads, queries), math.nan, dtype=torch.float64)
    mask = None if call.mask is None else call.mask.expand(batch, heads, queries, keys)
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                seen = []
                for j in range(keys):
                    out = (call.last is not None and j - i > call.last) or (
                        call.first is not None and j - i < call.first
                    )
                    bias = 0.0
                    if mask is not None and mask.dtype is torch.bool:
                        out = out or not mask[b, h, i, j]
                    elif mask is not None:
                        bias = float(mask[b, h, i, j])
                    if not out:
                        product = call.query[b, h, i].double() @ call.key[b, h // share, j].double()
                        seen.append(float(product) * call.scale + bias)
                logits = torch.tensor(seen, dtype=torch.float64)
                if seen:
                    p = logits.exp() / logits.exp().sum()
                    found[:, b, h, i] = torch.stack([-(p * p.log()).sum(), p.max(), logits.max()])
    return tuple(found)


def tensors(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


CALLS: dict[str, Any] = {
    "plain": {},
    "causal": {"last": 0},
    "window": {"first": -2, "last": 0},
    "mask": {"mask": torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(1)) > 0.4},
    "bias": {"mask": torch.randn(7, 7, generator=torch.Generator().manual_seed(2))},
    "keys": {"mask": torch.tensor([True] * 5 + [False] * 2)[None, None, None], "last": 0},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_rows_of_attention_are_those_of_the_definition(name, groups):
    query, key = tensors((2, 4, 7, 8), (2, groups, 7, 8))
    call = AttentionInputs(query=query, key=key, scale=0.5, **CALLS[name])

    for found, expected in zip(formulas.attention_rows(call), by_definition(call), strict=True):
        has_keys = ~expected.isnan()
        assert torch.allclose(found.double()[has_keys], expected[has_keys], atol=2e-6)
        assert not found[~has_keys].isfinite().any()


def test_grouped_heads_are_those_of_torch():
    query, key, value = tensors((1, 4, 5, 8), (1, 2, 5, 8), (1, 2, 5, 5))
    value[:] = torch.eye(5)  # then what attention returns are its probabilities
    probabilities = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    found = formulas.attention_rows(AttentionInputs(query=query, key=key, scale=8**-0.5, last=0))

    assert torch.allclose(found[1], probabilities.amax(-1), atol=1e-6)


@pytest.mark.parametrize(("budget", "shape"), [(10**6, (2, 4, 32)), (2 * 4 * 32 * 8, (2, 4, 8)), (4 * 32, (1, 4, 1))])
def test_a_bounded_look_takes_all_heads_of_rows_that_are_evenly_spread(budget, shape):
    query, key = tensors((2, 4, 32, 8), (2, 4, 32, 8))
    call = AttentionInputs(query=query, key=key, scale=0.3, last=0)

    found = formulas.attention_rows(call, budget)
    whole = formulas.attention_rows(call)

    rows = {32: range(32), 8: range(2, 32, 4), 1: [16]}[shape[2]]
    entries = range(2) if shape[0] == 2 else [1]
    for part, full in zip(found, whole, strict=True):
        assert part.shape == shape
        assert torch.allclose(part, full[list(entries)][:, :, list(rows)], atol=1e-6)


def test_attention_in_bfloat16_is_computed_in_float32():
    query, key = tensors((1, 2, 16, 64), (1, 2, 16, 64))
    call = AttentionInputs(query=query.bfloat16(), key=key.bfloat16(), scale=0.125)

    found = formulas.attention_rows(call)

    assert found[0].dtype is torch.float32
    assert torch.allclose(found[0].double(), by_definition(call)[0], atol=1e-5)


@pytest.mark.parametrize("shape", [(64, 48), (48, 64), (200, 10), (1, 5), (5, 1)])
def test_a_carried_vector_finds_the_spectral_norm_of_a_matrix_that_stands_still(shape):
    (weight,) = tensors(shape)
    expected = torch.linalg.svdvals(weight.double())[0].item()
    norm = SpectralNorm()

    looks = [norm.of(weight).item() for _ in range(40)]

    assert looks[0] == pytest.approx(expected, rel=0.1)
    assert looks[-1] == pytest.approx(expected, rel=2e-3)
    assert max(looks) <= expected * (1 + 1e-6)
    assert all(b >= a * (1 - 1e-6) for a, b in itertools.pairwise(looks))


def test_a_carried_vector_follows_a_matrix_that_moves():
    weight, drift = tensors((64, 48), (64, 48))
    norm = SpectralNorm()

    for _ in range(60):
        weight += 0.01 * drift
        found = norm.of(weight).item()

    assert found == pytest.approx(torch.linalg.svdvals(weight.double())[0].item(), rel=5e-3)


def test_one_look_at_weights_that_are_not_finite_does_not_spoil_the_next():
    (weight,) = tensors((16, 12))
    norm = SpectralNorm()
    for _ in range(20):
        expected = norm.of(weight)
    spoilt = weight.clone()
    spoilt[3, 4] = math.nan

    assert norm.of(spoilt).isnan()
    assert norm.of(torch.zeros(16, 12)) == 0
    assert norm.of(weight) == pytest.approx(expected.item(), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_spectral_norm_in_pieces_is_that_of_the_whole(dtype, monkeypatch):
    weight = tensors((30, 12))[0].to(dtype)
    monkeypatch.setattr(pieces, "CPU_PIECE", 50)
    norm = SpectralNorm()

    found = [norm.of(weight) for _ in range(60)][-1]

    assert found.dtype is torch.promote_types(dtype, torch.float32)
    assert found.item() == pytest.approx(torch.linalg.svdvals(weight.double())[0].item(), rel=1e-3)


def test_the_global_random_state_is_not_touched():
    before = torch.get_rng_state()
    SpectralNorm().of(torch.randn(4, 5, generator=torch.Generator().manual_seed(0)))

    assert torch.equal(torch.get_rng_state(), before)


def test_similarities_are_the_cosines_off_the_diagonal():
    (weight,) = tensors((5, 8))
    weight[4] = 0
    expected = [float(cosine_similarity(weight[i], weight[j], dim=0)) for i in range(5) for j in range(5) if i != j]

    found = formulas.similarities(weight)

    assert found.flatten().tolist() == pytest.approx(expected, abs=1e-6)
    assert formulas.similarities(weight[:1]).shape == (1, 0)


def test_the_entropy_of_a_choice_is_that_of_its_softmax():
    (logits,) = tensors((3, 4, 6))
    expected = torch.distributions.Categorical(logits=logits).entropy().flatten()

    assert torch.allclose(formulas.choice_entropies(logits), expected, atol=1e-6)
    assert formulas.choice_entropies(torch.tensor([[0.0, -math.inf]])) == 0


def test_experts_are_counted():
    indices = torch.randint(0, 7, (20, 2), generator=torch.Generator().manual_seed(0))

    assert torch.equal(formulas.counts_of(indices, 8), torch.bincount(indices.flatten(), minlength=8))
    assert formulas.counts_of(indices[:0], 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize(("name", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_an_underflow_is_what_becomes_zero_when_it_is_cast(name, dtype):
    limit = formulas.FP8_UNDERFLOW[name]
    values = torch.cat([torch.linspace(-3 * limit, 3 * limit, 101), torch.tensor([limit, -limit, limit * 1.01])]) / 64

    found = formulas.underflows(name)(values, torch.tensor(64.0))

    assert torch.equal(found.bool(), (values != 0) & ((values * 64).to(dtype).float() == 0))
