"""Sums inside of norms and of the CTC loss: torch's own kernels are sound, and a hundredth more is wrong."""

import pytest
import torch
from torch.nn import functional

from trainermon.accuracy.calls import OperationCall
from trainermon.accuracy.families import family_of
from trainermon.accuracy.judge import Status, judge_call, judge_gradient
from trainermon.accuracy.products import BackwardCall, GradientSum, VectorProduct, gradients_on


def call_of(name):
    """Return a call whose kernel adds many numbers up one after the other, and the gradient of its result."""
    generator = torch.Generator().manual_seed(0)
    if name == "ctc_loss":
        paths = torch.randn(200, 2, 20, generator=generator).mul(0.3).log_softmax(-1)
        labels = torch.randint(1, 20, (2, 6), generator=generator)
        lengths = {"input_lengths": torch.full((2,), 200), "target_lengths": torch.full((2,), 6)}
        return OperationCall(functional.ctc_loss, [paths, labels], {**lengths, "reduction": "sum"}), torch.tensor(1.0)
    x, gradient = (torch.randn(8, 8, 32, 32, generator=generator) for _ in range(2))
    x, gradient = (one.contiguous(memory_format=torch.channels_last) for one in (x + 3, gradient))
    if name == "batch_norm":
        return OperationCall(functional.batch_norm, [x, None, None], {"training": True}), gradient
    return OperationCall(functional.group_norm, [x, 2], {}), gradient


def judged(name, factor):
    call, gradient = call_of(name)
    [forward] = judge_call(name, call, call.function(*call.args, **call.kwargs) * factor)
    backward = BackwardCall(call, [gradient], family_of(name), [0])
    [found] = gradients_on(backward, "cpu")
    summed = GradientSum([(VectorProduct(backward), 0)], call.args[0])
    return forward, judge_gradient(found * factor, summed, backward.coarsest)


@pytest.mark.parametrize("name", ["batch_norm", "group_norm", "ctc_loss"])
def test_torchs_own_is_a_pass_and_a_hundredth_more_an_error(name):
    assert [one.status for one in judged(name, 1.0)] == [Status.PASS, Status.PASS]
    assert [one.status for one in judged(name, 1.01)] == [Status.ERROR, Status.ERROR]


def test_a_batch_norm_that_sums_nothing_is_judged_as_strictly_as_before():
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    call = OperationCall(functional.batch_norm, [x, torch.zeros(3), torch.ones(3)], {})

    [judgement] = judge_call("batch_norm", call, call.function(*call.args) * (1 + 2e-6))

    assert judgement.status is Status.ERROR
