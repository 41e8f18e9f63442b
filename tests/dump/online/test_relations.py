"""Relations between calls hold for sound kernels, and not for kernels with faults."""

import itertools

import pytest
import torch
from torch.nn import functional

from tests.dump.online.steps import FaultyKernels, tried

GENERATOR = torch.Generator().manual_seed(0)
X, WEIGHT, BIAS = (torch.randn(shape, generator=GENERATOR) for shape in ((8, 32), (12, 32), (12,)))
IMAGE, KERNEL = (torch.randn(shape, generator=GENERATOR) for shape in ((4, 3, 9, 9), (5, 3, 3, 3)))


def healthy(dtype):
    x, weight, bias, image, kernel = (one.to(dtype) for one in (X, WEIGHT, BIAS, IMAGE, KERNEL))
    hidden = functional.linear(x, weight)
    functional.linear(x, weight, bias)
    functional.layer_norm(functional.gelu(hidden), (12,))
    (x @ x.T).softmax(-1).sum(0)
    torch.bmm(x.view(4, 2, 32), x.view(4, 32, 2))
    functional.conv2d(image, kernel)
    q = x.view(2, 2, 4, 16)
    functional.scaled_dot_product_attention(q, q, value=q)


def relations_in(rows):
    return {(row["api_name"].split(".")[1], row["pert_mode"].partition(":")[2]) for row in rows}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sound_kernels_keep_all_relations(tmp_path, dtype):
    rows = tried(tmp_path, lambda: healthy(dtype), pert_mode="relations", report="all")

    assert [row for row in rows if row["status"] != "pass"] == []
    assert {"scale", "sign", "rows", "strided", "transposed"} <= {name for _, name in relations_in(rows)}
    assert ("linear", "scale") in relations_in(rows)
    assert ("softmax", "rows") in relations_in(rows)


def test_softmax_does_not_see_a_shift(tmp_path):
    whole = torch.arange(32.0).view(4, 8) / 8  # numbers that a shift leaves exact

    rows = tried(tmp_path, lambda: whole.softmax(-1), pert_mode="relations", report="all")

    assert ("softmax", "shift") in relations_in(rows)
    assert {row["status"] for row in rows} == {"pass"}


def test_an_offset_breaks_scale_and_sign_alone(tmp_path):
    def step():
        with FaultyKernels(lambda result: result.add_(1e-5), "mm"):
            functional.linear(X, WEIGHT)

    rows = tried(tmp_path, step, pert_mode="relations")

    assert relations_in(rows) == {("linear", "scale"), ("linear", "sign")}
    assert {(row["status"], row["reason"]) for row in rows} == {
        ("error", "relation scale does not hold"), ("error", "relation sign does not hold"),
    }  # fmt: skip


def test_a_softmax_without_its_maximum_breaks_the_shift(tmp_path):
    whole = torch.arange(32.0).view(4, 8) * 4
    runs = itertools.count()

    def step():
        with FaultyKernels(lambda result: result.mul_(1 + 1e-4 * next(runs)), "_softmax"):
            whole.softmax(-1)

    assert ("softmax", "shift") in relations_in(tried(tmp_path, step, pert_mode="relations"))
