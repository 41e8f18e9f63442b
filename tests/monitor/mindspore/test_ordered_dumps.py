"""Dumps of MindSpore's steps that commands order: right, answered, and without a trace in training."""

import json

import mindspore as ms
import numpy as np
import pytest

from tests.journal_rows import RankJournal, only_spool
from tests.monitor.mindspore.trainings import SmallTraining, truth
from trainermon import TrainerMon
from trainermon.core.control import ControlReader
from trainermon.core.errors import DumpError
from trainermon.core.spool import OUTBOX_FOLDER
from trainermon.core.values import Action, Command, DumpTask
from trainermon.dump.files.reader import read_dump
from trainermon.dump.mindspore.writer import CellWriter
from trainermon.monitor.session import phases

pytestmark = pytest.mark.mindspore
STEPS = 6


@pytest.fixture(autouse=True)
def _looking(monkeypatch):
    monkeypatch.setattr(phases, "LOOK_S", 0.0)  # on quiet steps, too, a command is found at once


def train(spool, orders, *, mode="pynative", **config):
    """Train with `orders[step]` sent before that step; return the training, gradients by step, and events of dumps."""
    training, gradients = SmallTraining(mode=mode), []
    with TrainerMon({"agent": {"start": False}, "step_interval": 100, **config}) as monitor:
        monitor.set_monitor(training.net, optimizer=training.optimizer)
        if mode == "jit step":
            training.used = monitor.watch(training.optimizer)
        for step in range(STEPS):
            if step in orders:
                ControlReader(only_spool(spool), 0).send(orders[step])
            monitor.record(loss=training.step())
            gradients.append(training.gradients)
    told = [event for event in RankJournal(only_spool(spool)).events if event["type"] == "dump"]
    return training, gradients, told


def dump_of(spool, event):
    [run] = (spool.parent / "output").iterdir()
    return read_dump(run / event["dump"])


def dump(identity, step, **options):
    return Command(id=identity, action=Action.DUMP, first_step=step, **options)


@pytest.mark.parametrize("task", DumpTask)
def test_an_ordered_dump_is_written_on_its_steps_and_changes_nothing(spool, task):
    order = dump("alert-1", 3, num_steps=2, task=task, reason="a test's")
    training, gradients, told = train(spool, {1: [order]}, xy_distribution=True)

    bare = SmallTraining()
    for _ in range(STEPS):
        bare.step()
    assert training.bits() == bare.bits()
    assert not any(cell._forward_hook or cell._forward_pre_hook for _, cell in training.net.cells_and_names())
    assert [(event["command"], event["step"], event["status"]) for event in told] == [
        ("alert-1", 3, "written"),
        ("alert-1", 4, "written"),
    ]
    for event in told:
        found = dump_of(spool, event)
        assert (found.info.id, found.info.step, found.info.reason) == ("alert-1", event["step"], "a test's")
        assert (found.info.complete, found.info.errors, found.info.bytes_written) == (True, 0, event["bytes"])
        assert {"Cell.first.Dense.forward.1", "Cell.head.Dense.backward.0"} <= {entry.key for entry in found.entries}
        assert_gradients(found, dict(zip(training.optimizer.parameters, gradients[event["step"]], strict=True)), task)


def assert_gradients(found, gradients, task):
    """Fail unless the gradients of parameters in a dump are those that the optimizer was called with."""
    saved = {
        f"{entry.module}.{each.slot}": each
        for entry in found.entries
        if entry.direction == "parameters_grad"
        for each in entry.outputs
    }
    assert sorted(saved) == sorted(parameter.name for parameter in gradients)
    for parameter, gradient in gradients.items():
        each = saved[parameter.name]
        assert each.norm == pytest.approx(np.sqrt(truth(gradient)[4]), rel=1e-6)
        if task is DumpTask.TENSOR:
            np.testing.assert_array_equal(np.load(each.data_path), gradient.asnumpy())
        else:
            assert each.data_path is None


def test_a_scope_leaves_the_other_cells_out(spool):
    _, _, told = train(spool, {0: [dump("one", 2, scope=("he*",)), dump("none", 2, scope=("no.such",))]})

    refused, written = told
    assert (refused["status"], written["status"]) == ("failed", "written")
    assert "no module of the model is named by the scope" in refused["reason"]
    assert {entry.key.split(".")[1] for entry in dump_of(spool, written).entries} == {"head"}


def test_what_cannot_be_done_is_answered(spool):
    orders = {
        0: [dump("taken back", 2)],
        1: [Command(id="stop", action=Action.STOP, first_step=1), *(dump(f"order-{n}", 3) for n in range(5))],
        4: [dump("late", 2), dump("small", 5, max_bytes=9, task=DumpTask.TENSOR)],
    }

    _, _, told = train(spool, orders)

    assert {event["command"]: event["status"] for event in told} == {
        **{f"order-{number}": "written" for number in range(4)},
        "order-4": "failed",
        "late": "late",
        "small": "over quota",
    }


def test_of_a_compiled_step_there_is_no_dump(spool):
    _, _, [event] = train(spool, {1: [dump("compiled", 3)]}, mode="jit step")

    assert (event["step"], event["status"]) == (3, "failed")
    assert "dump in PyNative mode" in event["reason"]


def test_a_dump_that_training_leaves_unfinished_is_kept(spool):
    training = SmallTraining()
    with TrainerMon({"agent": {"start": False}}) as monitor:
        monitor.set_monitor(training.net, optimizer=training.optimizer)
        ControlReader(only_spool(spool), 0).send([dump("last", 1)])
        training.step()
        training.net(ms.Tensor(np.ones((1, 8), np.float32)))

    [event] = [event for event in RankJournal(only_spool(spool)).events if event["type"] == "dump"]
    assert (event["step"], event["status"]) == (1, "written")
    assert "Cell.head.Dense.forward.0" in {entry.key for entry in dump_of(spool, event).entries}


def end_before_a_dump(spool):
    """Order a dump of step 1, train step 0 alone; return what the journal says of the dump."""
    training = SmallTraining()
    with TrainerMon({"agent": {"start": False}}) as monitor:
        monitor.set_monitor(training.net, optimizer=training.optimizer)
        ControlReader(only_spool(spool), 0).send([dump("next", 1)])
        training.step()

    [event] = [event for event in RankJournal(only_spool(spool)).events if event["type"] == "dump"]
    return event


def test_a_step_that_never_came_has_no_dump(spool):
    event = end_before_a_dump(spool)

    assert (event["step"], event["status"]) == (1, "failed")
    assert "training ended before the step's first" in event["reason"]
    [run] = (spool.parent / "output").iterdir()
    assert not list(run.glob("dumps/**/*"))


def test_a_dump_without_a_call_that_cannot_be_finished_leaves_nothing(spool, monkeypatch):
    def fail(writer):
        raise DumpError("no space left")

    monkeypatch.setattr(CellWriter, "close", fail)
    event = end_before_a_dump(spool)

    assert (event["status"], event["reason"]) == ("failed", "no space left")
    assert not list((only_spool(spool) / OUTBOX_FOLDER).iterdir())


@pytest.mark.parametrize("key", ["xy_distribution", "print_struct", "mg_direction", "param_distribution"])
def test_an_edited_configuration_cannot_ask_for_what_a_compiled_step_hides(spool, key):
    text = json.dumps({"agent": {"start": False}, key: True})
    train(spool, {1: [Command(id="edit", action=Action.CONFIGURE, first_step=3, config=text)]}, mode="jit step")

    [event] = [event for event in RankJournal(only_spool(spool)).events if event["type"] == "configuration"]
    assert (event["status"], event["step"]) == ("refused", 3)
    assert f"{key} is true" in event["reason"]
