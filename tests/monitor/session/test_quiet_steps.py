"""Steps on which nothing is due: they are only counted, and whatever comes between is filed under the right one."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.journal_rows import RankJournal, only_spool
from trainermon import TrainerMon
from trainermon.core.control import ControlReader, Phase
from trainermon.core.values import Kind
from trainermon.monitor.session import phases

STEPS = 24


class Nested(torch.optim.SGD):
    """An optimizer whose step calls that of its base, so that torch's hooks run twice in each."""

    def step(self, closure=None):
        return super().step(closure)


def train(places, between, *, optimizer=torch.optim.AdamW, **config):
    """Train with `between(step, monitor)` called in each step; return its gradients' sums by step, and the journal."""
    torch.manual_seed(0)
    model, sums = nn.Linear(4, 3), {}
    stepped = optimizer(model.parameters(), lr=0.01)
    with TrainerMon({"agent": {"start": False}, **config}) as monitor:
        monitor.set_monitor(model, stepped)
        for step in range(STEPS):
            model(torch.randn(5, 4)).square().sum().backward()
            sums[step] = float(model.weight.grad.double().sum())
            between(step, monitor)
            stepped.step()
            stepped.zero_grad()
    return sums, RankJournal(only_spool(places[0]))


def nothing(_step, _monitor):
    pass


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, Nested])
def test_steps_that_are_due_after_quiet_ones_have_their_own_numbers(places, optimizer):
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)  # torch hooks the step of a class at its first object
    sums, journal = train(places, nothing, optimizer=optimizer, start_step=3, step_interval=7)

    found = {step: journal.of(step, Kind.GRAD_REDUCED)["weight"].sum for step in journal.rows}
    assert found == pytest.approx({step: sums[step] for step in (3, 10, 17)})


def test_a_value_recorded_on_a_quiet_step_is_filed_under_it(places):
    def record(step, monitor):
        if step in {0, 5, 6, 12}:  # at first after a forward that is seen, so that it is known where the script records
            monitor.record(accuracy=float(step))

    _, journal = train(places, record, step_interval=1000)

    found = {step: journal.of(step, Kind.STEP)["accuracy"].sum for step in journal.rows}
    assert found == {0: 0.0, 5: 5.0, 6: 6.0, 12: 12.0}


class Recording:
    """A training of which some steps are recorded: before the backward, after it, or after the optimizer's step."""

    def __init__(self, place, steps, **config):
        model = nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        total = torch.zeros(())
        with TrainerMon({"agent": {"start": False}, **config}) as monitor:
            monitor.set_monitor(model, optimizer)
            for step in range(STEPS):
                model.eval()(torch.randn(5, 4))  # no step of its own
                output = model.train()(torch.randn(5, 4))
                total += step
                for now in ("before backward", "after backward", "after step"):
                    if now == place and step in steps:
                        monitor.record(number=float(step))
                        monitor.record(total=total)
                        total.zero_()
                    if now == "before backward":
                        output.square().sum().backward()
                    elif now == "after backward":
                        optimizer.step()
                        optimizer.zero_grad()


@pytest.mark.parametrize("config", [{"step_interval": 1000}, {"step_interval": 7}, {"start_step": 9}, {}])
@pytest.mark.parametrize(
    "steps", [range(5, STEPS, 6), range(0, STEPS, 10), range(STEPS), range(6, STEPS, 7), [STEPS - 1]]
)
@pytest.mark.parametrize("place", ["before backward", "after backward", "after step"])
def test_what_some_steps_record_is_filed_under_them(places, place, steps, config):
    Recording(place, steps, **config)

    journal = RankJournal(only_spool(places[0]))
    found = {step: journal.of(step, Kind.STEP) for step in journal.rows}
    numbers = {step: rows["number"].sum for step, rows in found.items() if "number" in rows}
    totals = [rows["total"].sum for rows in found.values() if "number" in rows]
    assert numbers == {step: float(step) for step in steps}
    assert sum(totals) == sum(range(steps[-1] + 1))


@pytest.mark.parametrize(("look_s", "is_told"), [(0.0, True), (1000.0, False)])
def test_a_rank_tells_where_it_is_as_often_as_it_looks(places, monkeypatch, look_s, is_told):
    monkeypatch.setattr(phases, "LOOK_S", look_s)
    beats = []

    def look(step, _monitor):
        beat = ControlReader(only_spool(places[0]), 0).heartbeat()
        beats.append((beat.step, beat.phase) == (step, Phase.STEP))

    train(places, look, step_interval=1000)

    assert all(beats[3:]) if is_told else not any(beats[5:])


@pytest.mark.parametrize(("look_s", "told"), [(0.0, [Phase.OPTIMIZER]), (1000.0, [])])
def test_the_optimizers_part_of_a_step_is_told_unless_something_was_just_now(monkeypatch, look_s, told):
    class Page:
        def __init__(self):
            self.beats = []

        def beat(self, _step, phase, _time_s):
            self.beats.append(phase)

    monkeypatch.setattr(phases, "LOOK_S", look_s)
    page: Any = Page()
    session_phases = phases.StepPhases(page, phases.CurrentStep(0))
    session_phases.step_began()

    session_phases.optimizer_begins()

    assert page.beats == [Phase.STEP, *told]
    session_phases.state_is_read()
    assert page.beats == [Phase.STEP, *told], "an optimizer that reads the model's state is no checkpoint"


def test_a_duration_is_that_of_one_step_after_quiet_ones(places, monkeypatch):
    clock_s = [100.0]
    monkeypatch.setattr("trainermon.monitor.session.phases.time.perf_counter", lambda: clock_s[0])
    monkeypatch.setattr("trainermon.monitor.session.step_hooks.perf_counter", lambda: clock_s[0])

    def go_on(step, _monitor):
        clock_s[0] += 1e-4 * (step + 1)

    _, journal = train(places, go_on, step_interval=9)

    assert journal.of(18, Kind.STEP)["duration_seconds"].sum == pytest.approx(19e-4)
