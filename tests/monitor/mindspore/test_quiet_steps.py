"""Steps of MindSpore on which nothing is due: they are only counted, and what comes between has the right number."""

import numpy as np
import pytest

from tests.journal_rows import RankJournal, only_spool
from tests.monitor.mindspore.trainings import SmallTraining
from trainermon import TrainerMon
from trainermon.core.control import ControlReader, Phase
from trainermon.core.values import Kind
from trainermon.monitor.session import phases

pytestmark = pytest.mark.mindspore
STEPS = 24


def train(spool, between, **config):
    """Train with `between(step, monitor)` called before each step; return sums of a gradient, and the journal."""
    training, sums = SmallTraining("SGD"), {}
    with TrainerMon({"agent": {"start": False}, **config}) as monitor:
        monitor.set_monitor(training.net, optimizer=training.optimizer)
        for step in range(STEPS):
            between(step, monitor)
            training.step()
            sums[step] = float(training.gradients[0].asnumpy().astype(np.float64).sum())
    return sums, RankJournal(only_spool(spool))


def nothing(_step, _monitor):
    pass


@pytest.mark.parametrize("look_s", [0.0, 1000.0])
def test_steps_that_are_due_after_quiet_ones_have_their_own_numbers(spool, monkeypatch, look_s):
    monkeypatch.setattr(phases, "LOOK_S", look_s)
    sums, journal = train(spool, nothing, start_step=3, step_interval=7)

    found = {step: journal.of(step, Kind.GRAD_REDUCED)["first.weight"].sum for step in journal.rows}
    assert found == pytest.approx({step: sums[step] for step in (3, 10, 17)}, rel=1e-5)


def test_a_value_recorded_on_a_quiet_step_is_filed_under_it(spool, monkeypatch):
    monkeypatch.setattr(phases, "LOOK_S", 1000.0)

    def record(step, monitor):
        if step in {1, 6, 7, 13}:
            monitor.record(accuracy=float(step))

    _, journal = train(spool, record, step_interval=1000)

    found = {step: row for step in journal.rows if (row := journal.of(step, Kind.STEP).get("accuracy")) is not None}
    assert {step: row.sum for step, row in found.items()} == {step - 1: float(step) for step in (1, 6, 7, 13)}


@pytest.mark.parametrize(("look_s", "is_told"), [(0.0, True), (1000.0, False)])
def test_a_rank_tells_where_it_is_as_often_as_it_looks(spool, monkeypatch, look_s, is_told):
    monkeypatch.setattr(phases, "LOOK_S", look_s)
    beats = []

    def look(step, _monitor):
        beat = ControlReader(only_spool(spool), 0).heartbeat()
        beats.append((beat.step, beat.phase) == (step, Phase.STEP))

    train(spool, look, step_interval=1000)

    assert all(beats[3:]) if is_told else not any(beats[5:])
