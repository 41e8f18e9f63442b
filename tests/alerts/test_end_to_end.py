"""The whole way round: fault → scrape → rule → Alertmanager → controller → agents → dumps, with the real programs.

Four ranks of one training on two "nodes" with an agent each, a Prometheus with the generated rules, an Alertmanager
with the generated example, a controller. One rank's loss goes wrong. The generated rule on it names this rank, so it
alone dumps; a rule of the user's own names no rank, so all ranks of both nodes dump on one and the same step.
"""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.controller.controllers import TOKEN, ControllerProcess
from tests.alerts.servers import Server, alertmanager, prometheus
from tests.fork_server import ROOT, ForkedProcess, start_script
from tests.ports import free_port
from tests.server_programs import wait_until

pytestmark = [pytest.mark.server, pytest.mark.distributed]

SCRIPT = ROOT / "tests" / "alerts" / "training_with_a_fault.py"
GENERATED = ROOT / "trainermon" / "alerts" / "generated"
RUN = "loss-apart"
WORLD_SIZE = 4
NODES = ("node-a", "node-b")
HOST_NAME = "import socket\nsocket.gethostname = lambda: {!r}\n"
"""Sitecustomize of all processes of a node: this machine has one name, and the run directory a folder for each."""

AGENT_RULES = """
rules:
  - name: loss-absurd
    severity: info
    on: {kind: loss, statistic: mean}
    when: {threshold: {above: 1.0e+30}}
    summary: "the agents' own rules are to stay out of this test"
"""
OWN_RULES = """
groups:
  - name: own
    rules:
      - alert: LossOfRunTooHigh
        expr: max by (run) (trainermon_loss) > 50
        labels: {severity: critical, escalate: tensor, escalate_steps: "2"}
        annotations: {summary: "The loss of {{ $labels.run }} is above 50"}
"""
PROMETHEUS = """
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: ["{folder}/prometheus_rules.yaml", "{folder}/own.yaml"]
alerting:
  alertmanagers: [{{static_configs: [{{targets: ["{alertmanager}"]}}]}}]
scrape_configs:
  - job_name: trainermon
    file_sd_configs: [{{files: ["{folder}/output/prometheus_sd/*.json"]}}]
"""


def variables(folder: Path, rank: int, port: int) -> dict[str, object]:
    """Return what a launcher tells a rank, and where it finds this test's places."""
    node = folder / NODES[rank // 2]
    return {
        "RANK": rank,
        "WORLD_SIZE": WORLD_SIZE,
        "LOCAL_RANK": rank % 2,
        "LOCAL_WORLD_SIZE": 2,
        "GROUP_RANK": rank // 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
        "PYTHONPATH": f"{node}{os.pathsep}{ROOT}",
        "TRAINERMON_RUN_ID": RUN,
        "TRAINERMON_TOKEN": TOKEN,
        "TRAINERMON_SPOOL": node / "spool",
        "TRAINERMON_OUTPUT": folder / "output",
    }


@contextlib.contextmanager
def training(folder: Path) -> Iterator[list[ForkedProcess]]:
    """Start all ranks, the first half on node a and the others on node b; on leaving they are told to stop."""
    (folder / "rules.yaml").write_text(AGENT_RULES)
    for node in NODES:
        (folder / node).mkdir()
        (folder / node / "sitecustomize.py").write_text(HOST_NAME.format(node))
    port = free_port()
    ranks, statuses = [], []
    for rank in range(WORLD_SIZE):
        arguments = [str(folder), str(folder / "rules.yaml")]
        environment = os.environ | {name: str(value) for name, value in variables(folder, rank, port).items()}
        ranks.append(start_script(SCRIPT, *arguments, output=folder / f"rank{rank}.log", environment=environment))
    try:
        yield ranks
    finally:
        (folder / "stop").touch()
        for process in ranks:
            try:
                statuses.append(process.wait(30))
            except subprocess.TimeoutExpired:
                process.kill_session()
                statuses.append(process.wait(30))
        assert statuses == [0] * WORLD_SIZE, [(folder / f"rank{r}.log").read_text() for r in range(WORLD_SIZE)]


class DeadMansSwitch:
    """Listens for the alert that always fires."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        switch = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                switch.heard += [alert["labels"]["alertname"] for alert in body["alerts"]]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1})
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def __enter__(self) -> DeadMansSwitch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def alertmanager_configuration(folder: Path, controller: str, dead_man: str) -> str:
    """Return the generated example with the places of this test in it."""
    (folder / "token").write_text(TOKEN)
    text = (GENERATED / "alertmanager.yaml").read_text()
    switch = f"{{name: dead-man, webhook_configs: [{{url: {dead_man}, send_resolved: false}}]}}"
    for example, ours in (
        ("http://trainermon-controller:9462/", controller),
        ("  - name: dead-man #", f"  - {switch} #"),
        ("/etc/alertmanager/trainermon-token", str(folder / "token")),
    ):
        assert text.count(example) == 1, example
        text = text.replace(example, ours)
    return text


def first_time(server: Server, selector: str, condition: Any = bool) -> float:
    """Return the time of the first sample of the last ten minutes for which `condition` holds."""
    series = server.get("/api/v1/query", query=f"{selector}[10m]")["data"]["result"]
    return min(float(time_s) for found in series for time_s, value in found["values"] if condition(float(value)))


def dumped(folder: Path, identity: str) -> dict[int, set[int]]:
    """Return, by rank, the steps that were dumped under a name."""
    found: dict[int, set[int]] = {}
    for path in folder.glob(f"output/{RUN}/dumps/{identity}/attempt*/step*/rank*/dump.json"):
        rank, step = path.parent.name.removeprefix("rank"), path.parents[1].name.removeprefix("step")
        found.setdefault(int(rank), set()).add(int(step))
    return found


def written(folder: Path, identity: str) -> float:
    """Return when the last file of a dump was written."""
    files = folder.glob(f"output/{RUN}/dumps/{identity}/attempt*/step*/rank*/dump.json")
    return max(path.stat().st_mtime for path in files)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[list[ForkedProcess], Server, ControllerProcess, DeadMansSwitch]]:
    """The training with everything around it, once Prometheus has a loss of every rank."""
    discovery = tmp_path / "output" / "prometheus_sd"
    discovery.mkdir(parents=True)
    rules = (GENERATED / "prometheus_rules.yaml").read_text().replace("for: 2m\n", "for: 2s\n")
    (tmp_path / "prometheus_rules.yaml").write_text(rules)
    (tmp_path / "own.yaml").write_text(OWN_RULES)
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(training(tmp_path))
        switch = stack.enter_context(DeadMansSwitch())
        controller = ControllerProcess(tmp_path, discovery={"run_directory": str(tmp_path / "output" / RUN)})
        stack.callback(controller.kill)
        configuration = alertmanager_configuration(tmp_path, controller.url, switch.url)
        notifier = stack.enter_context(alertmanager(tmp_path, configuration))
        text = PROMETHEUS.format(folder=tmp_path, alertmanager=notifier.address)
        server = stack.enter_context(prometheus(tmp_path, text))

        def watched() -> bool:
            found = server.get("/api/v1/query", query="trainermon_loss")["data"]["result"]
            return len(found) == WORLD_SIZE

        wait_until(watched, what="Prometheus has a loss of every rank")
        yield ranks, server, controller, switch


def test_a_fault_is_scraped_judged_and_dumped_on_the_right_ranks_at_one_step(
    job: tuple[list[ForkedProcess], Server, ControllerProcess, DeadMansSwitch],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ranks, server, controller, switch = job
    assert controller.escalation() is None, "nothing is wrong yet"

    (tmp_path / "fault").touch()
    wait_until(
        lambda: bool((first := controller.escalation(1)) and first["outcome"] and controller.escalation()["outcome"]),
        what="both escalations have ended",
    )
    done_s = time.time()

    one, everybody = sorted((controller.escalation(0), controller.escalation(1)), key=lambda each: each["task"])
    assert (one["task"], one["ranks"], one["coverage"]) == ("statistics", [3], {"3": "written"})
    wait_until(lambda: bool(dumped(tmp_path, one["id"])), what="the dump of one rank is delivered")
    assert dumped(tmp_path, one["id"]) == {3: {one["first_step"]}}
    first = everybody["first_step"]
    assert (everybody["task"], everybody["coverage"]) == ("tensor", dict.fromkeys("0123", "written"))
    both = {rank: {first, first + 1} for rank in range(WORLD_SIZE)}
    wait_until(lambda: dumped(tmp_path, everybody["id"]) == both, what="the dumps of all ranks are delivered")
    assert not any(process.has_ended() for process in ranks), "training goes on"
    legs = measure(server, tmp_path, one, done_s)
    with capsys.disabled():
        report(legs)
    assert all(duration_s >= 0 for _, duration_s in legs)
    wait_until(lambda: "TrainermonWatchdog" in switch.heard, what="the dead-man switch hears its alert")


def measure(server: Server, folder: Path, escalation: dict[str, Any], done_s: float) -> list[tuple[str, float]]:
    """Return how long each leg of the way has taken, in seconds."""
    alert = 'ALERTS{alertname="TrainermonRankLossApart",alertstate="%s"}'
    moments = [
        ("fault", float((folder / "fault.time").read_text())),
        ("step → agent → scrape", first_time(server, 'trainermon_loss{rank="3"}', lambda loss: loss > 50)),
        ("scrape → rule pending", first_time(server, alert % "pending")),
        ("pending → firing (for: 2s here, 2m as generated)", first_time(server, alert % "firing")),
        ("firing → Alertmanager → controller (group_wait 1s)", escalation["accepted_s"]),
        ("controller → agents → dump of the common step", written(folder, escalation["id"])),
        ("dump → reported to the controller", done_s),
    ]
    return [(name, moment - before) for (_, before), (name, moment) in itertools.pairwise(moments)]


def report(legs: list[tuple[str, float]]) -> None:
    sys.stdout.write("\n")
    for name, duration_s in [*legs, ("in all", sum(duration_s for _, duration_s in legs))]:
        sys.stdout.write(f"  {duration_s:6.2f} s  {name}\n")
