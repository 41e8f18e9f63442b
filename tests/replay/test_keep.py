"""What is kept of a step's forwards and gradients."""

import pytest
import torch
from torch import nn

from trainermon.replay.keep import ForwardKeeper


class VarianceAndMean(nn.Module):
    """Two outputs of one node of the graph."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.var_mean(self.linear(x), -1)


def attached(model):
    keeper = ForwardKeeper(model, memory_bytes=1 << 20)
    keeper.attach()
    return keeper


def test_an_output_without_gradient_beside_one_with_is_kept_as_unused():
    model = VarianceAndMean()
    keeper = attached(model)

    variance, _ = model(torch.randn(3, 4))
    (2 * variance).sum().backward()

    (kept,) = keeper.forwards
    assert [gradient is None for gradient in kept.gradients] == [False, True]
    assert torch.equal(kept.gradients[0], torch.full((3,), 2.0))
    assert keeper.error == ""


def test_a_gradient_that_cannot_be_kept_is_reported_and_does_not_reach_the_training(monkeypatch):
    model = VarianceAndMean()
    keeper = attached(model)
    variance, _ = model(torch.randn(3, 4))
    monkeypatch.setattr("trainermon.replay.keep.size_bytes", lambda tensors: 1 / 0)

    variance.sum().backward()

    assert keeper.error == "ZeroDivisionError: division by zero"
    assert model.linear.weight.grad is not None


def operations(traced):
    return [node.kind() for node in traced.inlined_graph.nodes()]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_trace_of_the_model_is_what_it_is_without_the_keeper():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.randn(1, 4)
    plain = operations(torch.jit.trace(model, x))
    keeper = attached(model)

    traced = operations(torch.jit.trace(model, x))

    assert traced == plain
    assert keeper.forwards == []
