"""A tap of the loop that fails is left out alone, whenever it fails, and what it looked for is said."""

import contextlib

import pytest
import torch
from torch import nn

from tests.journal_rows import RankJournal, only_spool
from trainermon import TrainerMon
from trainermon.core.values import Kind
from trainermon.monitor.taps.loop import loop_taps
from trainermon.monitor.taps.loop.frozen_moves import FrozenMoves
from trainermon.monitor.taps.loop.kept_gradients import KeptGradients
from trainermon.monitor.taps.loop.late_clipping import LateClipping
from trainermon.monitor.taps.loop.left_out import LeftOut
from trainermon.monitor.taps.loop.lost_gradients import LostGradients
from trainermon.monitor.taps.loop.module_settings import ModuleSettings
from trainermon.monitor.taps.loop.repeated_steps import RepeatedSteps
from trainermon.monitor.taps.loop.reused_batch import ReusedBatch
from trainermon.monitor.taps.loop.shared_memory import SharedMemory
from trainermon.monitor.taps.loop.torch_warnings import TorchWarnings
from trainermon.monitor.taps.loop.uneven_steps import UnevenSteps

TAPS = (
    *(FrozenMoves, KeptGradients, LateClipping, LeftOut, LostGradients),
    *(ModuleSettings, RepeatedSteps, ReusedBatch, SharedMemory, TorchWarnings, UnevenSteps),
)
MOMENTS = ("attach", "detach", "forward_begins", "at_entry", "step_ended")
CALLED = [(tap, moment) for tap in TAPS for moment in MOMENTS if moment in vars(tap)]
STEPS = 4


def trained(folder):
    """Return the journal of a small training, and its weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    settings = {
        "run_id": "run",
        "xy_distribution": True,
        "spool_dir": str(folder / "spool"),
        "output_dir": str(folder),
        "agent": {"start": False},
    }
    with contextlib.closing(TrainerMon(settings)) as monitor:
        monitor.set_monitor(model, optimizer)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().sum().backward()
            optimizer.step()
    return RankJournal(only_spool(folder / "spool")), model.state_dict()


def statistics_of(journal):
    return {
        step: {key: row for key, row in rows.items() if key.kind is not Kind.STEP}
        for step, rows in journal.rows.items()
    }


def test_every_tap_is_tried(tmp_path):
    trained(tmp_path)  # which imports them all

    assert {*TAPS} == {*loop_taps.LoopTap.__subclasses__()}


@pytest.mark.parametrize(("tap", "moment"), CALLED, ids=lambda part: getattr(part, "__name__", part))
def test_one_that_fails_is_left_out_alone(tmp_path, monkeypatch, caplog, tap, moment):
    sound, weights = trained(tmp_path / "sound")

    def fails(*args, **named):
        raise KeyError("what nobody had thought of")

    monkeypatch.setattr(tap, moment, fails)
    journal, same = trained(tmp_path / "fails")

    (event,) = [event for event in journal.events if event["type"] == "gap"]
    assert event["what"] == tap.looks_for
    assert "what nobody had thought of" in event["message"]
    assert [event for event in journal.events if event["type"] == "detached"] == []
    assert f"the search for {tap.looks_for} has ended after KeyError" in caplog.text
    assert statistics_of(journal) == statistics_of(sound)
    assert all(torch.equal(weights[name], same[name]) for name in weights)
