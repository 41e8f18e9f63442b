"""The second rung: an alert that is not fatal makes a training process dump later steps, through the agent and back."""

import json
import os
import subprocess
import sys

from trainermon.dump.files.reader import read_dump

RULES = """
rules:
  - name: loss-positive
    severity: warning
    on: {kind: loss, statistic: mean}
    when: {threshold: {above: 0}}
    escalate: {action: dump, task: statistics, steps: 2}
    summary: "the loss is {value} at step {step} on rank {rank}"
"""
SCRIPT = """
import sys, time
import torch
from trainermon import TrainerMon

(config,) = sys.argv[1:]
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with TrainerMon(config) as monitor:
    monitor.set_monitor(model, optimizer)
    dumps = monitor.run_directory / "dumps"
    deadline = time.monotonic() + 60
    while len(list(dumps.glob("*/attempt1/step*/rank0/dump.json"))) < 2 and time.monotonic() < deadline:
        loss = model(torch.randn(4, 8)).square().mean() + 1
        loss.backward()
        monitor.record(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
"""


def test_an_alert_orders_a_dump_that_the_rank_writes(tmp_path):
    (tmp_path / "rules.yaml").write_text(RULES)
    (tmp_path / "script.py").write_text(SCRIPT)
    config = {
        "rules": str(tmp_path / "rules.yaml"),
        "escalation": {"num_steps": 2, "margin_steps": 100},
        "agent": {"linger_s": 0},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    places = {"TRAINERMON_SPOOL": str(tmp_path / "spool"), "TRAINERMON_OUTPUT": str(tmp_path / "output")}

    subprocess.run(
        [sys.executable, "script.py", "config.json"],
        cwd=tmp_path,
        env=os.environ | places | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=900,
        check=True,
    )

    (alerts,) = (tmp_path / "output").glob("*/nodes/*/alerts.jsonl")
    (alert,) = [json.loads(line) for line in alerts.read_text().splitlines()]
    assert (alert["rule"], alert["severity"], alert["state"], alert["rank"]) == (
        "loss-positive",
        "warning",
        "firing",
        0,
    )
    dumps = [read_dump(path.parent) for path in sorted((tmp_path / "output").glob("*/dumps/*/*/*/rank0/dump.json"))]
    assert len(dumps) == 2
    assert all(dump.info.complete and not dump.info.replay for dump in dumps)
    assert sorted(dump.info.step for dump in dumps)[0] > alert["step"]
    assert {entry.key for entry in dumps[0].entries} >= {"Module.0.Linear.forward.0", "Module.2.Linear.backward.0"}
