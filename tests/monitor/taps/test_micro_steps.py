"""What counts as one forward of the model."""

import torch
from torch import nn

from tests.journal_rows import RankJournal
from trainermon import TrainerMon
from trainermon.core.values import Kind


class CallsItself(nn.Module):
    """As a module of Lightning's under DistributedDataParallel: its forward is the training step, which calls it."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 1)

    def forward(self, x, is_training_step=True):
        return self(x, is_training_step=False).square().mean() if is_training_step else self.body(x)


def test_a_root_that_calls_itself_makes_one_forward(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINERMON_SPOOL", str(tmp_path / "spool"))
    monkeypatch.setenv("TRAINERMON_OUTPUT", str(tmp_path / "output"))
    model = CallsItself()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with TrainerMon({"run_id": "run", "xy_distribution": True, "agent": {"start": False}}) as monitor:
        monitor.set_monitor(model, optimizer, grad_acc_steps=2)
        for _ in range(2):
            for _ in range(2):
                model(torch.randn(3, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()

    journal = RankJournal(tmp_path / "spool" / "run")
    for step in range(2):
        assert {label for label in journal.of(step, Kind.ACTV) if "body.output" in label} == {
            "body.output.0@0",
            "body.output.0@1",
        }
        assert journal.of(step, Kind.LOSS).keys() == {"loss@0", "loss@1"}
