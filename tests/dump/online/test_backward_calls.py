"""`fuzz_stage: backward` on backwards that are right, and on backwards with a fault.

Truth is torch on the CPU, and the fault that was planted.
"""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.dump.online.steps import FaultyKernels, summary_of, tried

NAMES = ["linear", "gelu", "layer_norm", "softmax", "matmul"]


def step_of(dtype=torch.float32, faults=(), alter=None):
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 12).to(dtype), torch.randn(6, 16).to(dtype).requires_grad_()
    with FaultyKernels(alter, *faults):
        hidden = functional.layer_norm(
            functional.gelu(functional.linear(x, weight=layer.weight, bias=layer.bias)), (12,)
        )
        (hidden @ hidden.T).softmax(-1).square().sum().backward()
    return [x.grad, layer.weight.grad, layer.bias.grad]


@pytest.mark.parametrize("mode", ["improve_precision", "add_noise", "no_change", "relations"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sound_backwards_have_no_error_and_keep_every_bit(tmp_path, dtype, mode):
    plain, found = step_of(dtype), []

    rows = tried(
        tmp_path, lambda: found.extend(step_of(dtype)), fuzz_stage="backward", list=NAMES, pert_mode=mode, report="all"
    )

    assert all(map(torch.equal, plain, found))
    assert {row["api_name"] for row in rows} == {
        f"{name}.0.backward"
        for name in (
            "Functional.linear",
            "Functional.gelu",
            "Functional.layer_norm",
            "Tensor.__matmul__",
            "Tensor.softmax",
        )
    }
    assert [row for row in rows if row["status"] in ("error", "SKIP")] == []
    assert {row["stage"] for row in rows} == {"backward"}
    of_linear = [row for row in rows if row["api_name"].startswith("Functional.linear")]
    assert len(of_linear) == (6 if mode == "relations" else 3)  # two relations


def test_one_nan_in_a_gradient_is_an_error_of_that_backward(tmp_path):
    def plant(result):
        result.view(-1)[3] = math.nan

    [row] = tried(
        tmp_path, lambda: step_of(faults=["gelu_backward"], alter=plant), fuzz_stage="backward", list=["gelu"]
    )

    assert (row["api_name"], row["status"], row["reason"]) == ("Functional.gelu.0.backward", "error", "not finite")


@pytest.mark.parametrize(("kernel", "name"), [("gelu_backward", "gelu"), ("_softmax_backward_data", "softmax")])
def test_a_constant_on_one_element_breaks_the_relations_of_its_backward(tmp_path, kernel, name):
    """It does not move with the inputs, so `add_noise` does not see it."""

    def plant(result):
        result.view(-1)[3] += 1e-4

    rows = tried(
        tmp_path,
        lambda: step_of(faults=[kernel], alter=plant),
        fuzz_stage="backward",
        list=[name],
        pert_mode="relations",
    )

    assert {(row["api_name"].split(".")[1], row["output_index"], row["pert_mode"], row["reason"]) for row in rows} == {
        (name, "0", "relations:scale", "relation scale does not hold"),
        (name, "0", "relations:sign", "relation sign does not hold"),
    }


def test_a_backward_whose_repetition_has_other_bits_is_nondeterministic(tmp_path):
    runs = itertools.count()

    rows = tried(
        tmp_path,
        lambda: step_of(faults=["gelu_backward"], alter=lambda result: result.mul_(1 + 1e-6 * next(runs))),
        fuzz_stage="backward",
        list=["gelu"],
        pert_mode="relations",
    )

    assert {row["reason"] for row in rows} == {"nondeterministic"}


def test_a_wrong_gradient_of_a_keyword_is_found(tmp_path):
    """The gradient of the weight is a product too; so is that of the input, and both are wrong by 1 %."""
    rows = tried(
        tmp_path,
        lambda: step_of(faults=["mm"], alter=lambda result: result.mul_(1.01)),
        fuzz_stage="backward",
        list=["linear"],
    )

    assert [(row["output_index"], row["status"]) for row in rows] == [("0", "error"), ("1", "error")]


def test_inputs_that_are_overwritten_are_not_judged(tmp_path):
    def step():
        x = torch.ones(4, requires_grad=True)
        hidden = x * 2
        result = torch.add(hidden, 1)
        hidden.detach().mul_(3)
        result.sum().backward()

    assert tried(tmp_path, step, fuzz_stage="backward", list=["add"]) == []
    assert summary_of(tmp_path)["skipped"] == {"its inputs were overwritten before the backward": 1}
