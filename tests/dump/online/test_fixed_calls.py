"""`handler_type: fix` on calls whose kernels are wrong in 16 and 32 bits.

Truth is the same step in float64.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.dump.online.steps import FaultyKernels, summary_of, tried

X = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))


def model_of(dtype):
    torch.manual_seed(1)
    return nn.Linear(16, 8).to(dtype)


def gradients(model, *, faults=(), checkpointing=None):
    """Return result and gradients of a step whose float32 and 16-bit products are wrong by 5 %."""
    x = X.to(model.weight.dtype, copy=True).requires_grad_()

    def forward(given):
        return functional.linear(given, weight=model.weight, bias=model.bias).softmax(-1)

    with FaultyKernels(lambda result: result.mul_(1.05), *faults):
        if checkpointing is None:
            result = forward(x)
        else:
            result = checkpoint(forward, x, use_reentrant=checkpointing == "reentrant")
        result.square().sum().backward()
    found = [result.detach(), x.grad, model.weight.grad, model.bias.grad]
    model.zero_grad()
    return found


def far(left, right):
    return max(
        float((one.double() - other.double()).abs().max() / other.abs().max())
        for one, other in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "nonreentrant"])
@pytest.mark.parametrize(("mode", "device"), [("improve_precision", "npu"), ("to_cpu", "cpu")])
def test_result_and_gradients_are_those_of_the_higher_precision(tmp_path, mode, device, checkpointing):
    model, faults = model_of(torch.float32), ("addmm", "mm")
    golden = gradients(model_of(torch.float64))
    broken = gradients(model, faults=faults)
    found = []

    def step():
        found[:] = gradients(model, faults=faults, checkpointing=checkpointing)

    tried(tmp_path, step, handler_type="fix", pert_mode=mode, fuzz_device=device, list=["linear"])

    assert far(broken, golden) > 0.01
    assert far(found, golden) < 1e-6
    assert {tensor.dtype for tensor in found} == {torch.float32}
    times = 1 if checkpointing is None else 2
    assert summary_of(tmp_path)["fixed"] == {"Functional.linear float32 in float64": times}


def test_sixteen_bits_are_computed_in_float32(tmp_path):
    model, found = model_of(torch.bfloat16), []
    golden = functional.linear(X.bfloat16().float(), model.weight.float(), model.bias.float())

    def step():
        with FaultyKernels(lambda result: result.mul_(1.05) if result.dtype is torch.bfloat16 else None, "addmm"):
            found.append(model(X.bfloat16()))

    tried(tmp_path, step, handler_type="fix", list=["linear"])

    assert torch.equal(found[0], golden.bfloat16())
    assert summary_of(tmp_path)["fixed"] == {"Functional.linear bfloat16 in float32": 1}


def test_what_is_written_in_place_is_fixed_in_place(tmp_path):
    x, running = torch.rand(8, 2), torch.zeros(2)
    found = []

    def step():
        hidden = x.clone()
        with FaultyKernels(lambda result: result.mul_(1.05), "exp_", "mul_", "native_batch_norm"):
            returned = hidden.exp_()
            functional.batch_norm(x, running, torch.ones(2), training=True)
        found.extend([hidden, returned])

    tried(tmp_path, step, handler_type="fix", list=["exp_", "batch_norm"])

    assert found[0] is found[1]
    assert torch.equal(found[0], x.double().exp().float())
    torch.testing.assert_close(running, x.double().mean(0).mul(0.1).float(), rtol=1e-6, atol=0)


def test_what_cannot_be_fixed_runs_as_it_is(tmp_path):
    found, x = [], torch.rand(4)

    def step():
        found.append((torch.add(x, 1, out=torch.empty(4)), functional.dropout(x, 0.5), x.relu(), x.double().exp()))

    tried(tmp_path, step, handler_type="fix", list=["add", "dropout", "relu", "exp"])

    assert torch.equal(found[0][0], x + 1)
    assert summary_of(tmp_path)["fixed"] == {}
    assert sum(summary_of(tmp_path)["skipped"].values()) == 4


def test_under_autocast_a_call_is_computed_in_float32_and_has_autocasts_type(tmp_path):
    model, found = model_of(torch.float32), []

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            found.append(model(X))

    tried(tmp_path, step, handler_type="fix", list=["linear"])

    assert torch.equal(found[0], functional.linear(X, model.weight, model.bias).bfloat16())
    assert found[0].requires_grad
