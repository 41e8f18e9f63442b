"""The agent's metrics in a registry of another program: the same as under `/metrics`, and never in its way."""

from __future__ import annotations

import contextlib
import math
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from tests.agent.nodes import wait_for
from tests.exporters.prometheus_servers import prometheus
from tests.ports import free_port
from trainermon.exporters.collector import TrainermonCollector
from trainermon.exporters.discovery import write_targets
from trainermon.exporters.node_agent import STATUS_FILE

CHANGING = (
    "process_",
    "trainermon_agent_",
    "trainermon_collection_",
    "trainermon_commits_",
    "trainermon_exposed_",
    "trainermon_last_",
)
TRAINING = """
    import sys, urllib.request
    import torch
    from prometheus_client import REGISTRY, start_http_server
    from trainermon import TrainerMon
    from trainermon.exporters.collector import TrainermonCollector

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = TrainerMon({"output_dir": sys.argv[1], "targets": {}, "wg_distribution": True})
    monitor.set_monitor(model, optimizer=optimizer)
    REGISTRY.register(TrainermonCollector(monitor.run_directory))
    start_http_server(int(sys.argv[2]), addr="127.0.0.1")
    print("ready", flush=True)
    for line in sys.stdin:
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
        print(monitor.run_directory, flush=True)
"""


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINERMON_SPOOL", str(tmp_path / "spool"))


def samples(text):
    """Return every sample of a text by name and labels, without what differs from one scrape to the next."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.startswith(CHANGING) and not sample.name.endswith("_created"):
                found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def comparable(found):
    """Return the values with a word for NaN, which is not equal to itself."""
    return {key: "NaN" if math.isnan(value) else value for key, value in found.items()}


@contextlib.contextmanager
def served(collector):
    """Serve the collector from a registry of its own; yield the port."""
    registry = CollectorRegistry(auto_describe=True)
    registry.register(collector)
    server, thread = start_http_server(free_port(), addr="127.0.0.1", registry=registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return answer.read().decode()


def test_it_shows_what_the_agent_shows(run):
    rank = run.rank(start_agent=True)
    rank.steps(0, 5)
    rank.steps(5, 1, nan=True)
    wait_for(lambda: b'trainermon_step{run="run",rank="0"} 5' in run.get("metrics"), "the last step")

    with served(TrainermonCollector(run.output, own_process=True)) as port:
        found = samples(scrape(port))

    shown = samples(run.get("metrics").decode())
    assert found.pop(("trainermon_collector_up", ())) == 1.0
    assert comparable(found) == comparable(shown)
    assert any(name == "trainermon_gradient_rms" for name, _ in found)
    assert any(name == "trainermon_build_info" for name, _ in found)


@pytest.mark.server
def test_a_real_prometheus_scrapes_it(run, tmp_path):
    rank = run.rank(start_agent=True)
    rank.steps(0, 7)
    with served(TrainermonCollector("run")) as port, prometheus(tmp_path / "prometheus") as server:
        write_targets(tmp_path / "prometheus" / "discovery" / "run.json", f"127.0.0.1:{port}")
        wait_for(lambda: server.query("trainermon_step") == {"0": 6.0}, "the last step in Prometheus")
        assert server.query("trainermon_collector_up") == {"": 1.0}
        assert not server.query("process_resident_memory_bytes")


def test_a_registry_with_its_own_process_metrics_shows_each_once(run):
    run.rank(start_agent=True).steps(0, 2)
    run.running()
    collector = TrainermonCollector(run.output)

    REGISTRY.register(collector)
    try:
        names = [family.name for family in REGISTRY.collect()]
    finally:
        REGISTRY.unregister(collector)
    assert "trainermon_step" in names
    assert "process_resident_memory_bytes" in names
    assert len(names) == len(set(names))


def test_without_a_run_it_says_so():
    registry = CollectorRegistry()
    registry.register(TrainermonCollector("not-there"))

    assert [(family.name, family.samples[0].value) for family in registry.collect()] == [
        ("trainermon_collector_up", 0.0)
    ]


def test_an_agent_that_does_not_answer_is_waited_for_no_longer_than_asked(tmp_path):
    output = tmp_path / "output" / "run"
    (output / "nodes").mkdir(parents=True)
    (output / "token").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (tmp_path / "spool" / "run").mkdir(parents=True)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        (tmp_path / "spool" / "run" / STATUS_FILE).write_text(f'{{"url": "{url}", "output": "{output}"}}')
        began_s = time.monotonic()

        (family,) = TrainermonCollector(output, timeout_s=0.2).collect()

    assert family.samples[0].value == 0.0
    assert time.monotonic() - began_s < 30


@pytest.mark.extras
def test_in_the_training_process(tmp_path):
    port = free_port()
    command = [sys.executable, "-c", textwrap.dedent(TRAINING), str(tmp_path / "runs"), str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            scrapes = threading.Thread(target=lambda: [scrape(port) for _ in range(5)])
            scrapes.start()
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline()
            scrapes.join()
            wait_for(lambda: 'trainermon_step{rank="0"' in scrape(port), "a step of the rank")
            found = samples(scrape(port))
        finally:
            process.stdin.close()
            process.wait(600)
            process.stdout.close()
    assert {value for (name, _), value in found.items() if name == "trainermon_step"} == {2.0}
    assert process.returncode == 0
