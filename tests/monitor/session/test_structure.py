"""The model's structure and call stacks, written once in msprobe's form; and losses told apart by micro step."""

import csv
import io
import json

import pytest
import torch
from torch import nn

from tests.journal_rows import RankJournal, only_spool
from trainermon import TrainerMon
from trainermon.core.values import Kind

QUIET = {"agent": {"start": False}}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.pair = nn.Linear(3, 4), Pair()

    def forward(self, x):
        return self.pair(self.fc1(x), scale=torch.ones(1))["out"].sum()


class Pair(nn.Module):
    def forward(self, x, scale, flag=True):
        return {"out": x * scale, "note": "text"}


def run(config, *, steps=2, micro_steps=1, record=None):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainerMon(QUIET | config) as monitor:
        monitor.set_monitor(model, optimizer, grad_acc_steps=micro_steps)
        directory = monitor.run_directory
        for _ in range(steps):
            for _ in range(micro_steps):
                loss = model(torch.ones(2, 3))
                loss.backward()
                if record == "micro":
                    monitor.record(loss=loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            if record == "step":
                monitor.record(loss=loss.item())
    return model, directory


def test_the_structure_of_every_module_is_written_once(places):
    model, directory = run({"print_struct": True})

    found = json.loads((directory / "module_struct/rank0/module_struct.json").read_text())
    size = "size=(2, 3), dtype=torch.float32"
    assert found["fc1"]["input"] == {"config": "tuple[1]", "0": size}
    assert found["fc1"]["output"] == {"config": "tensor", "tensor": "size=(2, 4), dtype=torch.float32"}
    assert found["pair"]["input"]["config"] == "tuple[2]"
    assert found["pair"]["output"]["config"] == "dict[2]"
    assert found["pair"]["output"]["note"] == "<class 'str'>"
    assert not (directory / "module_struct/rank0/stack_info.csv").exists()
    assert not any(module._forward_hooks for module in model.modules())


def test_the_lines_that_call_a_module_are_written_once(places):
    _, directory = run({"stack_info": True})

    text = (directory / "module_struct/rank0/stack_info.csv").read_text()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["module_name"] for row in rows] == ["fc1", "pair"]
    assert "return self.pair(self.fc1(x)" in rows[0]["stack_info"]
    assert "test_structure.py" in rows[0]["stack_info"]


def test_a_run_directory_that_refuses_is_only_logged(places, caplog, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError("no space")

    monkeypatch.setattr("trainermon.monitor.session.structure._open", refuse)
    run({"print_struct": True})

    assert "the structure of the model could not be written" in caplog.text
    assert sorted(RankJournal(only_spool(places[0])).rows) == [0, 1]


@pytest.mark.parametrize(
    ("micro_steps", "record", "expected"),
    [
        (1, None, {"loss"}),
        (1, "micro", {"loss"}),
        (3, None, {"loss@0", "loss@1", "loss@2"}),
        (3, "micro", {"loss@0", "loss@1", "loss@2"}),
        (3, "step", {"loss"}),
    ],
)
def test_losses_are_told_apart_by_micro_step(places, micro_steps, record, expected):
    run({}, micro_steps=micro_steps, record=record, steps=3)

    journal = RankJournal(only_spool(places[0]))
    assert [set(journal.of(step, Kind.LOSS)) for step in range(3)] == [expected] * 3


def test_tokens_per_second_is_the_recorded_tokens_over_the_duration(places):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainerMon(QUIET) as monitor:
        monitor.set_monitor(model, optimizer, grad_acc_steps=2)
        for _ in range(3):
            for _ in range(2):
                model(torch.ones(2, 3)).backward()
                monitor.record(tokens=50)
            optimizer.step()
            optimizer.zero_grad()

    rows = RankJournal(only_spool(places[0])).of(2, Kind.STEP)
    assert rows["tokens_per_second"].sum == pytest.approx(100 / rows["duration_seconds"].sum)
