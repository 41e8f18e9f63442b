"""Values of the forward that reach no loss and make a gradient NaN, where no module takes them."""

from pathlib import Path

import pytest
import torch
from torch import nn

from trainermon.analysis.diagnosis.cut_off import followed_to_forward
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.findings import FaultPhase
from trainermon.analysis.diagnosis.origin import LOSS, MODEL, Origin
from trainermon.dump.files.records import Dump, DumpInfo, TensorRecord
from trainermon.dump.files.verdicts import NonfiniteCause, OperationVerdict
from trainermon.replay.replay import StepKeeper


class NanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


class Net(nn.Module):
    """Multiplies by a weight of its own; three of eight rows are not used."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.first, self.weight = kind, nn.Linear(8, 8), nn.Parameter(torch.ones(8, 4))

    def forward(self, x, scale):
        hidden = self.first(x)
        if self.kind == "logarithm":  # of zero: minus infinity
            hidden = torch.log(torch.where(scale > 1, 0.0, hidden.square() + 1).detach())
        elif self.kind != "no overflow":
            hidden = (hidden * scale).half().float()
        if self.kind == "masked":
            return torch.where(scale < 2, hidden @ self.weight, 0.0)
        if self.kind in ("gradient", "no overflow") and scale.max() > 1:
            return NanGradient.apply(hidden)[:, 3:].sigmoid() @ self.weight
        return (hidden @ self.weight)[:, 3:]


def diagnosed(kind, tmp_path):
    """Return the diagnosis of the replay of one step."""
    torch.manual_seed(0)
    model = Net(kind)
    keeper = StepKeeper(model)
    keeper.attach()
    scale = torch.ones(1, 8, 1)
    scale[:, :3] = 1e6
    loss = model(torch.randn(2, 8, 8), scale).pow(2).mean()
    loss.backward()
    assert loss.isfinite()
    assert any(parameter.grad.isnan().any() for parameter in model.parameters() if parameter.grad is not None)
    keeper.replay(tmp_path / "dumps/r/attempt1/step1/rank0", DumpInfo(id="r", step=1, attempt=1, rank=0))
    return diagnose(tmp_path)


@pytest.mark.parametrize(
    ("kind", "operation"), [("cut", "aten._to_copy"), ("masked", "aten._to_copy"), ("logarithm", "aten.log")]
)
def test_an_operation_of_the_model_whose_bad_value_is_cut_off_is_named(tmp_path, kind, operation):
    diagnosis = diagnosed(kind, tmp_path)

    assert (diagnosis.module, diagnosis.phase) == (MODEL, FaultPhase.FORWARD)
    assert operation in diagnosis.reason
    assert "reached no loss" in diagnosis.reason
    assert diagnosis.classification.operation.startswith(operation)


@pytest.mark.parametrize("kind", ["gradient", "no overflow"])
def test_an_operation_of_the_backward_that_makes_nan_itself_stays_named(tmp_path, kind):
    diagnosis = diagnosed(kind, tmp_path)

    assert diagnosis.phase is FaultPhase.BACKWARD


def operation(direction, *, cause=NonfiniteCause.RANGE, micro_step=0, is_mask=False):
    call = f"Module.mod.Mod.{direction}.0"
    return OperationVerdict(
        operation="aten.exp",
        cause=cause,
        reason="",
        call=call,
        direction=direction,
        micro_step=micro_step,
        is_mask=is_mask,
    )


@pytest.mark.parametrize(
    ("operations", "module", "expected"),
    [
        ([operation("forward")], "out", "mod"),
        ([operation("forward"), operation("backward", cause=NonfiniteCause.INHERITED)], "out", "out"),
        ([operation("forward"), operation("backward")], "out", "out"),
        ([operation("forward", micro_step=1)], "out", "out"),
        ([operation("forward", is_mask=True)], "out", "out"),
        ([operation("forward")], LOSS, LOSS),
        ([], "out", "out"),
    ],
)
def test_only_a_bad_forward_without_a_bad_operation_of_the_backward_is_followed(operations, module, expected):
    info = DumpInfo(replay=True, operations=tuple(operations))
    dump = Dump(directory=Path(), task="statistics", level="L0", info=info, entries=())
    bad = TensorRecord(slot="gradient of weight", dtype="torch.float32", shape=(4,), nans=4, infs=0)
    origin = Origin(
        phase=FaultPhase.BACKWARD, module=module, class_name="Linear", tensor=bad, reason="", order=9, micro_step=0
    )

    assert followed_to_forward(dump, origin).module == expected
