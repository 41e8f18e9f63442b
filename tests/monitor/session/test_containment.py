"""Whatever goes wrong inside the monitor, training ends with the same losses and weights, and nothing stays behind."""

import logging
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.journal_rows import RankJournal, only_spool
from trainermon import TrainerMon
from trainermon.core.config.schema import HISTOGRAM_KINDS
from trainermon.core.control import ControlPage
from trainermon.core.errors import AttachError
from trainermon.core.journal import JournalWriter
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.gradients import GradientTaps
from trainermon.monitor.taps.micro_steps import MicroSteps
from trainermon.monitor.taps.modules import ModuleTaps
from trainermon.monitor.taps.optimizer import ParameterTaps, StateTaps
from trainermon.statistics.slabs import Slab, SlabRing

EVERYTHING = {
    "wg_distribution": True,
    "monitor_mbs_grad": True,
    "param_distribution": True,
    "mv_distribution": True,
    "ur_distribution": True,
    "xy_distribution": True,
    "histograms": {"kinds": [str(kind) for kind in HISTOGRAM_KINDS], "step_interval": 1},
    "agent": {"start": False},
}
STEPS = 4


class PostNorm(nn.Module):
    """A block in which the order of gradient accumulation shows: one tensor feeds q, k, v and the residual."""

    def __init__(self, width=16, *, reentrant=None):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.norm, self.act, self.dropout = nn.LayerNorm(width), nn.ReLU(inplace=True), nn.Dropout(0.1)
        self.reentrant = reentrant

    def mix(self, x):
        attention = torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2), -1) @ self.v(x)
        return self.norm(x + self.dropout(self.act(attention)).add_(0.1))

    def forward(self, x):
        return self.mix(x) if self.reentrant is None else checkpoint(self.mix, x, use_reentrant=self.reentrant)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.Sequential(PostNorm(), PostNorm(reentrant=False), PostNorm(reentrant=True))
        self.batch_norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.batch_norm(self.blocks(self.embed(tokens)).flatten(0, 1)))


def train(config, *, dtype=torch.float32, before_step=lambda step: None):
    torch.manual_seed(3)
    model = Model().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    monitor = TrainerMon(config) if config is not None else None
    if monitor:
        monitor.set_monitor(model, optimizer)
    for step in range(STEPS):
        before_step(step)
        tokens = torch.randint(20, (3, 7))
        loss = nn.functional.cross_entropy(model(tokens).float(), tokens.flatten())
        loss.backward()
        if monitor:
            monitor.record(loss=loss)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if monitor:
        monitor.close()
    return losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}, model, optimizer


def assert_same_run(found, expected):
    assert found[0] == expected[0]
    assert all(torch.equal(tensor, expected[1][name]) for name, tensor in found[1].items())


def assert_nothing_left(model, optimizer):
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._backward_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    for parameter in model.parameters():
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_watched_run_is_bit_identical_and_nothing_is_left_behind(places, dtype):
    found = train(EVERYTHING, dtype=dtype)

    assert_same_run(found, train(None, dtype=dtype))
    assert_nothing_left(*found[2:])
    assert sorted(RankJournal(only_spool(places[0])).rows) == list(range(STEPS))


BORDERS = [
    (Slab, "take"),
    (Slab, "write_columns"),
    (Slab, "any_nonfinite"),
    (SlabRing, "begin"),
    (SlabRing, "ready"),
    (Collector, "take"),
    (Collector, "_seal"),
    (JournalWriter, "append_block"),
    (JournalWriter, "add_series"),
    (ControlPage, "beat"),
    (ControlPage, "epoch"),
    (MicroSteps, "_arm"),
    (MicroSteps, "_accumulated"),
    (MicroSteps, "_before_forward"),
    (MicroSteps, "_after_forward"),
    (MicroSteps, "_end_of_backward"),
    (GradientTaps, "backward_ended"),
    (GradientTaps, "_added"),
    (ModuleTaps, "_before"),
    (ModuleTaps, "_behind"),
    (ModuleTaps, "_gradient"),
    (ParameterTaps, "at_entry"),
    (ParameterTaps, "at_exit"),
    (StateTaps, "take_states"),
    (StateTaps, "take_updates"),
]


@pytest.mark.parametrize(("owner", "name"), BORDERS, ids=lambda value: getattr(value, "__name__", value))
def test_a_fault_at_any_border_leaves_the_run_as_it_is(places, monkeypatch, caplog, owner, name):
    original, armed = getattr(owner, name), []

    def broken(*args, **kwargs):
        if armed:
            raise RuntimeError("planted fault")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)
    with caplog.at_level(logging.ERROR, logger="trainermon"):
        found = train(EVERYTHING, before_step=lambda step: armed.append(step) if step == 1 else None)

    assert_same_run(found, train(None))
    assert_nothing_left(*found[2:])
    lines = [record.getMessage() for record in caplog.records if "planted fault" in record.getMessage()]
    assert lines == ["the monitor detached itself after RuntimeError: planted fault; training goes on unwatched"]


def test_an_unwritable_output_directory_is_refused_before_training(places, monkeypatch, tmp_path):
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("TRAINERMON_OUTPUT", str(blocked))

    with pytest.raises(AttachError, match="cannot be written"):
        train(EVERYTHING)


def test_a_run_directory_that_vanishes_changes_nothing(places):
    found = train(EVERYTHING, before_step=lambda step: step != 1 or _remove(places[1]))

    assert_same_run(found, train(None))


def test_a_spool_that_vanishes_changes_nothing(places):
    found = train(EVERYTHING, before_step=lambda step: step != 1 or _remove(places[0]))

    assert_same_run(found, train(None))


@pytest.mark.parametrize("attack", [lambda page: os.truncate(page, 0), lambda page: page.unlink()], ids=["cut", "rm"])
def test_a_control_page_that_somebody_spoils_changes_nothing(places, caplog, attack):
    """A store into a mapped page would end the process by SIGBUS."""
    found = train(EVERYTHING, before_step=lambda step: [attack(page) for page in places[0].glob("*/rank00000.page")])

    assert_same_run(found, train(None))
    assert sum("the control page" in record.getMessage() for record in caplog.records) <= 1


def _remove(folder):
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


VIEWS_WRITTEN_IN_PLACE = """
import torch
from torch import nn
from trainermon import TrainerMon

class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Tanh(), nn.Linear(4, 1)

    def forward(self, x):
        both = self.first(x)
        left, right = both[:, :4], both[:, 4:]
        left.mul_(2.0)
        return self.last(self.second(right) + left)

model = Halves()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with TrainerMon({"xy_distribution": True, "agent": {"start": False}}) as monitor:
    monitor.set_monitor(model, optimizer)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
print("alive")
"""


def test_views_whose_base_is_written_in_place_do_not_kill_the_process(places):
    """Torch 2.13 ends with a segmentation fault in `register_hook` on such a view, unless its grad_fn was read."""
    done = subprocess.run([sys.executable, "-c", VIEWS_WRITTEN_IN_PLACE], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
