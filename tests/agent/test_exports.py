"""Whatever an exporter does, it costs its own output and nothing else, and nothing is left out without a word."""

import json
import logging
import os
import signal
import sys
import threading

import pytest

from tests.agent.nodes import wait_for
from tests.exporters.recorded_run import commit
from tests.exporters.store.test_feed import losses, truth
from trainermon.agent import export_process
from trainermon.agent.export_process import ExporterThread
from trainermon.agent.exports import ExportProcess
from trainermon.agent.lifecycle.lock import SETTINGS_FILE
from trainermon.agent.settings import load_settings
from trainermon.core.errors import ConfigError, StoreError
from trainermon.exporters.export import StoreExporter

SLOW = """
import time
from trainermon.exporters.export import Exporter

class Slow(Exporter):
    def __init__(self, settings):
        self.path = settings.run_dir / "slow.txt"
    def write(self, header, block):
        time.sleep(0.3)
        with self.path.open("a") as file:
            file.write(f"{header.coordinates.rank} {block.step}\\n")

class Printing(Exporter):
    def __init__(self, settings):
        print("a word of a library", flush=True)
    def write(self, header, block):
        raise KeyError(block.step)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return what starts the exporters of a run whose segments are in `tmp_path / "run"`."""
    package = tmp_path / "packages"
    (package / "slow-1.dist-info").mkdir(parents=True)
    (package / "slow.py").write_text(SLOW)
    (package / "slow-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: slow\nVersion: 1\n")
    points = "[trainermon.exporters]\nslow = slow:Slow\nprinting = slow:Printing\n"
    (package / "slow-1.dist-info" / "entry_points.txt").write_text(points)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package), *filter(None, sys.path)]))
    monkeypatch.syspath_prepend(package)
    started = []

    def begin(*formats):
        spool = tmp_path / "spool"
        spool.mkdir(exist_ok=True)
        outputs = {"format": list(formats), "ndigits": 17, "step_count_per_record": 100}
        plain = {"run_id": "run", "output": str(tmp_path / "run"), "outputs": outputs}
        (spool / SETTINGS_FILE).write_text(json.dumps(plain))
        started.append(ExportProcess(spool, load_settings(spool), tmp_path / "run"))
        return started[-1]

    yield begin
    for exports in started:
        exports.close(0)


def test_a_backlog_is_written_to_the_end(start, tmp_path):
    commit(tmp_path / "run" / "segments", range(5))
    exports = start("slow", "csv")

    exports.close()  # ten steps of ranks that take 3 s: once more than what was waited for

    lines = (tmp_path / "run" / "slow.txt").read_text().split("\n")
    assert sorted(filter(None, lines)) == sorted(f"{rank} {step}" for rank in range(2) for step in range(5))
    assert losses(tmp_path / "run") == pytest.approx(truth(range(5)), nan_ok=True)
    assert exports.metrics()["slow"]["trainermon_exported_steps_total"] == 10
    assert (exports.num_errors, exports.num_dropped) == (0, 0)


def test_a_killed_process_is_started_again_and_goes_on(start, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("trainermon.agent.exports.RETRY_S", 0.0)
    commit(tmp_path / "run" / "segments", range(3))
    exports = start("csv")
    wait_for(lambda: exports.metrics().get("csv", {}).get("trainermon_exported_steps_total") == 6, "the first steps")

    with caplog.at_level(logging.ERROR):
        os.kill(exports._process.pid, signal.SIGKILL)
        commit(tmp_path / "run" / "segments", range(3, 5))
        wait_for(lambda: len(losses(tmp_path / "run")) == 10, "what was committed since")
    exports.close()

    assert losses(tmp_path / "run") == pytest.approx(truth(range(5)), nan_ok=True)
    assert "the process of the exporters ended (status -9); it is started again" in caplog.text
    assert exports.num_errors == 1


def test_what_an_exporter_says_and_fails_at_is_in_the_log_of_the_agent(start, tmp_path, caplog):
    commit(tmp_path / "run" / "segments", range(1))
    with caplog.at_level(logging.INFO):
        exports = start("printing", "cvs", "null")
        wait_for(lambda: exports.metrics().get("null", {}).get("trainermon_exported_steps_total") == 2, "the others")
        exports.close()

    assert "exporters: a word of a library" in caplog.text
    assert "format: found 'cvs', expected one of api, csv" in caplog.text
    assert "export printing: step 0 of rank 0 is left out" in caplog.text
    assert (exports.num_errors, exports.num_dropped) == (1, 2)


def test_without_exporters_there_is_no_process(start):
    exports = start("api")

    exports.close()

    assert exports._process is None
    assert exports.metrics() == {}


class Hanging(StoreExporter):
    def __init__(self):
        self.may_go_on = threading.Event()

    def send(self, stop):
        self.may_go_on.wait(60)


def test_one_that_hangs_keeps_neither_others_nor_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(export_process, "PATIENCE_S", 0.2)
    monkeypatch.setattr(export_process, "LOOK_S", 0.01)
    hanging, told = Hanging(), []

    class Prompt(StoreExporter):
        def send(self, stop):
            told.append("sent")

    followers = [ExporterThread("hanging", lambda: hanging), ExporterThread("prompt", Prompt)]
    wait_for(lambda: told, "the other one")

    export_process._finish(followers)

    assert followers[0].thread.is_alive()
    hanging.may_go_on.set()
    for follower in followers:
        follower.thread.join()


def test_one_that_another_process_has_is_waited_for_and_one_that_is_impossible_is_not(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(export_process, "LOOK_S", 0.01)
    answers = [StoreError("locked by another"), StoreError("locked by another"), None]
    told = []

    class Prompt(StoreExporter):
        def send(self, stop):
            told.append("sent")

    def make():
        if answer := answers.pop(0):
            raise answer
        return Prompt()

    def impossible():
        raise ConfigError("there is no such form")

    waiting, broken = ExporterThread("waiting", make), ExporterThread("broken", impossible)
    broken.thread.join()
    wait_for(lambda: told, "the lock")
    waiting.is_ending.set()
    waiting.thread.join()

    assert caplog.text.count("locked by another") == 1
    assert "there is no such form" in caplog.text
    assert waiting.counts()["trainermon_export_errors_total"] == 0
    assert broken.counts()["trainermon_export_errors_total"] == 1
