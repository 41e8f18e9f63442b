"""`trainermon export`: what a run could not send is sent after it."""

import json
import subprocess
import sys
import threading

import pytest

from tests.exporters.influx_servers import influxdb
from tests.exporters.recorded_run import commit
from tests.server_programs import free_port
from trainermon.cli import main
from trainermon.exporters.segment_follower import SegmentFollower

HOLDER = """
import sys
from pathlib import Path
from trainermon.exporters.segment_follower import SegmentFollower
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
    assert second == "one: 0 points sent\ntwo: 0 points sent\n"


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
    assert "influxdb.url is not set; give a file with --config" in capsys.readouterr().err

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
