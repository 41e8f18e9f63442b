"""`trainermon export`: what a run could not send is sent after it."""

import json
import shutil
import subprocess
import sys
import threading

import pytest
from tensorboard.backend.event_processing import event_accumulator

from tests.exporters.influx_servers import influxdb
from tests.exporters.recorded_run import commit
from tests.exporters.store.test_feed import losses, truth
from tests.ports import free_port
from trainermon.cli import main
from trainermon.exporters.store.segment_follower import SegmentFollower

HOLDER = """
import sys
from pathlib import Path
from trainermon.exporters.store.segment_follower import SegmentFollower
folder = Path(sys.argv[1])
follower = SegmentFollower(folder / "segments", folder / "influxdb.state.json")
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run_dir(tmp_path):
    for host in ("one", "two"):
        commit(tmp_path / "run" / "nodes" / host / "segments", range(3))
    return tmp_path / "run"


def configure(run_dir, url):
    (run_dir / "run.json").write_text(json.dumps({"config": {"influxdb": {"url": url, "api": "v1"}}}))


def test_csv_and_event_files_are_made_of_the_store_after_the_run(run_dir, capsys):
    shutil.rmtree(run_dir / "nodes" / "two")
    (run_dir / "run.json").write_text(json.dumps({"config": {"ndigits": 17, "step_count_per_record": 100}}))

    assert main(["export", str(run_dir), "--format", "csv", "--format", "tensorboard"]) == 0

    assert losses(run_dir) == pytest.approx(truth(range(3)), nan_ok=True)
    events = event_accumulator.EventAccumulator(str(run_dir / "tensorboard" / "rank0" / "scalars")).Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([truth(range(3))[0, s] for s in range(3)])
    assert capsys.readouterr().out.splitlines() == [
        f"one: csv: 6 steps of ranks written in {run_dir / 'csv'}",
        f"one: tensorboard: 6 steps of ranks written in {run_dir / 'tensorboard'}",
    ]


def test_what_is_missing_is_added_and_with_again_everything_is_written_anew(run_dir, capsys):
    shutil.rmtree(run_dir / "nodes" / "two")
    (run_dir / "run.json").write_text(json.dumps({"config": {"format": ["csv"], "ndigits": 17}}))
    assert main(["export", str(run_dir)]) == 0
    commit(run_dir / "nodes" / "one" / "segments", range(3, 5))

    assert main(["export", str(run_dir)]) == 0
    assert losses(run_dir) == pytest.approx(truth(range(5)), nan_ok=True)
    for path in run_dir.glob("csv/*/scalars_*.csv"):
        path.unlink()
    assert main(["export", str(run_dir), "--again"]) == 0

    assert losses(run_dir) == pytest.approx(truth(range(5)), nan_ok=True)
    counts = [line.split(": ")[2] for line in capsys.readouterr().out.splitlines()]
    folder = run_dir / "csv"
    assert counts == [f"{n} steps of ranks written in {folder}" for n in (6, 4, 10)]


@pytest.mark.server
def test_every_node_of_a_run_is_sent_once(run_dir, tmp_path, capsys):
    with influxdb(tmp_path / "server") as server:
        configure(run_dir, server.url)

        assert main(["export", str(run_dir)]) == 0
        first = capsys.readouterr().out
        assert main(["export", str(run_dir)]) == 0
        second = capsys.readouterr().out

        (row,) = server.query("SELECT count(step) AS n FROM trainermon_step")
    assert row["n"] == 6
    assert [line.split(":")[0] for line in first.splitlines()] == ["one", "two"]
    assert [line.split(": nothing is stored")[0] for line in second.splitlines()] == [
        f"{node}: influxdb: 0 points sent" for node in ("one", "two")
    ]


def test_a_server_that_is_away_is_waited_for_and_then_reported(run_dir, capsys):
    configure(run_dir, f"http://127.0.0.1:{free_port()}")

    assert main(["export", str(run_dir), "--wait", "0.2"]) == 1

    assert "MB of the run are not sent" in capsys.readouterr().err
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_a_run_that_says_nothing_of_a_server_needs_a_configuration(run_dir, tmp_path, capsys):
    assert main(["export", str(run_dir)]) == 1
    assert "run.json does not say how the run was configured" in capsys.readouterr().err

    (run_dir / "run.json").write_text('{"config": {}}')
    assert main(["export", str(run_dir)]) == 1
    assert "run.json names no form to write; say which, as in --format csv" in capsys.readouterr().err
    assert main(["export", str(run_dir), "--format", "influxdb"]) == 1
    assert "influxdb.url is not set; give a configuration that sets it with --config" in capsys.readouterr().err

    config = tmp_path / "monitor.json"
    config.write_text(json.dumps({"influxdb": {"url": f"http://127.0.0.1:{free_port()}"}}))
    assert main(["export", str(run_dir), "--config", str(config), "--wait", "0.1"]) == 1
    assert "not sent" in capsys.readouterr().err


def test_an_agent_that_is_sending_is_left_alone(run_dir, capsys):
    configure(run_dir, f"http://127.0.0.1:{free_port()}")
    node = run_dir / "nodes" / "one"
    command = [sys.executable, "-c", HOLDER, str(node)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "locked\n"

        assert main(["export", str(run_dir)]) == 1

        assert "is locked: another process, probably the run's agent" in capsys.readouterr().err
    SegmentFollower(node / "segments", node / "influxdb.state.json").close()


def test_nothing_sent_is_told_with_the_reason(run_dir, capsys, monkeypatch):
    shutil.rmtree(run_dir / "nodes" / "two")
    gateway = {"pushgateway": {"url": f"http://127.0.0.1:{free_port()}"}}
    (run_dir / "run.json").write_text(json.dumps({"config": {"format": ["csv"], **gateway}}))

    assert main(["export", str(run_dir), "--format", "pushgateway"]) == 1
    assert "0 points sent: no agent of the run answers" in capsys.readouterr().out

    assert main(["export", str(run_dir)]) == 0
    capsys.readouterr()
    assert main(["export", str(run_dir)]) == 0
    assert "0 steps of ranks written" in (said := capsys.readouterr().out)
    assert "--again begins with the first step" in said
