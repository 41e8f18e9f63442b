"""Compositions of fused operators, against torch's own modules and functions, and by hand."""

import pytest
import torch
from torch.nn import functional

from trainermon.accuracy.fused import COMPOSITIONS


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


X = random(3, 4, 8)


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("npu_mish", (X,), functional.mish(X)),
        ("npu_silu", (X,), functional.silu(X)),
        ("npu_swiglu", (X,), functional.silu(X[..., :4]) * X[..., 4:]),
        ("npu_fast_gelu", (X,), X / (1 + (-1.702 * X).exp())),
        ("npu_linear", (X, X[0], X[0, :, 0]), X @ X[0].T + X[0, :, 0]),
        ("npu_sort_v2", (X, 1, True), X.sort(1, descending=True).values),
        ("npu_layer_norm_eval", (X, [8]), functional.layer_norm(X, [8])),
        ("npu_confusion_transpose", (X, [2, 0, 1], [8, 12], True), X.permute(2, 0, 1).reshape(8, 12)),
        ("npu_confusion_transpose", (X, [1, 0], [12, 8], False), X.reshape(12, 8).T),
        ("npu_scaled_masked_softmax", (X, X > 1, 0.5), torch.where(X > 1, -1e4, X / 2).softmax(-1)),
    ],
)
def test_one_result(name, args, expected):
    same(COMPOSITIONS[name](*args), expected)


def test_norms_give_what_the_backward_needs_too():
    gamma = X[0, 0]
    normed, inverse = COMPOSITIONS["npu_rms_norm"](X, gamma, 1e-5)
    same(normed, functional.rms_norm(X, [8], gamma, 1e-5))
    same(inverse * (X.square().mean(-1, keepdim=True) + 1e-5).sqrt(), torch.ones(3, 4, 1, dtype=torch.float64))

    weight = X[1, :, 0]
    found, mean, inverse = COMPOSITIONS["npu_group_norm_silu"](X, weight, None, 2)
    same(found, functional.silu(functional.group_norm(X, 2, weight)))
    expected = torch.native_group_norm(X, weight, None, 3, 4, 8, 2, 1e-5)
    same((mean, inverse), expected[1:])


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_embedding_turns_pairs(mode):
    """A pair as a complex number is multiplied by one of modulus 1."""
    angles = random(4, 4, seed=1)
    both = [
        torch.cat([one, one], -1) if mode == "half" else one.repeat_interleave(2, -1)
        for one in (angles.cos(), angles.sin())
    ]

    found = COMPOSITIONS["npu_rotary_mul"](X, *both, mode)

    def pairs(one):
        return (
            torch.complex(one[..., :4], one[..., 4:])
            if mode == "half"
            else torch.view_as_complex(one.unflatten(-1, (4, 2)))
        )

    same(pairs(found.contiguous()), pairs(X.contiguous()) * torch.exp(1j * angles))


def test_gating_of_experts_numbers_copies_down_the_columns():
    scores = random(3, 5, seed=2)
    finished = torch.tensor([False, True, False])

    shares, experts, rows = COMPOSITIONS["npu_moe_gating_top_k_softmax"](scores, finished, 2)

    for row in range(3):
        best = sorted(range(5), key=lambda expert: -float(scores[row, expert]))[:2]
        same(shares[row], scores[row].softmax(0)[best])
        assert experts[row].tolist() == ([5, 5] if finished[row] else best)
    assert rows.tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("decay", [None, 0.1])
@pytest.mark.parametrize("step", [1, 7])
def test_a_fused_step_of_adam_is_that_of_the_optimizer(decay, step):
    before, first, second, gradient = X[0, 0].clone(), X[0, 1] / 10, X[0, 2].square(), X[0, 3]
    parameter = torch.nn.Parameter(before.clone())
    kind = torch.optim.AdamW if decay else torch.optim.Adam
    optimizer = kind([parameter], lr=0.01, betas=(0.9, 0.99), eps=1e-30, weight_decay=decay or 0)
    optimizer.state[parameter] = {
        "step": torch.tensor(float(step - 1)), "exp_avg": first.clone(), "exp_avg_sq": second.clone(),
    }  # fmt: skip
    parameter.grad = gradient.clone()
    optimizer.step()

    out = (before, first, second)
    if decay:
        found = COMPOSITIONS["npu_apply_adam_w"](
            0.9 ** (step - 1), 0.99 ** (step - 1), 0.01, decay, 0.9, 0.99, 1e-30, gradient, out=out
        )
    else:
        found = COMPOSITIONS["npu_apply_adam"](0.9**step, 0.99**step, 0.01, 0.9, 0.99, 1e-30, gradient, out=out)

    state = optimizer.state[parameter]
    same(found, (parameter.detach(), state["exp_avg"], state["exp_avg_sq"]))


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
def test_fused_attention_is_torchs(layout):
    query, key, value = random(2, 4, 5, 8), random(2, 2, 6, 8, seed=1), random(2, 2, 6, 8, seed=2)
    mask = random(5, 6, seed=3) > 0.5
    mask[:, 0] = False
    expected = functional.scaled_dot_product_attention(query, key, value, ~mask, scale=0.3, enable_gqa=True)
    order = {"BNSD": "bnsd", "BSND": "bsnd", "BSH": "bsnd", "SBH": "sbnd"}[layout]

    def laid(one):
        moved = one.permute(*("bnsd".index(letter) for letter in order))
        return moved.flatten(-2) if layout in ("BSH", "SBH") else moved

    found, most, total, _ = COMPOSITIONS["npu_fusion_attention"](
        laid(query), laid(key), laid(value), 4, layout, atten_mask=mask, scale=0.3
    )

    same(found, laid(expected))
    scores = (query @ key.repeat_interleave(2, 1).mT * 0.3).masked_fill(mask, float("-inf"))
    same(
        (most.log_softmax(-1).exp().sum(-1), most[..., 0] + total[..., 7].log()),
        (torch.ones(2, 4, 5, dtype=torch.float64), scores.logsumexp(-1)),
    )


@pytest.mark.parametrize(("mode", "first"), [(2, 1), (3, 3)])
def test_causal_attention_with_a_position_encoding_is_torchs(mode, first):
    """The encoding is scaled with the products; everything is given by place, as callers of torch_npu do."""
    query, key, value = random(2, 4, 5, 8), random(2, 4, 7, 8, seed=1), random(2, 4, 7, 8, seed=2)
    encoding = random(2, 4, 5, 7, seed=3)
    triangle = torch.ones(5, 7, dtype=torch.bool).triu(first)
    bias = (0.3 * encoding).masked_fill(triangle, float("-inf"))
    limits = (2**31 - 1, 0, 0, None, None, None, mode)

    found = COMPOSITIONS["npu_fusion_attention"](
        query, key, value, 4, "BNSD", encoding, None, triangle, 0.3, 1.0, *limits
    )[0]

    same(found, functional.scaled_dot_product_attention(query, key, value, bias, scale=0.3))


def test_attention_that_draws_has_no_composition():
    with pytest.raises(ValueError, match=r"keep_prob 0.9 and sparse_mode 0 have no composition"):
        COMPOSITIONS["npu_fusion_attention"](X, X, X, 1, "BSH", keep_prob=0.9)
