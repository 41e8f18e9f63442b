"""Every row belongs to the step in which its tensor was, however the model is entered and whatever is recorded when."""

import pytest
import torch
from torch import nn

from tests.journal_rows import RankJournal, only_spool
from tests.reference import assert_equal
from trainermon import TrainerMon
from trainermon.core.values import Kind

QUIET = {"agent": {"start": False}}
STEPS = 6


class Net(nn.Module):
    """May be entered by its forward or by a method of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def encode(self, x):
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x):
        return self.encode(x)


def by_call_then_by_method(model, step):
    return model if step == 0 else model.encode


def by_turns(model, step):
    return model.encode if step % 2 else model


def by_method(model, step):
    return model.encode


def compiled(model, step):
    if step == 1:
        model.compiled = [torch.compile(model, backend="eager")]
    return model.compiled[0] if step else model


def compiled_in_place(model, step):
    if step == 1:
        model.compile(backend="eager")
    return model


def with_hooks_cleared(model, step):
    if step == 1:
        model._forward_pre_hooks.clear()
        model._forward_hooks.clear()
    return model


ENTRIES = [by_call_then_by_method, by_turns, by_method, compiled, compiled_in_place, with_hooks_cleared]
RECORDS = {
    "never": lambda step: False,
    "always": lambda step: True,
    "seldom": lambda step: step % 3 == 0,
    "late": lambda step: step == 3,
}


def train(entry, records, config=QUIET, *, watched=True, bad_step=None):
    """Train, and return the gradients of every step as the loop saw them, and the weights that came out."""
    torch.manual_seed(0)
    model, gradients = Net(), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    monitor = TrainerMon(config)
    if watched:
        monitor.set_monitor(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(3, 4) * (float("inf") if step == bad_step else 1.0)
        loss = entry(model, step)(x).square().mean()
        loss.backward()
        gradients[step] = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        if records(step):
            monitor.record(loss=loss, when=step)
    monitor.close()
    return gradients, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.__name__)
def test_gradients_and_what_is_recorded_are_filed_under_their_own_step(places, entry, record):
    gradients, weights = train(entry, RECORDS[record])

    journal = RankJournal(only_spool(places[0]))
    assert sorted(journal.rows) == list(range(STEPS))
    for step in range(STEPS):
        for kind in (Kind.GRAD_REDUCED, Kind.GRAD_UNREDUCED):
            rows = journal.of(step, kind)
            assert rows.keys() == gradients[step].keys()
            for name, row in rows.items():
                assert_equal(row, gradients[step][name])
        recorded = [row.sum for key, row in journal.rows[step].items() if key.name == "when"]
        assert recorded == [step] * RECORDS[record](step)
    alone = train(entry, RECORDS[record], watched=False)[1]
    assert all(torch.equal(a, b) for a, b in zip(weights, alone, strict=True))


def test_what_is_recorded_between_steps_alone_is_of_the_step_that_has_ended(places):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainerMon(QUIET) as monitor:
        monitor.set_monitor(model, optimizer)
        for step in range(STEPS):
            loss = model(torch.randn(3, 4)).square().mean()
            monitor.record(loss=loss, before=step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 2:
                monitor.record(accuracy=step)
            if step == 3:
                monitor.record(before=4, too=4)  # of a name that stands before steps: the next one's

    journal = RankJournal(only_spool(places[0]))
    assert sorted(journal.rows) == list(range(STEPS))
    for step in range(STEPS):
        found = {key.name: row.sum for key, row in journal.rows[step].items()}
        assert found["before"] == step
        assert found.get("accuracy") == (step if step % 2 else None)
        assert found.get("too") == (4 if step == 4 else None)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # what a compiler has to say
def test_a_backward_pass_within_a_compiled_function_is_read(places, caplog):
    model, gradients = Net(), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def go_back(x):
        torch._dynamo.graph_break()
        model(x).square().mean().backward()

    compiled_back = torch.compile(go_back, backend="eager")
    with TrainerMon(QUIET) as monitor:
        monitor.set_monitor(model, optimizer)
        for step in range(STEPS):
            compiled_back(torch.randn(3, 4))
            gradients[step] = {name: p.grad.clone() for name, p in model.named_parameters()}
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()

    journal = RankJournal(only_spool(places[0]))
    for step in range(STEPS):
        for name, row in journal.of(step, Kind.GRAD_UNREDUCED).items():
            assert_equal(row, gradients[step][name])
        assert journal.of(step, Kind.GRAD_UNREDUCED).keys() == gradients[step].keys()
    assert "backward passes that were seen" not in caplog.text


@pytest.mark.parametrize("entry", [by_call_then_by_method, by_turns, compiled], ids=lambda entry: entry.__name__)
@pytest.mark.parametrize("record", ["never", "seldom"])
def test_a_bad_step_is_called_by_its_own_number(places, entry, record):
    train(entry, RECORDS[record], bad_step=3)

    journal = RankJournal(only_spool(places[0]))
    bad = [step for step in journal.rows if any(row.nonfinite for row in journal.of(step, Kind.GRAD_REDUCED).values())]
    assert bad == [3, 4, 5]
    assert {event["step"] for event in journal.events if event["type"] == "replay"} == {3}


def leave_in_the_middle(leave, *, records_after=False):
    """Train two steps, and then a third up to its backward; `leave` is what comes instead of the optimizer step."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainerMon(QUIET | {"xy_distribution": True}) as monitor:
        monitor.set_monitor(model, optimizer)
        for step in range(3):
            x = torch.randn(3, 4) * (float("nan") if step == 2 and leave == "nan" else 1.0)
            loss = model(x).square().mean()
            monitor.record(loss=loss)
            loss.backward()
            if step < 2:
                optimizer.step()
                optimizer.zero_grad()
        if leave == "zero_grad":
            optimizer.zero_grad()
        if leave == "error":
            raise RuntimeError("the script has failed")
        if records_after:
            monitor.record(accuracy=0.5)


def rows_after_the_last_step(places):
    return {key.label for key in RankJournal(only_spool(places[0])).rows.get(2, {})}


def test_a_last_batch_that_is_thrown_away_leaves_no_rows(places):
    leave_in_the_middle("zero_grad")

    assert rows_after_the_last_step(places) == set()


def test_of_a_step_that_never_came_what_the_script_recorded_is_left(places):
    leave_in_the_middle("close", records_after=True)

    assert rows_after_the_last_step(places) == {"loss", "accuracy"}


@pytest.mark.parametrize("leave", ["nan", "error"])
def test_a_step_that_the_training_ends_in_by_a_fault_keeps_its_rows(places, leave):
    if leave == "error":
        with pytest.raises(RuntimeError, match="the script has failed"):
            leave_in_the_middle(leave)
    else:
        leave_in_the_middle(leave)

    assert {"first.weight", "second.output.0", "loss"} <= rows_after_the_last_step(places)
