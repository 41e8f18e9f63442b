"""The rows of a stored run stand as the rank's own table has them, which the live page shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.journal_rows import RankJournal, only_spool
from trainermon import TrainerMon
from trainermon.agent.runs.model_order import ModelOrder
from trainermon.core.journal import Header
from trainermon.core.values import Coordinates, Kind

CONFIG = {
    "agent": {"start": False},
    "param_distribution": True,
    "mv_distribution": True,
    "xy_distribution": True,
}


class Tagger(torch.nn.Module):
    """An LSTM, whose parameters are called neither weight nor bias, and parameters of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.start = torch.nn.Parameter(torch.zeros(4))
        self.words = torch.nn.Embedding(8, 4)
        self.lstm = torch.nn.LSTM(4, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.head = torch.nn.Linear(10, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.words(tokens) + self.start)[0]).square().mean()


def test_rows_stand_as_in_the_ranks_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINERMON_SPOOL", str(tmp_path / "spool"))
    monkeypatch.setenv("TRAINERMON_OUTPUT", str(tmp_path / "output"))
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters())
    with TrainerMon(CONFIG) as monitor:
        monitor.set_monitor(model, optimizer)
        model(torch.arange(6).view(2, 3)).backward()
        optimizer.step()
        order = ModelOrder(monitor.run_directory)
    header = Header(run_id="run", attempt=1, coordinates=Coordinates(), host="here", pid=1, started_s=0.0)
    keys = RankJournal(only_spool(tmp_path / "spool")).keys

    for kind in {key.kind for key in keys} - {Kind.STEP}:  # numbers of the step have no place in the model
        table = list({key.name: key for key in keys if key.kind == kind}.values())
        stored = sorted(table, key=lambda key: key.name)
        assert sorted(stored, key=lambda key: order(header, key)) == table, kind
    gradients = [key.name for key in keys if key.kind == Kind.GRAD_REDUCED]
    assert gradients == [name for name, _ in model.named_parameters()]
