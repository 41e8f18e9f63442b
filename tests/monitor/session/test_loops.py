"""Training loops as people write them: whatever the order of things, a row is the value of its own step."""

import os

import pytest
import torch
from torch import nn

from tests.journal_rows import RankJournal, only_spool
from trainermon import TrainerMon
from trainermon.core.values import Kind

QUIET = {"agent": {"start": False}}
STEPS = 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))

    def loss(self, x):
        return self(x).square().mean()


def parts(optimizer=torch.optim.AdamW):
    torch.manual_seed(0)
    model = Net()
    return model, optimizer(model.parameters(), lr=0.01)


def norms(journal, kind=Kind.GRAD_REDUCED):
    return {step: sum(row.sum_sq for row in journal.of(step, kind).values()) ** 0.5 for step in journal.rows}


def norm_of(gradients):
    return float(torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt())


def watched(loop, config=QUIET, optimizer=torch.optim.AdamW):
    model, watched_optimizer = parts(optimizer)
    with TrainerMon(config) as monitor:
        monitor.set_monitor(model, watched_optimizer)
        return loop(model, watched_optimizer, monitor)


def backward_of_loss_method(model, x):
    model.loss(x).backward()


def backward_of_forward_method(model, x):
    model.forward(x).square().mean().backward()


def backward_of_submodules(model, x):
    model.second(torch.tanh(model.first(x))).square().mean().backward()


def backward_with_a_penalty(model, x):
    x = x.requires_grad_()
    loss = model(x).square().mean()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()


def backward_after_another_that_failed(model, x):
    failing = model(x).square().mean()
    failing.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing.backward()
    model.zero_grad()
    model(x).square().mean().backward()


WAYS = [
    backward_of_loss_method,
    backward_of_forward_method,
    backward_of_submodules,
    backward_with_a_penalty,
    backward_after_another_that_failed,
]


@pytest.mark.parametrize("backward", WAYS, ids=lambda way: way.__name__)
def test_gradients_are_those_before_clipping_however_the_backward_comes_about(places, backward):
    def loop(model, optimizer, monitor):
        expected = {}
        for step in range(STEPS):
            backward(model, torch.randn(3, 4))
            monitor.record(loss=float(step))
            expected[step] = norm_of([p.grad for p in model.parameters()])
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            torch.autograd.grad(model(torch.randn(3, 4)).sum(), model.first.weight)  # a look at something else
            optimizer.step()
            optimizer.zero_grad()
        return expected

    expected = watched(loop)

    journal = RankJournal(only_spool(places[0]))
    assert norms(journal) == pytest.approx(expected, rel=1e-6)
    assert {step: journal.of(step, Kind.LOSS)["loss"].sum for step in journal.rows} == {
        s: float(s) for s in range(STEPS)
    }


@pytest.mark.parametrize("reset", [True, False], ids=["zero_grad", "kept"])
def test_gradients_that_the_script_assigns_are_those_of_the_step(places, caplog, reset):
    def loop(model, optimizer, _):
        expected = {}
        for step in range(STEPS):
            gradients = torch.autograd.grad(model.loss(torch.randn(3, 4)), list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            expected[step] = norm_of(gradients)
            optimizer.step()
            if reset:
                optimizer.zero_grad()
        return expected

    expected = watched(loop)

    assert norms(RankJournal(only_spool(places[0]))) == pytest.approx(expected, rel=1e-6)
    assert "its gradients were read at the optimizer step, after any clipping" in caplog.text


def test_a_closure_is_looked_at_before_the_optimizer_uses_its_gradients(places):
    def loop(model, optimizer, _):
        for step in range(3):

            def closure(now=step):
                optimizer.zero_grad()
                loss = model(torch.randn(3, 4) * (float("nan") if now == 1 else 1.0)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)

    watched(loop)

    (event,) = [event for event in RankJournal(only_spool(places[0])).events if event["type"] == "replay"]
    assert (event["step"], event["status"]) == (1, "nonfinite")


def test_a_batch_that_the_script_skips_leaves_no_rows_but_is_replayed_if_it_was_bad(places):
    def loop(model, optimizer, _):
        for batch in range(5):
            x = torch.randn(3, 4) * (float("inf") if batch == 2 else 1.0)
            model.loss(x).backward()
            if batch == 2:
                optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()

    watched(loop)

    journal = RankJournal(only_spool(places[0]))
    assert sorted(journal.rows) == [0, 1, 2, 3]
    assert all(row.nonfinite == 0 for step in journal.rows for row in journal.of(step, Kind.GRAD_REDUCED).values())
    (event,) = [event for event in journal.events if event["type"] == "replay"]
    assert (event["step"], event["status"], event["micro_steps"]) == (2, "nonfinite", 1)


def test_what_a_loss_scaler_skips_is_not_replayed(places):
    def loop(model, optimizer, _):
        for batch in range(3):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(torch.randn(3, 4) * (float("inf") if batch == 1 else 1.0)).square().mean()
            loss.backward()
            if batch != 1:
                optimizer.step()
            optimizer.zero_grad()

    watched(loop)

    assert [event for event in RankJournal(only_spool(places[0])).events if event["type"] == "replay"] == []


CONFIGS = [{"start_step": 3}, {"step_interval": 3}, {"collect_times": 0}, {"module_ranks": [5]}]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_loss_is_filed_under_its_step_whatever_is_due(places, place, config):
    def loop(model, optimizer, monitor):
        for step in range(6):
            model.loss(torch.randn(3, 4)).backward()
            if place == "before":
                monitor.record(loss=float(step))
            optimizer.step()
            optimizer.zero_grad()
            if place == "after":
                monitor.record(loss=float(step))

    watched(loop, QUIET | config)

    journal = RankJournal(only_spool(places[0]))
    assert {step: journal.of(step, Kind.LOSS)["loss"].sum for step in journal.rows} == {s: float(s) for s in range(6)}


@pytest.mark.parametrize("place", ["before", "after"])
def test_each_step_is_one_block_wherever_the_loss_is_recorded(places, place, monkeypatch):
    blocks = []
    append = "trainermon.monitor.taps.collector.JournalWriter.append_block"
    monkeypatch.setattr(append, lambda _, block, *_frame: blocks.append(block.step))

    def loop(model, optimizer, monitor):
        for step in range(4):
            model.loss(torch.randn(3, 4)).backward()
            if place == "before":
                monitor.record(loss=float(step))
            optimizer.step()
            optimizer.zero_grad()
            if place == "after":
                monitor.record(loss=float(step))

    watched(loop)

    assert blocks == [0, 1, 2, 3]


@pytest.mark.parametrize("interval", [1, 2])
def test_parameters_of_a_fused_optimizer_are_read_right(places, interval):
    def loop(model, optimizer, _):
        expected = {}
        for step in range(4):
            expected[step] = norm_of([p.detach() for p in model.parameters()])
            model.loss(torch.randn(3, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return expected

    config = QUIET | {"param_distribution": True, "step_interval": interval}
    expected = watched(loop, config, lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, fused=True))

    found = norms(RankJournal(only_spool(places[0])), Kind.PARAM_ORIGIN)
    assert found == pytest.approx({step: expected[step] for step in range(0, 4, interval)}, rel=1e-6)


def test_the_update_follows_groups_that_were_loaded_or_added_later(places):
    def loop(model, optimizer, _):
        state = optimizer.state_dict()
        state["param_groups"][0]["betas"] = (0.5, 0.5)
        optimizer.load_state_dict(state)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        model.loss(torch.randn(3, 4)).backward()
        optimizer.step()
        first = optimizer.state[model.first.weight]
        return float((first["exp_avg"] / 0.5 / ((first["exp_avg_sq"] / 0.5).sqrt() + 1e-8)).norm())

    expected = watched(loop, QUIET | {"ur_distribution": True})

    assert RankJournal(only_spool(places[0])).of(0, Kind.UPDATE)["first.weight"].norm == pytest.approx(
        expected, rel=1e-5
    )


def test_sparse_gradients_count_every_element(places):
    model = nn.Embedding(6, 5, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainerMon(QUIET) as monitor:
        monitor.set_monitor(model, optimizer)
        model(torch.tensor([1, 1, 4])).sum().backward()
        optimizer.step()

    row = RankJournal(only_spool(places[0])).of(0, Kind.GRAD_REDUCED)["weight"]
    assert (row.count, row.zeros, row.sum, row.max) == (30, 20, 15, 2)


def test_a_value_that_is_no_number_is_left_out_and_named(places, caplog):
    def loop(model, optimizer, monitor):
        for _ in range(2):
            model.loss(torch.randn(3, 4)).backward()
            monitor.record(loss=1.0, accuracy="high", other={})
            optimizer.step()

    watched(loop)

    assert caplog.text.count("record(accuracy=…) is left out: found str, expected a number or a tensor") == 1
    assert sorted(RankJournal(only_spool(places[0])).rows) == [0, 1]


def test_losses_of_a_mapping_are_recorded_by_their_names(places):
    def loop(model, optimizer, monitor):
        for step in range(2):
            model.loss(torch.randn(3, 4)).backward()
            monitor.record(loss={"loss": 1.0 + step, "lm": torch.tensor(0.75), 2: 0.25}, accuracy=0.5)
            optimizer.step()

    watched(loop)

    journal = RankJournal(only_spool(places[0]))
    assert [journal.of(step, Kind.LOSS)["loss"].sum for step in (0, 1)] == [1, 2]
    found = {name: row.sum for name, row in journal.of(1, Kind.STEP).items() if name in ("lm", "2", "accuracy")}
    assert found == {"lm": 0.75, "2": 0.25, "accuracy": 0.5}


def test_an_optimizer_that_is_not_used_any_more_costs_no_memory(places, caplog, monkeypatch):
    monkeypatch.setattr("trainermon.monitor.session.step_loop.MAX_BACKWARDS", 5)

    def loop(model, _, __):
        other = torch.optim.SGD([*model.parameters()][:1], lr=0.1)  # one that holds them all would be followed
        for _ in range(20):
            model.loss(torch.randn(3, 4)).backward()
            other.step()
        return len(model._forward_hooks)

    assert watched(loop) == 0
    assert "call set_monitor with the optimizer that is used" in caplog.text
    assert RankJournal(only_spool(places[0])).rows == {}


def test_a_forked_child_leaves_the_run_alone(places):
    def loop(model, optimizer, monitor):
        model.loss(torch.randn(3, 4)).backward()
        optimizer.step()
        child = os.fork()
        if child == 0:
            monitor.record(loss=1.0)
            (model.loss(torch.randn(3, 4)) * float("nan")).backward()
            optimizer.step()
            monitor.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        optimizer.step()

    watched(loop)

    assert sorted(RankJournal(only_spool(places[0])).rows) == [0, 1]
    assert not list(places[1].glob("*/dumps"))


def test_a_set_monitor_that_failed_can_be_tried_again(places, monkeypatch):
    model, optimizer = parts()
    monitor = TrainerMon(QUIET | {"run_id": "again"})
    with monkeypatch.context() as broken:
        broken.setattr("trainermon.monitor.session.attached_rank.write_run_files", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            monitor.set_monitor(model, optimizer)

    monitor.set_monitor(model, optimizer)
    monitor.close()


@pytest.mark.parametrize("is_recorded_again", [False, True])
def test_a_loss_recorded_before_the_first_of_two_backwards_is_that_of_the_step(places, is_recorded_again):
    """As in SAM, whose first gradients are used and cleared before the optimizer's step."""
    expected = []

    def loop(model, optimizer, monitor):
        for _ in range(STEPS):
            x = torch.randn(8, 4)
            for attempt in range(2):
                loss = model.loss(x) + attempt
                if attempt == 0 or is_recorded_again:
                    monitor.record(loss=loss)
                    recorded = loss.item()
                loss.backward()
                if attempt == 0:
                    optimizer.zero_grad()
            expected.append(recorded)
            optimizer.step()
            optimizer.zero_grad()

    watched(loop)

    journal = RankJournal(only_spool(places[0]))
    assert [journal.of(step, Kind.LOSS)["loss"].max for step in range(STEPS)] == pytest.approx(expected)
