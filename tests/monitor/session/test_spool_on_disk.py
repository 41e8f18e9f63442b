"""Training whose spool lies on a disk that hangs."""

import os
import threading

import torch
from torch import nn

from tests.journal_rows import RankJournal, only_spool
from trainermon import TrainerMon
from trainermon.core import spool

PATIENCE_S = 60.0


def train(num_steps, between=lambda step: None, monitor=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    if monitor is not None:
        monitor.set_monitor(model, optimizer)
    losses = []
    for step in range(num_steps):
        between(step)
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_goes_on_while_the_disk_hangs_and_no_row_is_lost(places, monkeypatch):
    expected = train(20)
    monkeypatch.setattr(spool, "_read_mountinfo", lambda: "1 0 8:1 / / rw - ext4 /dev/sda1 rw")
    disk = threading.Event()

    def hanging(real):
        def call(*arguments):
            in_step = threading.current_thread() is threading.main_thread()
            assert disk.wait(0 if in_step else PATIENCE_S), "the step itself writes to the disk"
            return real(*arguments)

        return call

    def between(step):
        if step == 5:
            disk.clear()
        if step == 15:
            disk.set()

    disk.set()
    with TrainerMon({"agent": {"start": False}}) as monitor:
        for name in ("writev", "pwrite"):
            monkeypatch.setattr(os, name, hanging(getattr(os, name)))
        losses = train(20, between, monitor)

    assert losses == expected
    assert sorted(RankJournal(only_spool(places[0])).rows) == list(range(20))


def test_memory_needs_no_thread(places, monkeypatch):
    monkeypatch.setattr(spool, "_read_mountinfo", lambda: "1 0 0:1 / / rw - tmpfs tmpfs rw")
    with TrainerMon({"agent": {"start": False}}) as monitor:
        train(2, lambda _step: None, monitor)
        names = [thread.name for thread in threading.enumerate()]

    assert "trainermon-spool" not in names
