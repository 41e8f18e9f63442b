"""The replay of a bad step, and dumps that a command orders: what is written, when, and that the run stays the same."""

import json
import logging
import os

import pytest
import torch
from torch import nn

from tests.journal_rows import RankJournal, only_spool
from tests.monitor.session.test_containment import EVERYTHING, STEPS, assert_nothing_left, assert_same_run, train
from trainermon import TrainerMon
from trainermon.core.control import ControlReader
from trainermon.core.values import Action, Command, DumpTask, Kind
from trainermon.dump.capture import ModuleCapture
from trainermon.dump.files.reader import read_dump
from trainermon.dump.files.sources import read_sources
from trainermon.dump.files.verdicts import Reproducibility
from trainermon.dump.writer import DumpWriter
from trainermon.monitor.session import phases
from trainermon.replay import replay as replay_module
from trainermon.replay.keep import ForwardKeeper
from trainermon.replay.state import RandomState


def events(places, kind):
    return [event for event in RankJournal(only_spool(places[0])).events if event["type"] == kind]


def run_directory(places):
    (directory,) = places[1].iterdir()
    return directory


def train_small(config, *, steps=6, each_step=lambda step, model: None):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with TrainerMon({"agent": {"start": False}} | config) as monitor:
        monitor.set_monitor(model, optimizer)
        for step in range(steps):
            each_step(step, model)
            model(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def numbers(dump):
    return {
        entry.key: [(tensor.slot, tensor.norm, tensor.mean, tensor.nans) for tensor in (*entry.inputs, *entry.outputs)]
        for entry in dump.entries
    }


def break_weight(step, model):
    if step == 2:
        with torch.no_grad():
            model[2].weight[0, 0] = float("inf")


def test_the_first_bad_step_is_replayed_once_with_the_dump_on(places):
    train_small({}, each_step=break_weight)

    (event,) = events(places, "replay")
    assert (event["step"], event["status"], event["micro_steps"]) == (2, "nonfinite", 1)
    dump = read_dump(run_directory(places) / event["dump"])
    bad = [entry.key for entry in dump.entries if any(tensor.nonfinite for tensor in entry.outputs)]
    assert bad[0] == "Module.2.Linear.forward.0"
    assert "Module.0.Linear.forward.0" not in bad
    assert dump.info.replay
    assert dump.info.complete


@pytest.mark.parametrize("kept", ["functions", "files", "off"])
def test_dumps_keep_the_source_code_that_the_configuration_says(places, kept):
    def break_and_order(step, model):
        break_weight(step, model)
        if step == 1:
            command = Command(id="alert-1", action=Action.DUMP, first_step=3)
            ControlReader(only_spool(places[0]), 0).send([command])

    train_small({"dump_source": kept}, each_step=break_and_order)

    for event in (*events(places, "replay"), *events(places, "dump")):
        files = read_sources(run_directory(places) / event["dump"]).files
        assert bool(files) == (kept != "off")
        if files:
            file = files[__file__]
            assert (sum(len(part.lines) for part in file.parts) == file.num_lines) == (kept == "files")


@pytest.mark.parametrize(
    ("config", "verdict", "kept"),
    [
        ({}, Reproducibility.REPRODUCIBLE, "kept_step.pt"),
        ({"classify": False, "keep_mb": 0}, None, "not kept on disk: replay.keep_mb is 0"),
        ({"keep_mb": 0.0001}, Reproducibility.REPRODUCIBLE, "MiB on disk, replay.keep_mb is"),
    ],
    ids=["default", "off", "budget"],
)
def test_a_bad_step_is_examined_and_kept_as_the_configuration_says(places, config, verdict, kept):
    train_small({"replay": config}, each_step=break_weight)

    (event,) = events(places, "replay")
    info = read_dump(run_directory(places) / event["dump"]).info
    assert info.reproducibility is verdict
    assert kept in info.kept


def test_rows_of_a_replayed_step_are_those_of_the_step_itself(places):
    train_small({"xy_distribution": True}, each_step=break_weight)

    journal = RankJournal(only_spool(places[0]))
    names = set(journal.of(1, Kind.ACTV))
    assert set(journal.of(2, Kind.ACTV)) == names
    assert set(journal.of(3, Kind.ACTV)) == names


def test_no_replay_where_it_is_switched_off(places):
    train_small({"replay": {"enabled": False}}, each_step=break_weight)

    assert events(places, "replay") == []
    assert not (run_directory(places) / "dumps").exists()


def test_replays_are_limited_in_number(places):
    def break_every_other(step, model):
        if step % 2:
            model[0].weight.register_hook(lambda gradient: gradient * float("nan") if step == model.now else gradient)
        with torch.no_grad():  # the optimizer has spoilt the weights: start afresh
            for parameter in model.parameters():
                parameter.copy_(torch.full_like(parameter, 0.1))
        model.now = step

    def spoil_state(step, model):
        break_every_other(step, model)

    train_small({"replay": {"max_replays": 2}}, steps=8, each_step=spoil_state)

    assert [event["step"] for event in events(places, "replay")] == [1, 3]


@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_an_ordered_dump_is_written_on_its_steps_and_changes_nothing(places, task):
    def order(step):
        if step == 1:
            command = Command(id="alert-1", action=Action.DUMP, first_step=2, num_steps=2, task=task)
            ControlReader(only_spool(places[0]), 0).send([command])

    found = train(EVERYTHING, before_step=order)

    assert_same_run(found, train(None))
    assert_nothing_left(*found[2:])
    told = events(places, "dump")
    assert [(event["step"], event["status"]) for event in told] == [(2, "written"), (3, "written")]
    dump = read_dump(run_directory(places) / told[0]["dump"])
    assert dump.info.complete
    assert any(entry.key.endswith("Linear.forward.0") for entry in dump.entries)
    assert any(tensor.data_path for entry in dump.entries for tensor in entry.outputs) == (task == "tensor")
    folder = run_directory(places) / told[0]["dump"]
    plain = json.loads((folder / "dump.json").read_text())
    assert plain["dump_data_dir"] == (str(folder / "dump_tensor_data") if task == "tensor" else None)


def test_orders_for_the_same_step_are_all_carried_out(places):
    def order(step):
        if step == 1:
            commands = [
                Command(id="alone", action=Action.DUMP, first_step=3),
                Command(id="alert-1", action=Action.DUMP, first_step=2, num_steps=2, task=DumpTask.TENSOR),
            ]
            ControlReader(only_spool(places[0]), 0).send(commands)

    found = train(EVERYTHING, before_step=order)

    assert_same_run(found, train(None))
    assert_nothing_left(*found[2:])
    told = {(event["command"], event["step"]): event for event in events(places, "dump")}
    assert {key: event["status"] for key, event in told.items()} == dict.fromkeys(
        [("alert-1", 2), ("alert-1", 3), ("alone", 3)], "written"
    )
    alone, beside = (read_dump(run_directory(places) / told[name, 3]["dump"]) for name in ("alone", "alert-1"))
    assert numbers(alone) == numbers(beside)


def test_more_orders_for_a_step_than_can_be_are_answered(places):
    def order(step, _model):
        if step == 1:
            commands = [Command(id=f"order-{i}", action=Action.DUMP, first_step=3) for i in range(6)]
            ControlReader(only_spool(places[0]), 0).send(commands)

    train_small({}, each_step=order)

    statuses = [event["status"] for event in events(places, "dump")]
    assert sorted(statuses) == ["failed"] * 2 + ["written"] * 4


def test_a_command_that_comes_too_late_is_answered_and_not_carried_out(places):
    def order(step, _model):
        if step == 3:
            ControlReader(only_spool(places[0]), 0).send(
                [Command(id="late", action=Action.DUMP, first_step=1, num_steps=9)]
            )

    train_small({}, each_step=order)

    assert [(event["command"], event["status"]) for event in events(places, "dump")] == [("late", "late")]


def test_stop_takes_back_what_was_ordered(places):
    reader = []

    def order(step, _model):
        if step == 0:
            reader.append(ControlReader(only_spool(places[0]), 0))
            reader[0].send([Command(id="later", action=Action.DUMP, first_step=4)])
        if step == 2:
            reader[0].send([Command(id="stop", action=Action.STOP, first_step=2, num_steps=9)])

    train_small({}, each_step=order)

    assert events(places, "dump") == []


def test_a_command_collects_steps_beside_the_schedule(places, monkeypatch):
    monkeypatch.setattr(phases, "LOOK_S", 0.0)  # a toy's steps are over before a rank looks again

    def order(step, _model):
        if step == 1:
            ControlReader(only_spool(places[0]), 0).send(
                [Command(id="c", action=Action.COLLECT, first_step=3, num_steps=2)]
            )

    train_small({"start_step": 100}, each_step=order)

    assert sorted(RankJournal(only_spool(places[0])).rows) == [3, 4]


BORDERS = [
    (RandomState, "current"),
    (ForwardKeeper, "_keep"),
    (DumpWriter, "__init__"),
    (DumpWriter, "record"),
    (DumpWriter, "close"),
    (ModuleCapture, "attach"),
    (replay_module, "rerun"),
]


@pytest.mark.parametrize(("owner", "name"), BORDERS, ids=lambda value: getattr(value, "__name__", value))
def test_a_fault_inside_the_replay_leaves_the_run_as_it_is(places, monkeypatch, caplog, owner, name):
    expected = train(None, before_step=lambda step: None)

    def broken(*args, **kwargs):
        raise RuntimeError("planted fault")

    monkeypatch.setattr(owner, name, broken)
    monkeypatch.setattr("trainermon.monitor.taps.collector.Collector.any_nonfinite", lambda *_: True)
    with caplog.at_level(logging.ERROR, logger="trainermon"):
        found = train(EVERYTHING)

    assert_same_run(found, expected)
    assert_nothing_left(*found[2:])
    (event,) = events(places, "replay")
    assert event["status"] in ("failed", "refused", "clean")
    assert sorted(RankJournal(only_spool(places[0])).rows) == list(range(STEPS))


def test_a_forced_replay_leaves_the_run_bit_identical(places, monkeypatch):
    expected = train(None)
    answers = iter([True, False] * STEPS)
    monkeypatch.setattr("trainermon.monitor.taps.collector.Collector.any_nonfinite", lambda *_: next(answers))

    found = train(EVERYTHING)

    assert_same_run(found, expected)
    assert [(event["step"], event["status"]) for event in events(places, "replay")] == [(0, "clean"), (2, "clean")]


def test_a_forked_child_leaves_an_ordered_dump_alone(places):
    def each_step(step, model):
        if step == 1:
            order = Command(id="order", action=Action.DUMP, first_step=2, task=DumpTask.TENSOR)
            ControlReader(only_spool(places[0]), 0).send([order])
        if step == 2:
            child = os.fork()
            if child == 0:
                for _ in range(2):
                    model(torch.randn(3, 4))
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0

    train_small({}, each_step=each_step)

    (event,) = events(places, "dump")
    files = [path.name for path in (run_directory(places) / event["dump"]).rglob("*.pt")]
    assert any(".forward.0." in name for name in files)
    assert not any(".forward.1." in name for name in files)
