"""Metrics of a node that cannot be scraped, pushed by a real agent to a real Pushgateway."""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.agent.nodes import wait_for
from tests.ports import free_port
from tests.server_programs import find_program, running

pytestmark = pytest.mark.server


class Gateway:
    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"

    def ready(self):
        try:
            return self.get("/-/ready") is not None
        except OSError:
            return False

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=900) as answer:
            return answer.read()

    def groups(self):
        """Return the labels of every group that was pushed."""
        return [group["labels"] for group in json.loads(self.get("/api/v1/metrics"))["data"]]

    def samples(self):
        families = text_string_to_metric_families(self.get("/metrics").decode())
        return {
            sample.name: (sample.labels, sample.value)
            for family in families
            for sample in family.samples
            if sample.labels.get("run") == "run"
        }


def command(port):
    # Debian's package would keep the groups of one test for the next one.
    return [find_program("prometheus-pushgateway"), f"--web.listen-address=127.0.0.1:{port}", "--persistence.file="]


@contextlib.contextmanager
def gateway(folder):
    port = free_port()
    server = Gateway(port)
    with running(command(port), log=folder / "pushgateway.log", ready=server.ready):
        yield server


def outputs(server, **more):
    return {"format": ["pushgateway"], "pushgateway": {"url": server.url, "interval_s": 0.1, "job": "night", **more}}


def test_the_last_values_stay(make_run, tmp_path):
    with gateway(tmp_path) as server:
        run = make_run(outputs=outputs(server))
        rank = run.rank(start_agent=True)
        rank.steps(0, 4)
        wait_for(lambda: server.samples().get("trainermon_step", ({}, -1))[1] == 3.0, "the last step")
        told = server.get("/metrics")
        checked = subprocess.run([find_program("promtool"), "check", "metrics"], input=told, capture_output=True)
        rank.end()
        run.gone()

        labels, value = server.samples()["trainermon_step"]
        assert (labels["job"], labels["run"], labels["rank"], value) == ("night", "run", "0", 3.0)
        assert [(group["job"], group["run"], group["node"]) for group in server.groups()] == [
            ("night", "run", run.node_dir.name)
        ]
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "pushgateway failed" not in run.log()


def test_the_group_is_deleted_if_asked(make_run, tmp_path):
    with gateway(tmp_path) as server:
        run = make_run(outputs=outputs(server, delete_at_end=True))
        rank = run.rank(start_agent=True)
        rank.steps(0, 2)
        wait_for(server.groups, "a group")
        rank.end()
        run.gone()
        assert server.groups() == []


def test_a_gateway_that_is_away_is_tried_again(make_run, tmp_path):
    port = free_port()
    away = Gateway(port)
    run = make_run(outputs=outputs(away))
    rank = run.rank(start_agent=True)
    rank.steps(0, 2)
    wait_for(lambda: "export pushgateway failed to send (failure 2)" in run.log(), "two failures")
    with running(command(port), log=tmp_path / "pushgateway.log", ready=away.ready):
        wait_for(away.groups, "a group")
        rank.end()
        run.gone()
