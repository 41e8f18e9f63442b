"""Runs on this node, for tests: a spool, rank processes that do what they are told, and the agent that follows them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import duckdb

from trainermon.agent.lifecycle.lock import read_status
from trainermon.core.launcher import start_agent
from trainermon.exporters.store.store import open_run

RANK_SCRIPT = Path(__file__).with_name("rank_process.py")
DEADLINE_S = 900.0


def wait_for(condition, what, *, deadline_s=DEADLINE_S):
    """Return the first truthy value of `condition`; fail after the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"after {deadline_s:g} s there is still not: {what}")
        time.sleep(0.02)


class Rank:
    """A rank process under the test's control."""

    def __init__(self, run, rank, *, attempt=1, start_agent=False, environment=None, prefix=(), folder=None):
        command = [*prefix, sys.executable, RANK_SCRIPT, run.spool, run.run_id, rank, attempt, run.world_size]
        self.number = rank
        self.process = subprocess.Popen(
            [str(word) for word in command + [run.settings] * start_agent],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
            cwd=folder,
        )
        run.ranks.append(self)
        assert self.answer() == "ready"

    def answer(self):
        return self.process.stdout.readline().strip()

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.answer()

    def steps(self, first, count, *, nan=False):
        assert self.tell(f"steps {first} {count}{' nan' if nan else ''}") == "done"

    def checksum(self, step, checksum):
        assert self.tell(f"checksum {step} {checksum}") == "done"

    def gradient(self, step, given, reduced):
        assert self.tell(f"gradient {step} {given} {reduced}") == "done"

    def event(self, **event):
        assert self.tell(f"event {json.dumps(event)}") == "done"

    def commands(self):
        return json.loads(self.tell("commands"))

    def end(self):
        """Close the journal and leave; return its last position."""
        position = json.loads(self.tell("end"))
        self.wait()
        return position

    def kill(self):
        self.process.kill()
        self.wait()

    def wait(self):
        if self.process.stdin.closed:
            return
        self.process.stdin.close()
        self.process.wait(DEADLINE_S)
        self.process.stdout.close()


class Run:
    """A run on this node: its spool, its directory, its processes."""

    def __init__(self, folder, *, run_id="run", world_size=1, **settings):
        self.run_id = run_id
        self.world_size = world_size
        self.output = folder / "output" / run_id
        self.spool = folder / "spool" / run_id
        self.ranks = []
        self._pids = set()
        self.output.mkdir(parents=True, mode=0o700)
        self.write_settings(**settings)

    @property
    def node_dir(self):
        return self.output / "nodes" / socket.gethostname()

    def write_settings(self, **settings):
        self.spool.mkdir(parents=True, mode=0o700, exist_ok=True)
        given = {"linger_s": 0, "flush_s": 0.2} | settings
        agent = {key: given.pop(key) for key in ("host", "port", "linger_s", "flush_s") if key in given}
        self.settings = json.dumps({"run_id": self.run_id, "output": str(self.output), "agent": agent, **given})
        (self.spool / "agent.json").write_text(self.settings)

    def rank(self, number=0, **options):
        return Rank(self, number, **options)

    def launch_agent(self):
        """Start an agent, as local rank 0 does."""
        start_agent(self.spool)

    def status(self):
        status = read_status(self.spool)
        if status:
            self._pids.add(status["pid"])
        return status or {}

    def running(self, *, other_than=0):
        """Return the agent's status once it has a page."""

        def found():
            status = self.status()
            return status.get("url") and status["pid"] != other_than and status

        return wait_for(found, "an agent with a page")

    def get(self, path):
        url = self.running()["url"]
        with urllib.request.urlopen(f"{url}{path}", timeout=DEADLINE_S) as answer:
            return answer.read()

    def get_json(self, path):
        return json.loads(self.get(path))

    def post(self, path, body=None, *, token=None):
        token = token or (self.node_dir / "token").read_text()
        request = urllib.request.Request(
            f"{self.running()['url']}{path}",
            data=json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {token}"},
            method="POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def gone(self):
        """Wait until the spool has been taken away."""
        wait_for(lambda: self.status() is not None and not self.spool.exists(), "the end of the agent and its spool")

    def log(self):
        path = self.node_dir / "agent.log"
        return path.read_text() if path.exists() else ""

    def stored(self):
        """Return every stored row of the first gradient as (attempt, rank, step, sum_sq), sorted."""
        for again in itertools.count(1):
            with contextlib.closing(open_run(self.output)) as connection:
                try:
                    return connection.execute(
                        "SELECT attempt, rank, step, sum_sq FROM all_stats WHERE name = 'h.0.weight' ORDER BY ALL"
                    ).fetchall()
                except duckdb.IOException:  # a segment was merged into another one meanwhile
                    if again == 5:
                        raise
        raise AssertionError("the fifth reading returns or raises")

    def alerts(self):
        path = self.node_dir / "alerts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def close(self):
        """End every process of the run."""
        self.status()
        for rank in self.ranks:
            rank.kill()
        for pid in self._pids:
            if is_agent(pid):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGKILL)


def is_agent(pid):
    """Whether the process is an agent and still runs."""
    try:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return False
        return b"trainermon.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def expected(rank, steps, *, attempt=1):
    """Return what `Run.stored` gives for these steps."""
    return [(attempt, rank, step, 1000.0 * step + 10.0 * rank + 1) for step in steps]
