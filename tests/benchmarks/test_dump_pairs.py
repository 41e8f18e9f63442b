"""A fault that is put into a dumped step is in the model, and in nothing that the dump computes for itself."""

import torch
from torch import nn

from benchmarks.dump_pairs.cases import Fault
from benchmarks.dump_pairs.faults import Truth, broken
from benchmarks.dump_pairs.models import Prepared


class Scaled(nn.Module):
    """Scales by hand, as many norms do, behind a module of its own."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(6))

    def forward(self, rows):
        return torch.mul(self.inner(rows), self.scale)


def test_it_doubles_what_the_model_makes_and_no_square_that_a_dump_takes_before():
    torch.manual_seed(0)
    model, rows = nn.Sequential(Scaled()), torch.randn(4, 6)
    sound = model(rows).detach()
    squares, made = [], []

    def look(_module, _given, output):
        squares.append(torch.mul(output.detach(), output.detach()))  # as statistics do where nothing is compiled

    def start():
        model[0].inner.register_forward_hook(look)

    def run():
        made.append(model(rows))
        made[-1].sum().backward()

    fault = Fault(kind="operation", place=0.9, size=1.0)
    prepared = Prepared(model=model, batch={}, mapping={})
    with broken(prepared, fault, run, start) as truth:
        run()

    assert truth == Truth("operation", "0", "mul")
    torch.testing.assert_close(made[-1].detach(), 2 * sound)
    torch.testing.assert_close(squares[-1], sound.square())
