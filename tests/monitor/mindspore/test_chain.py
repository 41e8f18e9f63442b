"""A run of MindSpore under its own agent: page, /metrics, rules, store, query and diagnosis, all unchanged."""

import json
import re
import subprocess
import sys
import time
import urllib.request

import pytest

from tests.journal_rows import only_spool
from tests.monitor.mindspore.training_with_a_fault import FAULT, STEPS

pytestmark = [pytest.mark.mindspore, pytest.mark.server]
LIMIT_S = 120.0


def ask(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def until(condition):
    """Return what `condition` returns once it is true; a server on a busy machine takes its time."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)
    return found


def page_of(spool_root):
    """Return the address of the agent's page, once it has one."""

    def known():
        files = list(spool_root.glob("*/agent.status.json"))
        return files and json.loads(files[0].read_text()).get("url", "")

    return until(known).rstrip("/")


def command(*arguments):
    done = subprocess.run([sys.executable, "-m", "trainermon", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train once with a fault; return the output of all that can be asked while it stands, and the run directory."""
    folder = tmp_path_factory.mktemp("chain")
    config = folder / "monitor_config.json"  # keys as msprobe's manual has them
    config.write_text(
        json.dumps(
            {
                "targets": {},
                "wg_distribution": True,
                "mv_distribution": True,
                "param_distribution": True,
                "xy_distribution": True,
                "all_xy": True,
                "format": "csv",
                "ops": ["norm", "min", "max", "mean", "nans"],
                "output_dir": str(folder / "output"),
                "spool_dir": str(folder / "spool"),
                "run_id": "chain",
                "agent": {"linger_s": 0.5, "wait_s": 60},
            }
        )
    )
    program = [sys.executable, "-m", "tests.monitor.mindspore.training_with_a_fault", str(config)]
    training = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert training.stdout.readline() == "trained\n"
        page = page_of(folder / "spool")
        assert only_spool(folder / "spool").name.startswith("chain-")
        until(lambda: re.search(rf"^trainermon_step{{.*}} {STEPS - 1}(\.0)?$", ask(f"{page}/metrics"), re.MULTILINE))
        answers = {path: ask(page + path) for path in ("/api/run", "/api/alerts", "/metrics")}
    finally:
        training.communicate("\n", timeout=LIMIT_S)
    assert training.returncode == 0
    return answers, folder / "output" / "chain"


def test_the_page_and_prometheus_know_the_run(run):
    answers, directory = run
    about = json.loads((directory / "ranks" / "rank00000.json").read_text())

    assert about["framework"] == "mindspore"
    assert about["environment"]["mindspore"]["mode"] == "pynative"
    assert "chain" in answers["/api/run"]
    assert "trainermon_loss{" in answers["/metrics"]
    assert "fatal" in answers["/api/alerts"]


def test_a_rule_raises_an_alert_on_the_step_of_the_fault(run):
    _, directory = run
    logged = [json.loads(line) for path in directory.rglob("alerts.jsonl") for line in path.read_text().splitlines()]

    assert {alert["severity"] for alert in logged} >= {"fatal"}
    assert min(alert["first_step"] for alert in logged if alert["severity"] == "fatal") == FAULT


def test_the_store_answers_sql(run):
    _, directory = run

    rows = command(
        "query",
        str(directory),
        "select kind, min(step), max(step), count(*) from stats group by kind",
        "--format",
        "csv",
    )

    found = {line.split(",")[0]: line.split(",")[1:] for line in rows.splitlines()[1:]}
    assert found["grad_reduced"] == ["0", str(STEPS - 1), str(6 * STEPS)]
    assert {"loss", "actv", "actv_grad", "exp_avg", "exp_avg_sq", "param_origin", "param_updated", "step"} <= set(found)


def test_the_diagnosis_names_the_parameter(run):
    _, directory = run

    report = command("diagnose", str(directory))

    assert f"step {FAULT}" in report
    assert "first.bias" in report
