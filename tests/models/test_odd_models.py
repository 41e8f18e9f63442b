"""Models, optimizers and scripts that nobody expects: nothing of the training changes, and nothing is lost unsaid."""

import contextlib

import pytest
import torch
from torch import nn

from tests.journal_rows import RankJournal
from tests.models.truth import assert_rows_are_the_truth, run_twice
from trainermon import TrainerMon
from trainermon.core.errors import AttachError
from trainermon.core.values import Kind

STEPS = 3
ALL = {"checksum_interval": 1, "mg_direction": True, "print_struct": True, "recording_l2_features": True}
WITHOUT_STATES = {"mv_distribution": False, "mg_direction": False}
NO_LOSS = (Kind.LOSS,)


def net():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(watch, model, optimizer, *, batch=lambda: torch.randn(5, 4), steps=STEPS, before=lambda step: None):
    for step in range(steps):
        before(step)
        watch.backward(model(batch()).square().mean())
        with watch.step():
            optimizer.step()
        optimizer.zero_grad()


class StepOfItsBase(torch.optim.SGD):
    """Calls the step of its base, around which torch calls the hooks once more; a step may be interrupted."""

    interrupted = False

    def step(self, closure=None):
        if self.interrupted:
            raise KeyboardInterrupt
        return super().step(closure)


def subclass_of_an_optimizer(watch):
    model = net()
    sgd(model)  # only classes of which there was an object have hooks
    optimizer = StepOfItsBase(model.parameters(), lr=0.1, momentum=0.9)
    watch.start(model, optimizer)
    train(watch, model, optimizer)
    optimizer.interrupted = True
    watch.backward(model(torch.randn(5, 4)).square().mean())
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    optimizer.interrupted = False
    optimizer.zero_grad()
    watch.skipped()
    train(watch, model, optimizer)


def groups_that_change(watch):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    watch.start(model, optimizer)

    def change(step):
        if step == 1:
            optimizer.param_groups[0]["params"] = list(model.parameters())[:2]
        if step == 2:
            optimizer.param_groups.clear()

    train(watch, model, optimizer, before=change)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.mix = nn.Linear(4, 3), nn.Parameter(torch.eye(4).to_sparse())

    def forward(self, x):
        return self.linear(torch.sparse.mm(self.mix, x.t()).t())


def sparse_parameter(watch):
    model = Sparse()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch.start(model, optimizer)
    train(watch, model, optimizer)


class Traced(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.jit.trace(net(), torch.randn(5, 4)), nn.Linear(3, 3)

    def forward(self, x):
        return self.outer(self.inner(x))


def traced_part(watch):
    model = Traced()
    optimizer = sgd(model)
    watch.start(model, optimizer)
    train(watch, model, optimizer)


def default_device_elsewhere(watch):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with torch.device("meta"):  # as "cuda" is to what lies on the CPU
        watch.start(model, optimizer)
        train(watch, model, optimizer, batch=lambda: torch.ones(5, 4, device="cpu"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit.trace
@pytest.mark.parametrize(
    ("loop", "config", "without"),
    [
        (subclass_of_an_optimizer, {}, ()),
        (groups_that_change, {}, (Kind.STATE, Kind.EXP_AVG, Kind.EXP_AVG_SQ)),
        (sparse_parameter, WITHOUT_STATES, ()),
        (traced_part, {}, (Kind.ACTV, Kind.ACTV_GRAD)),
        (default_device_elsewhere, {"ur_distribution": True}, ()),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_every_row_is_the_truth(tmp_path, loop, config, without):
    truth, journal = run_twice(loop, tmp_path, ALL | config)

    assert_rows_are_the_truth(truth, journal, without=(*NO_LOSS, *without))


class Nested(nn.Module):
    def __init__(self, layout):
        super().__init__()
        self.layout, self.one, self.other = layout, nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x):
        pieces = torch.nested.nested_tensor([x[:2], x[2:]], layout=self.layout)
        return torch.cat(list(self.other(self.one(pieces)).unbind()))


class OddState(torch.optim.SGD):
    """Keeps tensors that cannot be read, and a learning rate that is no number."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] |= {"csr": torch.eye(3).to_sparse_csr(), "meta": torch.ones(2, 2, device="meta")}


def odd_state(model):
    optimizer = OddState(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    optimizer.param_groups[1]["lr"] = "by itself"
    return optimizer


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(
    ("make", "optimize", "config"),
    [
        (lambda: Nested(torch.strided), sgd, {}),
        (lambda: Nested(torch.jagged), sgd, {}),
        (net, odd_state, {}),
        (lambda: nn.Sequential(torch.jit.script(net()), nn.Linear(3, 3)), sgd, {"xy_distribution": False}),
    ],
    ids=["nested", "jagged", "odd state", "scripted part"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit.script
def test_what_cannot_be_read_is_left_out_and_the_rest_is_there(tmp_path, make, optimize, config):
    def loop(watch):
        model = make()
        optimizer = optimize(model)
        watch.start(model, optimizer)
        train(watch, model, optimizer)

    truth, journal = run_twice(loop, tmp_path, ALL | config)

    left_out = (Kind.ACTV, Kind.ACTV_GRAD, Kind.STATE, Kind.LOSS)
    assert_rows_are_the_truth(truth, journal, without=left_out)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("what", ["scripted", "compressed"])
def test_a_model_that_cannot_be_watched_is_refused_in_words(tmp_path, what):
    model = net()
    if what == "compressed":
        model.odd = nn.Parameter(torch.eye(2).to_sparse_csr())
    optimizer = sgd(model)
    model = torch.jit.script(model) if what == "scripted" else model
    config = {"agent": {"start": False}, "spool_dir": str(tmp_path), "output_dir": str(tmp_path)}

    expected = "takes no hooks" if what == "scripted" else r"parameter odd is torch\.sparse_csr, expected"
    with pytest.raises(AttachError, match=expected):
        TrainerMon(config).set_monitor(model, optimizer)


@pytest.mark.filterwarnings("ignore")  # what a compiler has to say
@pytest.mark.parametrize("compiled", ["optimizer step", "whole step"])
def test_steps_inside_of_compiled_code_are_told(tmp_path, caplog, compiled):
    model = net()
    optimizer = sgd(model)
    config = {"agent": {"start": False}, "run_id": "run", "spool_dir": str(tmp_path), "output_dir": str(tmp_path)}
    monitor = TrainerMon(config)
    monitor.set_monitor(model, optimizer)

    def step():
        model(torch.ones(5, 4)).square().mean().backward()
        optimizer_step()
        optimizer.zero_grad()

    optimizer_step = optimizer.step
    if compiled == "optimizer step":
        optimizer_step = torch.compile(optimizer.step, backend="aot_eager")
    else:
        step = torch.compile(step, backend="aot_eager")
    for _ in range(STEPS):
        step()
    monitor.close()

    assert caplog.text.count("steps inside of torch.compile are not seen") == 1
    warnings = [event["message"] for event in RankJournal(tmp_path / "run").events if event["type"] == "warning"]
    assert any("steps inside of torch.compile are not seen" in message for message in warnings)


def test_a_script_that_accumulates_is_not_told_of_unseen_steps(tmp_path, caplog):
    def loop(watch):
        model = net()
        optimizer = sgd(model)
        watch.start(model, optimizer, 2)
        for _ in range(STEPS):
            for _ in range(2):
                watch.backward(model(torch.randn(5, 4)).square().mean())
            with watch.step():
                optimizer.step()
            optimizer.zero_grad()
            with contextlib.suppress(RuntimeError):
                model(torch.randn(5, 3))

    run_twice(loop, tmp_path, {})

    assert "are not seen" not in caplog.text
