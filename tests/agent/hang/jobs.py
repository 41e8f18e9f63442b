"""Small gloo jobs that go wrong, with the agent that their rank 0 starts: what it says is held against the truth."""

import json
import os
import signal
import socket
from pathlib import Path

from tests.agent.nodes import is_agent, wait_for
from tests.fork_server import ROOT, start_script
from tests.ports import free_port
from trainermon.agent.lifecycle.lock import read_status
from trainermon.core.spool import spool_of

WORKER = Path(__file__).with_name("rank_worker.py")
DEADLINE_S = 900.0
LIMITS = {"step_s": 1.5, "checkpoint_s": 30.0, "evaluation_s": 30.0, "setup_s": 60.0, "factor": 2.0, "max_s": 1.0}


class Job:
    """The ranks of one job, started; `close` ends what is left of it.

    With `forks` its only process is the parent of the ranks.
    """

    def __init__(self, folder, *faults, world_size=2, hang=None, split="plain", forks=False):
        self.folder = folder
        self.output = folder / "output" / "run"
        self.spool = spool_of("run", self.output, folder / "spool")
        self._agents = set()
        self._world_size = world_size
        settings = {
            "run_id": "run",
            "output_dir": str(folder / "output"),
            "spool_dir": str(folder / "spool"),
            "wg_distribution": False,
            "agent": {"linger_s": 0, "wait_s": 1},
            "hang": {**LIMITS, **(hang or {})},
        }
        common = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "OMP_NUM_THREADS": 1}
        common |= {"MASTER_PORT": free_port()}
        common |= {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": ROOT, "SPLIT": split, "FORKS": "1" if forks else ""}
        self.ranks = []
        for rank in range(1 if forks else world_size):
            own = {name: str(value) for name, value in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            arguments = [str(folder), json.dumps(settings), *faults]
            said, environment = folder / f"rank{rank}.txt", os.environ | own
            self.ranks.append(start_script(WORKER, *arguments, output=said, environment=environment))

    def reached(self, step):
        """Wait until a rank has its fault of this step, and the agent has opened what ends with the ranks."""
        self._wait_for((self.folder / f"reached{step}").exists, f"the fault of step {step}")
        self._wait_for(self._is_followed, "the agent that reads the notes of all ranks")

    def go(self, step):
        (self.folder / f"go{step}").touch()

    def signal(self, rank, number):
        self.ranks[rank].send_signal(number)

    def report(self, rule, step):
        """Return the post-mortem of a hang or crash on this step, once it is there."""
        name = f"post-mortem-{rule}-{socket.gethostname()}-attempt1-step{step}.json"
        path = self.output / "reports" / name
        self._wait_for(path.exists, name)
        return json.loads(path.read_text())

    def alerts(self, rule=None):
        path = self.output / "nodes" / socket.gethostname() / "alerts.jsonl"
        alerts = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [alert for alert in alerts if rule in (None, alert["rule"])]

    def end(self):
        """Wait for every rank and for the agent; return the exit statuses."""
        for rank in self.ranks:
            rank.wait(DEADLINE_S)
        self._wait_for(lambda: not self.spool.exists(), "the end of the agent")
        return [rank.returncode for rank in self.ranks]

    def close(self):
        self._note_agent()
        for rank in self.ranks:
            rank.kill_session()
            rank.wait(DEADLINE_S)
        for pid in self._agents:
            if is_agent(pid):
                os.kill(pid, signal.SIGKILL)

    def said(self):
        texts = [*sorted(self.folder.glob("rank*.txt")), *self.output.glob("nodes/*/agent.log")]
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in texts)

    def _wait_for(self, condition, what):
        def look():
            self._note_agent()
            return condition() or self._could_not_start()

        try:
            wait_for(look, what, deadline_s=DEADLINE_S)
            assert not self._could_not_start(), f"a rank ended before any fault, and there is not: {what}"
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from None

    def _is_followed(self):
        return sum(map(num_notes_held, self._agents)) == self._world_size

    def _could_not_start(self):
        running = [rank for rank in self.ranks if rank.returncode is None]
        return not any(self.folder.glob("reached*")) and any(rank.has_ended() for rank in running)

    def _note_agent(self):
        status = read_status(self.spool)
        if status:
            self._agents.add(status["pid"])


def num_notes_held(agent):
    """Return of how many ranks the agent with this process id has opened the notes, which end with the rank."""
    return sum("trainermon-calls" in _target(link) for link in Path(f"/proc/{agent}/fd").glob("*"))


def _target(link):
    try:
        return os.readlink(link)
    except FileNotFoundError:  # closed since
        return ""
