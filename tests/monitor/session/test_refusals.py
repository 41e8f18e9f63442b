"""A `set_monitor` that is refused, wherever that happens, leaves no file, folder, thread, hook or process behind."""

import copy
import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.full_disk import room_for
from trainermon import TrainerMon
from trainermon.core import launcher
from trainermon.core.errors import TrainermonError
from trainermon.core.private_files import replace_file
from trainermon.monitor.session import agent_process, attached_rank, rank_spool, run_files


class TakesNoHooks(nn.Linear):
    def register_forward_pre_hook(self, *_args, **_options):
        raise RuntimeError("no hooks")


def never(*_args, **_options):
    raise RuntimeError("the disk is full")


@pytest.fixture
def training():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def hooks_of(model, optimizer):
    tables = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    for module in model.modules():
        tables += [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks]
    tables += [parameter._post_accumulate_grad_hooks for parameter in model.parameters()]
    return [hook for table in tables for hook in (table or ())]


def children():
    listing = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True)
    return [line for line in listing.stdout.splitlines() if "trainermon" in line]


def agents_of(spool):
    """Return the processes, whoever their parent is, that were told of this spool."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [entry] if str(spool).encode() in entry.read_bytes() else []
        except OSError:  # it has ended
            continue
    return found


def open_files():
    return {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()}


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({"targets": ["nowhere"]}, None),
        ({"rules": "missing.yaml"}, None),
        ({}, (rank_spool, "ControlPage")),
        ({}, (rank_spool, "JournalWriter")),
        ({}, (rank_spool, "Outbox")),
        ({}, (attached_rank, "write_run_files")),
        ({}, (agent_process, "write_agent_settings")),
        ({}, (launcher, "register")),
        ({"xy_distribution": True}, TakesNoHooks),
    ],
    ids=str,
)
def test_nothing_is_left_behind(places, training, monkeypatch, config, place):
    model, optimizer = training
    if isinstance(place, tuple):
        monkeypatch.setattr(*place, never)
    elif place is not None:
        model.append(TakesNoHooks(2, 2))
    before = open_files()

    with pytest.raises((TrainermonError, RuntimeError)):
        TrainerMon(config).set_monitor(model, optimizer)

    assert [path for root in places for path in (root, *root.rglob("*")) if path.exists()] == []
    assert hooks_of(model, optimizer) == []
    assert open_files() - before == set()
    assert children() == agents_of(places[0]) == []


def losses_of(monitor, model, optimizer):
    """Return the loss of three steps."""
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        losses.append(model(torch.full((1, 3), float(step))).square().sum())
        losses[-1].backward()
        monitor.record(loss=losses[-1])
        optimizer.step()
    return [loss.item() for loss in losses]


def test_a_disk_without_room_leaves_the_training_unwatched(places, training, caplog, monkeypatch):
    """However many bytes a file may have: any of those that are written at the start may be the one that is too large.

    The limit ends a write as a full disk does, and sends SIGXFSZ where a file cannot grow at all.
    """
    wanted = losses_of(TrainerMon(), *copy.deepcopy(training))
    lines = []
    for size in (0, 1, 300, 4095, 4096, 4500, 6000):
        caplog.clear()
        monkeypatch.setenv("TRAINERMON_RUN_ID", f"size{size}")
        model, optimizer = copy.deepcopy(training)
        with room_for(size), TrainerMon({"agent": {"start": False}}) as monitor:
            monitor.set_monitor(model, optimizer)
            is_watched = monitor.run_directory is not None
            assert losses_of(monitor, model, optimizer) == wanted
        told = [text for text in caplog.messages if text.startswith("this rank is not monitored")]
        assert len(told) == (not is_watched)
        assert is_watched or hooks_of(model, optimizer) == []
        lines += told
    assert len(lines) >= 4
    assert all(
        "training goes on" in line and str(places[0]) in line and "Make room there, or set" in line for line in lines
    )


@pytest.mark.parametrize(
    "lacking",
    [
        (number, name)
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)
        for name in ("rank00000.json", "run.json", "agent.json", "agent.linger")
    ],
    ids=lambda lacking: f"{errno.errorcode[lacking[0]]} {lacking[1]}",
)
def test_the_file_that_finds_no_room_is_told_and_nothing_is_left(places, training, caplog, monkeypatch, lacking):
    number, name = lacking

    def write_while_there_is_room(path, content):
        if path.name == name:
            raise OSError(number, os.strerror(number), str(path))
        replace_file(path, content)

    for module in (run_files, launcher):
        monkeypatch.setattr(module, "replace_file", write_while_there_is_room)
    monkeypatch.setenv(launcher.LAUNCHER_VARIABLE, f"{os.getpid()}:{places[1].parent}")
    monitor = TrainerMon()

    monitor.set_monitor(*training)

    assert monitor.run_directory is None
    [line] = [text for text in caplog.messages if text.startswith("this rank is not monitored")]
    assert os.strerror(number) in line
    assert name in line
    assert not any(root.exists() for root in places)
    assert hooks_of(*training) == children() == []


def test_an_agent_that_cannot_start_is_ended_and_nothing_is_left(places, training, monkeypatch, tmp_path):
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\nexec sleep 600\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    monkeypatch.setattr(launcher, "START_TIMEOUT_S", 0.2)

    with pytest.raises(TrainermonError, match="the agent cannot be started"):
        TrainerMon().set_monitor(*training)

    assert not any(root.exists() for root in places)
    assert agents_of(places[0]) == []


def test_what_an_earlier_attempt_has_left_stays(places, training, monkeypatch):
    monkeypatch.setenv("TRAINERMON_RUN_ID", "job")
    with TrainerMon({"agent": {"start": False}}) as monitor:
        monitor.set_monitor(*training)
        training[0](torch.ones(1, 3)).sum().backward()
        training[1].step()
    kept = {path: path.read_bytes() for root in places for path in root.rglob("*") if path.suffix in (".jnl", ".json")}
    monkeypatch.setattr("trainermon.core.topology._monitors_of_this_process", iter([0]))
    monkeypatch.setattr(attached_rank, "write_run_files", never)

    with pytest.raises(RuntimeError):
        TrainerMon({"agent": {"start": False}}).set_monitor(*training)

    assert len(kept) >= 3
    assert {path: path.read_bytes() for path in kept} == kept


PAGE = """
    import json, logging, sys, torch
    from pathlib import Path
    from torch import nn
    from trainermon import TrainerMon
    from trainermon.monitor.session import agent_process

    agent_process.PAGE_WAIT_S, agent_process.PAGE_LIMIT_S = 0.0, float(sys.argv[3])
    agent_process.launcher.start_agent = lambda spool: None
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainerMon({"agent": {"wait_s": 0}}) as monitor:
        monitor.set_monitor(model, optimizer, start_iteration=100)
        [spool] = Path(sys.argv[1]).iterdir()
        for step in range(15):
            if str(step) == sys.argv[2]:
                (spool / "agent.status.json").write_text(json.dumps({"url": "http://127.0.0.1:9461/"}))
            if step < 14:
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
                print("step", step, file=sys.stderr, flush=True)
"""
ADDRESS = "page http://127.0.0.1:9461  metrics http://127.0.0.1:9461/metrics"


@pytest.mark.parametrize(
    ("known_at", "limit_s", "line", "after"),
    [
        ("4", "0", ADDRESS, 3),
        ("-1", "0", "no page yet", 8),
        ("12", "3600", ADDRESS, 11),  # more than ten steps, in less time than a busy machine needs to start the agent
        ("14", "0", ADDRESS, 13),  # it was given up, and is told at the end
        ("14", "3600", ADDRESS, 13),
    ],
)
def test_the_page_is_told_when_it_is_known_or_in_time_where_to_look(places, known_at, limit_s, line, after):
    command = [sys.executable, "-c", textwrap.dedent(PAGE), str(places[0]), known_at, limit_s]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()

    [number] = [number for number, text in enumerate(said) if line in text]
    assert f"step {after}" in said[:number]
    assert f"step {after + 2}" not in said[:number]
