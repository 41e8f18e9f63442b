"""Modes that move the inputs of calls, on kernels that react rightly, wrongly, or as unstable mathematics does."""

import itertools
import math

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.dump.online.steps import FaultyKernels, summary_of, tried

MOVING = ("add_noise", "bit_noise", "change_value")
X, WEIGHT = torch.randn(18, 16, generator=torch.Generator().manual_seed(0)).split([6, 12])


def healthy(dtype=torch.float32):
    x, weight = X.to(dtype), WEIGHT.to(dtype)
    hidden = functional.linear(x, weight=weight)
    mask = torch.full((12, 12), -math.inf, dtype=dtype).triu(1)
    functional.cross_entropy(hidden, torch.arange(6))
    torch.cat([hidden, hidden]).sort(-1)
    return functional.layer_norm(functional.gelu(hidden), (12,)) + (hidden.mT @ hidden + mask).softmax(-1).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", [*MOVING, "no_change"])
def test_sound_kernels_react_as_predicted(tmp_path, mode, dtype):
    rows = tried(tmp_path, lambda: healthy(dtype), pert_mode=mode, probes=2)

    assert [row for row in rows if row["status"] != "condition"] == []
    assert summary_of(tmp_path)["calls"] >= 9


class ChaoticInWeight(TorchDispatchMode):
    """A product whose result jumps with the last bits of its second operand."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "mm" in str(func) and result.dtype is torch.float32:
            weight = next(one for one in reversed(args) if isinstance(one, torch.Tensor))
            result += float((weight.double().flatten().cumsum(0).sum() * 2**20) % 1)
        return result


@pytest.mark.parametrize("mode", MOVING)
def test_a_fault_on_the_side_of_a_keyword_is_found(tmp_path, mode):
    def step():
        with ChaoticInWeight():
            functional.linear(X, weight=WEIGHT)

    [row] = tried(tmp_path, step, pert_mode=mode)

    reason = "relation order does not hold" if mode == "change_value" else "unexplained change"
    assert (row["api_name"], row["status"], row["reason"]) == ("Functional.linear.0.forward", "error", reason)


def test_unstable_mathematics_is_a_note_and_no_error(tmp_path):
    x = torch.rand(1000) + 1
    x = torch.stack([x, -x]) + torch.tensor([[1e-3], [0.0]])

    [row] = tried(tmp_path, lambda: x.sum(0), pert_mode="add_noise")

    assert (row["status"], row["reason"]) == ("condition", "condition")
    assert float(row["condition"]) > 500  # 1.5 / 1e-3 by hand


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pair", [((64,), (64,)), ((64, 1), (64, 1)), ((64,), (8, 64)), ((8, 64), (8, 64))])
def test_two_operands_that_cancel_are_named(tmp_path, dtype, pair):
    near, small = torch.rand(pair[0]).to(dtype) + 1000, torch.rand(pair[1]).to(dtype)
    other = (near + small * (8 if dtype is torch.bfloat16 else 0.01)).to(dtype)

    [row] = tried(tmp_path, lambda: torch.sub(near, other), pert_mode="add_noise")

    assert (row["status"], row["reason"]) == ("condition", "condition")
    assert float(row["condition"]) > 50


def test_a_stale_result_is_found(tmp_path):
    def step():
        with FaultyKernels(lambda result: result.fill_(1.0), "exp"):
            X.exp()

    [row] = tried(tmp_path, step, pert_mode="change_value")

    assert (row["status"], float(row["value"])) == ("error", 0.0)


def test_nan_after_the_move_is_an_error(tmp_path):
    runs = itertools.count()

    def plant(result):
        if next(runs):
            result.view(-1)[3] = math.nan

    def step():
        with FaultyKernels(plant, "exp"):
            X.exp()

    [row] = tried(tmp_path, step, pert_mode="add_noise")

    assert (row["status"], row["reason"], row["max_rel"], row["index"]) == ("error", "not finite", "nan", "[0, 3]")


def test_a_kernel_that_does_not_repeat_itself_is_found_and_dropout_is_not_taken_for_one(tmp_path):
    runs = itertools.count()

    def step():
        with FaultyKernels(lambda result: result.add_(1e-6 * next(runs)), "exp"):
            functional.dropout(X.exp(), 0.5)

    [row] = tried(tmp_path, step, pert_mode="no_change")

    assert (row["api_name"], row["status"], row["reason"]) == ("Tensor.exp.0.forward", "error", "nondeterministic")
    assert summary_of(tmp_path)["skipped"] == {"random or undefined": 1}


def test_a_changed_sign_is_named_as_msprobe_does(tmp_path):
    runs = itertools.count()

    def step():
        with FaultyKernels(lambda result: result.neg_() if next(runs) else None, "exp"):
            X.exp()

    [row] = tried(tmp_path, step, pert_mode="no_change")

    assert row["max_rel"] == "symbol_flipping"


@pytest.mark.parametrize("mode", [*MOVING, "no_change", "relations", "improve_precision"])
def test_a_nan_of_the_training_is_no_fault_of_the_kernels_behind_it(tmp_path, mode):
    x = X.clone()
    x[0, 0] = math.nan

    rows = tried(tmp_path, lambda: functional.layer_norm(functional.linear(x, WEIGHT), (12,)).sum(), pert_mode=mode)

    assert [row for row in rows if row["status"] != "condition"] == []


@pytest.mark.parametrize("mode", [*MOVING, "no_change", "relations"])
def test_slices_are_tried_as_they_lie_in_memory(tmp_path, mode):
    """Kernels sum them in another order than dense tensors."""
    values = torch.randn(40, 64, generator=torch.Generator().manual_seed(2))

    def step():
        for part in (values[:, 1:], values[1:, ::2], values[0].expand(40, 64), values.mT[3:]):
            part.sum(), part.mean(), part.norm(), part @ part.mT

    rows = tried(tmp_path, step, pert_mode=mode)

    assert [row for row in rows if row["status"] != "condition"] == []
    assert summary_of(tmp_path)["calls"] >= 16
