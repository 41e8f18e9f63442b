"""How real trainings ended, as the list of runs and the diagnosis tell it."""

import json
import os
import signal

import pytest

from tests.agent.hang.jobs import num_notes_held
from tests.agent.nodes import is_agent, wait_for
from tests.fork_server import ROOT, start_script
from trainermon.agent.lifecycle.lock import read_status
from trainermon.cli import main
from trainermon.core.spool import spool_of

SCRIPT = ROOT / "tests" / "agent" / "runs" / "ending_training.py"
DEADLINE_S = 900.0


@pytest.fixture
def end(tmp_path, monkeypatch):
    """Return what lets a training end, by a signal or by itself, and returns the folder of its run."""
    monkeypatch.setenv("TRAINERMON_SPOOL", str(tmp_path / "spool"))
    spool = spool_of("run", tmp_path / "output" / "run", tmp_path / "spool")
    agents = set()

    def ended(ending, number=None):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        said = tmp_path / "said.txt"
        training = start_script(SCRIPT, str(tmp_path), ending, output=said, environment=environment)
        try:
            wait_for((tmp_path / "reached").exists, "the last step", deadline_s=DEADLINE_S)
            agents.add(wait_for(lambda: read_status(spool), "the agent", deadline_s=DEADLINE_S)["pid"])
            wait_for(lambda: sum(map(num_notes_held, agents)), "the agent's look", deadline_s=DEADLINE_S)
            (tmp_path / "go").touch()
            if number is not None:
                training.send_signal(number)
            training.wait(DEADLINE_S)
        finally:
            training.kill_session()
            training.wait(DEADLINE_S)
        return tmp_path / "output"

    yield ended
    for pid in filter(is_agent, agents):
        os.kill(pid, signal.SIGKILL)


# How the script ends by itself or by a signal, the word of the list, and what the diagnosis says of the rank.
ENDINGS = {
    "end": (None, "finished", ""),
    "closed": (None, "finished", ""),
    "exit": (None, "failed", "failed with status 3"),
    "exception": (None, "failed", "failed: ValueError: bad data"),
    "SIGINT": (signal.SIGINT, "interrupted", "interrupted by Ctrl-C or SIGINT"),
    "SIGTERM": (signal.SIGTERM, "stopped", "ended by SIGTERM from outside"),
    "SIGKILL": (signal.SIGKILL, "killed", "was killed by SIGKILL"),
    "SIGSEGV": (signal.SIGSEGV, "crashed", "was killed by SIGSEGV"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_end_of_a_training_is_told_as_it_was(end, capsys, ending):
    number, state, said = ENDINGS[ending]
    output = end(ending, number)

    def listed():
        assert main(["serve", str(output), "--list", "--json"]) == 0
        (facts,) = json.loads(capsys.readouterr().out)
        return facts

    facts = wait_for(lambda: (facts := listed())["state"] == state and facts, state, deadline_s=120)
    assert main(["serve", str(output), "--list"]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert main(["diagnose", str(output / "run")]) == 0
    diagnosis = " ".join(capsys.readouterr().out.split())

    assert (line.split()[0], facts["step"]) == (state, 3)
    assert (f"rank 0 {said}" in diagnosis) if said else ("rank-dead" not in diagnosis)
