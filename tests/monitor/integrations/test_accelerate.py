"""accelerate's wrappers: the optimizer steps in the last micro step only, whatever the loop calls."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.journal_rows import RankJournal
from trainermon import TrainerMon
from trainermon.core.values import Kind
from trainermon.monitor.frameworks.optimizer_wrappers import unwrapped

MICRO_STEPS = 3


@pytest.fixture(autouse=True)
def fresh_state():
    """Nobody has chosen a device and a precision yet: accelerate remembers them for the process, also for a Trainer."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.filterwarnings("ignore")  # accelerate's own
def test_prepared_model_and_optimizer_are_watched(tmp_path, monkeypatch):
    import accelerate

    monkeypatch.setenv("TRAINERMON_SPOOL", str(tmp_path / "spool"))
    monkeypatch.setenv("TRAINERMON_OUTPUT", str(tmp_path / "output"))
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=MICRO_STEPS, cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(nn.Linear(4, 2))
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
    norms = []
    with TrainerMon({"run_id": "accelerate", "agent": {"start": False}}) as monitor:
        monitor.set_monitor(model, optimizer, grad_acc_steps=MICRO_STEPS)
        for _ in range(2 * MICRO_STEPS):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.randn(5, 4)).square().mean())
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.01)))
                optimizer.step()
                optimizer.zero_grad()

    journal = RankJournal(tmp_path / "spool" / "accelerate")
    assert sorted(journal.rows) == [0, 1]
    for step, norm in enumerate(norms):
        found = journal.of(step, Kind.GRAD_REDUCED)
        assert found.keys() == {"weight", "bias"}
        assert math.sqrt(sum(row.sum_sq for row in found.values())) == pytest.approx(norm, rel=1e-6)


@pytest.mark.filterwarnings("ignore")  # accelerate's own
def test_what_accelerate_says_of_the_last_micro_step_counts(tmp_path, monkeypatch, caplog):
    import accelerate

    monkeypatch.setenv("TRAINERMON_SPOOL", str(tmp_path / "spool"))
    monkeypatch.setenv("TRAINERMON_OUTPUT", str(tmp_path / "output"))
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=MICRO_STEPS, cpu=True)
    model = nn.Linear(4, 2)
    batches: Any = torch.randn(5, 4)
    loader = torch.utils.data.DataLoader(batches, batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)
    norms = []
    with TrainerMon({"run_id": "accelerate", "agent": {"start": False}}) as monitor:
        monitor.set_monitor(model, optimizer, grad_acc_steps=MICRO_STEPS)
        for _ in range(2):
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).square().mean())
                    if accelerator.sync_gradients:
                        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.01)))
                    optimizer.step()
                    optimizer.zero_grad()

    journal = RankJournal(tmp_path / "spool" / "accelerate")
    found = [sum(row.sum_sq for row in journal.of(step, Kind.GRAD_REDUCED).values()) for step in sorted(journal.rows)]
    assert len(norms) == 4
    assert [math.sqrt(squares) for squares in found] == pytest.approx(norms, rel=1e-6)
    assert "read at the optimizer step" not in caplog.text


def test_an_optimizer_without_a_wrapper_stays_what_it_is():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)

    assert unwrapped(optimizer) is optimizer
