"""How `TrainerMon` is called, and what it refuses before training starts."""

import json
import logging
import sys
from typing import Any

import pytest
import torch
from torch import nn

import trainermon
from tests.journal_rows import RankJournal, only_spool
from trainermon import TrainerMon
from trainermon.agent.lifecycle.lock import AgentStatus, ToldAlert, write_status
from trainermon.core import launcher, spool
from trainermon.core.errors import AttachError, ConfigError
from trainermon.core.values import Coordinates, Kind
from trainermon.monitor.session import agent_process
from trainermon.monitor.session.agent_process import AgentProcess
from trainermon.monitor.session.attached_rank import AttachedRank

QUIET = {"agent": {"start": False}}


def parts():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters())


def step(model, optimizer):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    "call",
    [
        lambda monitor, model, optimizer: monitor.set_monitor(model, optimizer),
        lambda monitor, model, optimizer: monitor.set_monitor(model, optimizer, 2),
        lambda monitor, model, optimizer: monitor.set_monitor(model, 2, optimizer),
        lambda monitor, model, optimizer: monitor.set_monitor(model, grad_acc_steps=2, optimizer=optimizer),
        lambda monitor, model, optimizer: monitor.set_monitor([model], optimizer, 1, None, None, 0),
    ],
)
def test_both_orders_of_arguments_are_understood(places, call):
    model, optimizer = parts()
    with TrainerMon(QUIET) as monitor:
        call(monitor, model, optimizer)
        step(model, optimizer)

    assert 0 in RankJournal(only_spool(places[0])).rows


def test_the_module_level_function_returns_a_monitor(places, monkeypatch):
    model, optimizer = parts()

    monitor = trainermon.monitor.set_monitor(model, optimizer, start_iteration=9, config_file_path=QUIET)
    step(model, optimizer)
    monitor.close()

    assert sorted(RankJournal(only_spool(places[0])).rows) == [9]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"targets": ["2.weigth"]}, "'2.weigth' names no module or parameter of the model; did you mean '2.weight'"),
        ({"exclude": ["~layers"]}, "exclude: '~layers' names no module or parameter of the model"),
    ],
)
def test_a_wish_that_the_model_cannot_meet_is_refused(places, config, message):
    model, _ = parts()
    with pytest.raises(ConfigError, match=message):
        TrainerMon(QUIET | config).set_monitor(model, torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize(
    ("make", "lacking", "reason"),
    [
        (
            torch.optim.SGD,
            {"mv_distribution", "mg_direction", "ur_distribution"},
            "SGD without momentum keeps no state",
        ),
        (torch.optim.RMSprop, {"ur_distribution"}, "no formula is known for RMSprop"),
        (torch.optim.Adam, set(), ""),
    ],
)
def test_what_the_optimizer_cannot_give_is_said_in_one_line_and_left_out(places, caplog, make, lacking, reason):
    asked = {"mv_distribution": True, "mg_direction": True, "ur_distribution": True}
    model, _ = parts()
    optimizer = make(model.parameters(), lr=0.01)
    with TrainerMon(QUIET | asked | {"histograms": {"kinds": ["grad_reduced", "exp_avg"]}}) as monitor:
        monitor.set_monitor(model, optimizer)
        step(model, optimizer)

    lines = [record.getMessage() for record in caplog.records if "cannot give" in record.getMessage()]
    assert len(lines) == bool(lacking)
    assert all(reason in line for line in lines)
    assert {key for key in asked for line in lines if key in line} == lacking
    kinds = {key.kind for key in RankJournal(only_spool(places[0])).rows[0]}
    assert Kind.GRAD_REDUCED in kinds
    assert (Kind.UPDATE in kinds) == (make is torch.optim.Adam)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda m, o: ("model", o), "model: found str, expected a torch.nn.Module"),
        (lambda m, o: ([], o), "model: found an empty list"),
        (lambda m, o: (m, None), "with optimizer builtins.NoneType"),
        (lambda m, o: (m, o, 0), "grad_acc_steps: found 0, expected a whole number, 1 or more"),
        (lambda m, o: (m.requires_grad_(requires_grad=False), o), "no parameter requires a gradient"),
    ],
)
def test_a_wrong_argument_is_refused(places, arguments, message):
    with pytest.raises(AttachError, match=message):
        TrainerMon(QUIET).set_monitor(*arguments(*parts()))


@pytest.mark.parametrize(("kind", "is_disk"), [("ext4", True), ("xfs", True), ("tmpfs", False), ("", False)])
def test_a_spool_on_a_disk_is_told(places, monkeypatch, caplog, kind, is_disk):
    caplog.set_level(logging.INFO, "trainermon")
    monkeypatch.setattr(spool, "_read_mountinfo", lambda: f"1 0 8:1 / / rw - {kind} /dev/sda1 rw" if kind else "")
    with TrainerMon(QUIET) as monitor:
        monitor.set_monitor(*parts())

    assert caplog.text.count("training goes on and rows wait") == is_disk
    assert (f"({kind}, {places[0]}" in caplog.text) == is_disk
    assert RankJournal(only_spool(places[0])).events == []  # a setting is no fault of the run


def test_a_second_set_monitor_is_refused(places):
    with TrainerMon(QUIET) as monitor:
        monitor.set_monitor(*parts())
        with pytest.raises(AttachError, match="set_monitor was called already"):
            monitor.set_monitor(*parts())


def test_activations_of_a_compiled_model_are_refused(places):
    model, optimizer = parts()
    compiled: Any = torch.compile(model, backend="eager")
    with pytest.raises(ConfigError, match="lie in compiled code"):
        TrainerMon(QUIET | {"xy_distribution": True}).set_monitor(compiled, optimizer)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"targets": ["2"]}, {"2", "2.weight", "2.bias"}),
        ({"targets": [r"~^[13-9]|weight$"]}, {"1", "0.weight", "2.weight"}),
        ({"exclude": ["0", r"~bias$"]}, {"1", "2", "2.weight"}),
        ({"targets": ["2"], "exclude": ["*.weight"]}, {"2", "2.bias"}),
    ],
)
def test_parameters_and_modules_are_chosen_and_left_out(places, chosen, expected):
    model, optimizer = parts()
    with TrainerMon(QUIET | chosen | {"xy_distribution": True}) as monitor:
        monitor.set_monitor(model, optimizer)
        step(model, optimizer)

    names = {key.name for key in RankJournal(only_spool(places[0])).rows[0] if key.kind is not Kind.STEP}
    assert names == expected


def test_ranks_that_are_not_chosen_collect_nothing(places):
    model, optimizer = parts()
    with TrainerMon(QUIET | {"module_ranks": [1]}) as monitor:
        monitor.set_monitor(model, optimizer)
        step(model, optimizer)

    assert RankJournal(only_spool(places[0])).rows == {}


def test_a_closure_optimizer_and_a_later_scheduler_are_watched(places):
    model, _ = parts()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = torch.randn(2, 4)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    with TrainerMon(QUIET) as monitor:
        monitor.set_monitor(model, optimizer)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        for _ in range(2):
            optimizer.step(closure)
            scheduler.step()

    journal = RankJournal(only_spool(places[0]))
    assert sorted(journal.rows) == [0, 1]
    assert {"0.weight", "2.bias"} <= set(journal.of(0, "grad_reduced"))


def test_run_files_say_who_runs_and_hold_no_more_of_the_environment_than_settings_that_are_known(places, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("SOMETHING_ELSE", "hunter2")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1", "--bf16", "--api-key", "hunter2", "--as=hunter2"])
    model, optimizer = parts()
    with TrainerMon(QUIET) as monitor:
        monitor.set_monitor(model, optimizer)
        directory = monitor.run_directory

    rank = json.loads((directory / "ranks" / "rank00000.json").read_text())
    assert (rank["parameters"], rank["modules"]) == (49, ["0", "1", "2"])
    assert rank["accelerator"] is None
    assert rank["environment"]["variables"]["NCCL_ALGO"] == "Ring"
    assert rank["environment"]["torch"]["version"] == torch.__version__
    assert rank["environment"]["arguments"] == [
        *("--lr", "0.1", "--bf16", "--api-key", "<redacted>", "--as=<redacted>")
    ]
    kept = rank["environment"]["hyperparameters"]
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    assert kept.pop("optimizer.class") == type(optimizer).__name__
    assert kept == json.loads(json.dumps({f"optimizer.{name}": value for name, value in groups[0].items()}))
    assert "SOMETHING_ELSE" not in str(rank)
    assert json.loads((directory / "run.json").read_text())["world_size"] == 1
    written = [path for path in directory.rglob("*") if path.is_file()]
    assert not any("hunter2" in path.read_text() for path in written)
    assert {oct(path.stat().st_mode & 0o777) for path in written} == {"0o600"}


def test_a_run_keeps_no_setting_if_it_is_told_so(places):
    model, optimizer = parts()
    with TrainerMon({**QUIET, "environment": False}) as monitor:
        monitor.set_monitor(model, optimizer)
        directory = monitor.run_directory

    assert "environment" not in json.loads((directory / "ranks" / "rank00000.json").read_text())


def test_what_has_no_effect_stands_in_the_log_and_in_the_run_file(places, caplog):
    model, optimizer = parts()
    with TrainerMon({**QUIET, "ops": ["norm"], "eps": 1e-6, "forward_only": True}) as monitor:
        monitor.set_monitor(model, optimizer)
        notes = json.loads((monitor.run_directory / "run.json").read_text())["config_notes"]

    assert any(note.startswith("eps has no effect") for note in notes)
    assert any(note.startswith("forward_only has no effect: xy_distribution is false") for note in notes)
    assert set(notes) <= {record.getMessage() for record in caplog.records}


def test_parameters_that_no_optimizer_has_are_named_in_log_and_run_file(places, caplog):
    model, _ = parts()
    model[2].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model[0].parameters())
    with TrainerMon(QUIET) as monitor:
        monitor.set_monitor(model, optimizer)
        notes = json.loads((monitor.run_directory / "run.json").read_text())["config_notes"]
        step(model, optimizer)

    message = "1 of 3 parameters that require a gradient are in no group of the watched optimizer"
    assert [note for note in notes if message in note and ": 2.weight;" in note]
    assert message in caplog.text


def test_a_model_whose_parameters_all_have_an_optimizer_gives_no_note(places, caplog):
    model, optimizer = parts()
    with TrainerMon(QUIET) as monitor:
        monitor.set_monitor(model, optimizer)

    assert "in no group" not in caplog.text


def told(caplog, monkeypatch, *, module=nn.Identity, record=False, num_steps=3, rank=0):
    """Return what the log says of a short training whose model ends in `module`; no agent is started."""
    monkeypatch.setattr(AgentProcess, "start", lambda *_, **__: None)
    monkeypatch.setattr(AgentProcess, "wait", lambda *_: None)
    model = nn.Sequential(nn.Linear(4, 8), module())
    optimizer = torch.optim.SGD(model.parameters())
    with caplog.at_level(logging.INFO, "trainermon"), TrainerMon() as monitor:
        monitor.set_monitor(model, optimizer)
        monitor._attached._coordinates = Coordinates(rank=rank)
        monitor._attached._is_loss_awaited &= rank == 0
        for _ in range(num_steps):
            output = model(torch.randn(2, 4))
            loss = output if isinstance(output, torch.Tensor) and not output.dim() else output.sum()
            if record:
                monitor.record(loss=loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return caplog.text


class _MeanLoss(nn.Module):
    def forward(self, output):
        return output.square().mean()


@pytest.mark.parametrize("num_steps", [1, 3, 25])
def test_a_training_without_a_loss_is_told_once_how_to_record_one(places, caplog, monkeypatch, num_steps):
    assert told(caplog, monkeypatch, num_steps=num_steps).count("monitor.record(loss=loss)") == 1


@pytest.mark.parametrize("how", [{"record": True}, {"module": _MeanLoss}])
def test_one_whose_loss_is_recorded_or_found_is_not(places, caplog, monkeypatch, how):
    assert "record(loss" not in told(caplog, monkeypatch, num_steps=25, **how)


def test_the_end_of_a_run_says_how_to_look_at_it(places, caplog, monkeypatch):
    said = told(caplog, monkeypatch)

    (run,) = places[1].iterdir()
    assert said.count(f"trainermon serve {run}") == 1


def test_a_run_that_no_agent_has_stored_in_time_is_not_called_stored(places, caplog, monkeypatch):
    monkeypatch.setattr(launcher, "start_agent", lambda _: None)
    monkeypatch.setattr(agent_process, "PAGE_WAIT_S", 0.0)
    model, optimizer = parts()
    with caplog.at_level(logging.INFO, "trainermon"), TrainerMon({"agent": {"wait_s": 0}}) as monitor:
        monitor.set_monitor(model, optimizer)
        step(model, optimizer)

    assert "is not stored whole yet; to look at it" in caplog.text
    assert "is stored;" not in caplog.text


def test_only_one_rank_of_a_job_says_so(places, caplog, monkeypatch):
    said = told(caplog, monkeypatch, rank=1)

    assert "trainermon serve" not in said
    assert "record(loss" not in said


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_says_each_alert_of_its_attempt_once_with_page_and_next_command(places, caplog, monkeypatch, rank):
    monkeypatch.setattr(launcher, "start_agent", lambda _: None)
    monkeypatch.setattr(agent_process, "PAGE_WAIT_S", 0.0)
    monkeypatch.setattr(agent_process, "ALERTS_S", 0.0)
    model, optimizer = parts()
    attached = AttachedRank.start

    def start(self, **arguments):
        self._agent._coordinates = Coordinates(rank=rank)
        attached(self, **arguments)

    monkeypatch.setattr(AttachedRank, "start", start)
    with TrainerMon({"agent": {"wait_s": 0}}) as monitor:
        monitor.set_monitor(model, optimizer)
        run = monitor.run_directory
        early, late, older = (
            ToldAlert(attempt, "loss-spike", step, "warning", f"loss {step} on rank 3, worst h.0")
            for attempt, step in ((1, 5), (1, 9), (0, 7))
        )
        for alerts in ([early, older], [early, older], [early, older, late]):
            status = AgentStatus(pid=1, run_id="r", output=str(run), url="http://127.0.0.1:1/", alerts=tuple(alerts))
            write_status(only_spool(places[0]), status)
            step(model, optimizer)
            step(model, optimizer)

    said = [line.getMessage() for line in caplog.records if "on rank 3" in line.getMessage()]
    expected = f"loss %d on rank 3, worst h.0 (page http://127.0.0.1:1/; why: trainermon diagnose {run})"
    assert said == ([expected % 5, expected % 9] if rank == 0 else [])
