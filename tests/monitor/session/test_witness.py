"""What a rank opens to its agent, what it tells of its phase, and that nothing of it stays behind."""

import contextlib
import copy
import faulthandler
import gc
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from tests.agent.nodes import wait_for
from tests.journal_rows import only_spool, spool_named
from trainermon import TrainerMon
from trainermon.core.config import HangConfig
from trainermon.core.control import ControlReader, Phase
from trainermon.monitor.session.witness import STACKS_SIGNAL, RankWitness

QUIET = {"agent": {"start": False}}
ROOT = Path(__file__).parents[3]


@pytest.fixture
def witness(tmp_path):
    """Make witnesses whose folder has too long a path for a socket's name; each is closed after the test."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    made = []

    def make(**settings):
        made.append(RankWitness(folder, 3, HangConfig(**settings), {}))
        return folder

    yield make
    for one in made:
        one.close()


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def ask(folder, handler="fr_trace_json"):
    descriptor = os.open(folder, os.O_RDONLY)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection:
        connection.settimeout(10)
        connection.connect(f"/proc/self/fd/{descriptor}/rank00003.sock")
        os.close(descriptor)
        connection.sendall(
            f"POST /handler/{handler} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    return json.loads(answer.partition(b"\r\n\r\n")[2])


def native_threads():
    return len(os.listdir("/proc/self/task"))


def test_flight_recorder_is_answered_on_a_private_socket(witness, one_rank):
    dist.all_reduce(torch.ones(3))
    dist.broadcast(torch.ones(3), 0)

    folder = witness()

    assert (folder / "rank00003.sock").stat().st_mode & 0o777 == 0o600
    entries = [(e["profiling_name"], e["collective_seq_id"]) for e in ask(folder)["entries"]]
    assert entries[-2:] == [("gloo:all_reduce", 1), ("gloo:broadcast", 2)]


def test_groups_are_described_by_purpose_and_members(witness, one_rank):
    group = dist.new_group([0], group_desc="mesh_tp")
    try:
        about = json.loads((witness() / "rank00003.about").read_text())
    finally:
        dist.destroy_process_group(group)

    assert [(entry["name"], entry["ranks"]) for entry in about["groups"]] == [("world", [0]), ("tp", [0])]
    assert about["pid"] == os.getpid()


def test_group_that_is_made_later_is_noticed(tmp_path, one_rank):
    one = RankWitness(tmp_path, 3, HangConfig(), {})
    try:
        path = tmp_path / "rank00003.about"
        before = path.stat().st_ino
        one.notice_groups()
        assert path.stat().st_ino == before
        group = dist.new_group([0], group_desc="later")
        one.notice_groups()
        dist.destroy_process_group(group)
    finally:
        one.close()

    assert [entry["name"] for entry in json.loads(path.read_text())["groups"]] == ["world", "later"]


def test_process_without_groups_has_no_socket_until_there_is_one(tmp_path):
    one = RankWitness(tmp_path, 3, HangConfig(), {})
    try:
        assert not (tmp_path / "rank00003.sock").exists()
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        one.notice_groups()
        assert ask(tmp_path)["version"]
    finally:
        one.close()
        dist.destroy_process_group()


def test_forked_child_that_lets_go_of_it_ends(tmp_path, one_rank):
    """Its destructor would wait for threads that the child has not got."""
    one = RankWitness(tmp_path, 3, HangConfig(), {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: this process has threads
        child = os.fork()
    if not child:
        one.stop_in_child()
        del one
        gc.collect()
        os._exit(0)
    try:
        ended = wait_for(lambda: (found := os.waitpid(child, os.WNOHANG))[0] and found, "the end of the child")
        assert ended == (child, 0)
    except BaseException:  # the test's own time limit too: no child may be left behind
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        one.close()


def test_nothing_is_said_on_standard_error_and_what_others_say_is_kept(witness, one_rank, capfd):
    folder = witness()
    os.write(2, b"said by the script\n")
    del folder

    assert capfd.readouterr().err == "said by the script\n"


def test_nothing_stays_behind(tmp_path, one_rank):
    RankWitness(tmp_path, 3, HangConfig(), {}).close()  # whatever torch loads once
    files, threads, handler = len(os.listdir("/proc/self/fd")), native_threads(), signal.getsignal(STACKS_SIGNAL)

    one = RankWitness(tmp_path, 3, HangConfig(), {})
    one.close()
    one.close()

    assert len(os.listdir("/proc/self/fd")) == files
    assert native_threads() == threads
    assert signal.getsignal(STACKS_SIGNAL) == handler
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".about", ".stacks"]


def test_what_is_switched_off_is_not_opened(witness, one_rank):
    folder = witness(recorder=False, stacks=False)

    assert [path.suffix for path in folder.iterdir()] == [".about"]
    assert json.loads((folder / "rank00003.about").read_text())["signal"] == 0


def test_signal_that_the_script_handles_stays_its_own(witness):
    caught = []
    before = signal.signal(STACKS_SIGNAL, lambda number, frame: caught.append(number))
    try:
        about = json.loads((witness(recorder=False) / "rank00003.about").read_text())
        signal.raise_signal(STACKS_SIGNAL)
    finally:
        signal.signal(STACKS_SIGNAL, before)

    assert (about["signal"], caught) == (0, [STACKS_SIGNAL])


def test_stacks_are_written_on_the_signal(witness):
    folder = witness(recorder=False)

    signal.raise_signal(STACKS_SIGNAL)

    assert "test_stacks_are_written_on_the_signal" in (folder / "rank00003.stacks").read_text()


def test_fault_handler_of_the_script_stays_its_own(witness):
    assert faulthandler.is_enabled()  # pytest's

    one = RankWitness(witness(), 4, HangConfig(), {})
    one.close()

    assert faulthandler.is_enabled()


def test_what_the_process_does_not_allow_is_left_out(witness, one_rank, monkeypatch):
    monkeypatch.setattr(faulthandler, "register", lambda *_, **__: 1 / 0)

    folder = witness()

    assert ask(folder)["version"]
    assert json.loads((folder / "rank00003.about").read_text())["signal"] == 0


SCRIPT = """
import json, os, sys, torch
import torch.distributed as dist
from torch import nn
from trainermon import TrainerMon

# One process for each ending; forked, because torch takes seconds to load, its optimizers included.
torch.set_num_threads(1)
monitor = TrainerMon({"agent": {"start": False}, "run_id": "first"})
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with monitor:
    monitor.set_monitor(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
statuses = []
for number, ending in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if not child:
        break
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    print(json.dumps(statuses), flush=True)
    os._exit(0)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = TrainerMon({"agent": {"start": False}, "run_id": f"run{number}"})
monitor.set_monitor(model, optimizer)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
def crash():
    import ctypes
    ctypes.string_at(0)
exec(ending)
"""
ENDINGS = {
    "": (0, "CLOSED"),
    "raise ValueError('bad batch')": (1, "FAILED"),
    "raise SystemExit(0)": (0, "CLOSED"),
    "raise KeyboardInterrupt": (-signal.SIGINT, "FAILED"),
    "with monitor:\n    raise KeyboardInterrupt": (-signal.SIGINT, "FAILED"),
    "with monitor:\n    raise ValueError('bad batch')": (1, "FAILED"),
    "with monitor:\n    sys.exit(3)": (3, "FAILED"),
    "with monitor:\n    sys.exit(0)": (0, "CLOSED"),
    # a forked child that ends like any other program must not wait for threads that it has not got
    "pid = os.fork()\nif not pid:\n    sys.exit(4)\nassert os.waitpid(pid, 0)[1] == 4 << 8": (0, "CLOSED"),
    "crash()": (-signal.SIGSEGV, "STEP"),
}


def test_end_of_the_script_is_told_from_its_failure(places):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(list(ENDINGS))],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )

    assert json.loads(done.stdout) == [status for status, _ in ENDINGS.values()], done.stderr
    assert "WorkerServer" not in done.stderr
    spools = {ending: spool_named(places[0] / f"run{number}") for number, ending in enumerate(ENDINGS)}
    phases = {ending: ControlReader(spool, 0).heartbeat().phase.name for ending, spool in spools.items()}
    assert phases == {ending: phase for ending, (_, phase) in ENDINGS.items()}
    for ending, spool in spools.items():
        said = b"".join(path.read_bytes() for path in spool.glob("*.jnl"))
        assert (b"ValueError: bad batch" in said) is ("bad batch" in ending)
    crashed = (spools["crash()"] / "rank00000.stacks").read_text()
    assert "Segmentation fault" in crashed
    assert "in crash" in crashed


CHILDREN = """
import json, multiprocessing, os, torch
import torch.multiprocessing
from torch import nn
from trainermon import TrainerMon

def train(index, place, ending):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = TrainerMon({"agent": {"start": False}, "run_id": f"run{place + index}"})
    monitor.set_monitor(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    exec(ending)

torch.set_num_threads(1)
for place, ending in enumerate(("", "raise ValueError('bad batch')", "raise SystemExit(0)")):
    child = multiprocessing.get_context("fork").Process(target=train, args=(0, place, ending))
    child.start()
    child.join()
try:
    torch.multiprocessing.start_processes(train, args=(3, "raise ValueError('bad batch')"), start_method="fork")
except torch.multiprocessing.ProcessRaisedException:
    os._exit(0)
"""


def test_end_of_a_process_of_multiprocessing_is_told_though_it_calls_nothing_at_exit(places):
    done = subprocess.run(
        [sys.executable, "-c", CHILDREN], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    spools = [spool_named(places[0] / f"run{number}") for number in range(4)]
    phases = [ControlReader(spool, 0).heartbeat().phase.name for spool in spools]
    assert phases == ["CLOSED", "FAILED", "CLOSED", "FAILED"], done.stderr
    for spool in (spools[1], spools[3]):
        said = b"".join(path.read_bytes() for path in spool.glob("*.jnl"))
        assert b"ValueError: bad batch" in said
        assert b"SystemExit" not in said


class Loop:
    """A training loop under the monitor, and the phase that its page shows."""

    def __init__(self, places):
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.monitor = TrainerMon(QUIET)
        self.monitor.set_monitor(self.model, self.optimizer)
        self._reader = ControlReader(only_spool(places[0]), 0)

    @property
    def phase(self):
        return self._reader.heartbeat().phase

    @property
    def generation(self):
        return self._reader.heartbeat().generation

    def forward(self):
        return self.model(torch.ones(2, 4)).sum()

    def step(self):
        self.forward().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def loop(places):
    loop = Loop(places)
    yield loop
    loop.monitor.close()


def test_set_up_lasts_until_the_first_step_has_ended(loop):
    assert loop.phase is Phase.SETUP
    loop.forward().backward()
    assert loop.phase is Phase.SETUP
    loop.optimizer.step()
    assert loop.phase is Phase.STEP


@pytest.mark.parametrize("part", [lambda loop: loop.model, lambda loop: loop.model[0]])
def test_checkpoint_is_seen_by_the_state_that_is_read_and_ends_with_the_next_forward(loop, part):
    loop.step()

    part(loop).state_dict()
    assert loop.phase is Phase.CHECKPOINT
    loop.forward()
    assert loop.phase is Phase.STEP


def test_evaluation_is_seen_and_every_batch_of_it_is_a_sign_of_life(loop):
    loop.step()

    with torch.no_grad():
        loop.forward()
        first = loop.generation
        loop.forward()
    assert loop.phase is Phase.EVALUATION
    assert loop.generation > first
    loop.forward()
    assert loop.phase is Phase.STEP


def test_pause_before_the_first_step_leads_back_to_set_up(loop):
    with torch.no_grad():
        loop.forward()
    assert loop.phase is Phase.EVALUATION
    loop.forward()
    assert loop.phase is Phase.SETUP


def test_marked_phase_holds_whatever_happens_in_it(loop):
    loop.step()

    with loop.monitor.phase("checkpoint"):
        assert loop.phase is Phase.CHECKPOINT
        with torch.no_grad():
            loop.forward()
        loop.forward()
        assert loop.phase is Phase.CHECKPOINT
        with loop.monitor.phase("evaluation"):
            inner = loop.phase
        assert (inner, loop.phase) == (Phase.EVALUATION, Phase.CHECKPOINT)
    assert loop.phase is Phase.STEP


def test_phase_ends_with_the_exception_that_leaves_it(loop):
    def save():
        raise ValueError("disk")

    loop.step()

    with pytest.raises(ValueError, match="disk"), loop.monitor.phase("checkpoint"):
        save()
    assert loop.phase is Phase.STEP


def test_phase_without_a_monitor_or_by_a_wrong_name_is_nothing(loop, caplog):
    with TrainerMon().phase("checkpoint"):
        pass
    with loop.monitor.phase("lunch"):
        pass

    assert "phase('lunch') is left out: expected one of 'setup', 'checkpoint', 'evaluation'" in caplog.text


def test_monitor_that_detached_says_that_it_gives_no_more_signs(loop, monkeypatch):
    monkeypatch.setattr("trainermon.monitor.session.script_values.ScriptValues.take_duration", lambda self: 1 / 0)

    loop.step()

    assert loop.phase is Phase.DETACHED
    with loop.monitor.phase("evaluation"):
        assert loop.phase is Phase.DETACHED


def test_copies_and_pickles_of_the_model_are_free_of_the_monitor(loop):
    loop.step()
    before = loop.generation

    copied, pickled = copy.deepcopy(loop.model), pickle.loads(pickle.dumps(loop.model))
    assert copied.state_dict().keys() == pickled.state_dict().keys() == loop.model.state_dict().keys()

    assert loop.generation == before + 1  # the last of the three


def test_hooks_are_gone_after_the_end(loop):
    hooks = [module._state_dict_pre_hooks for module in loop.model.modules()]
    assert sum(map(len, hooks)) == 1

    loop.monitor.close()

    assert sum(map(len, hooks)) == 0
