"""A real Prometheus finds an agent by the discovery file, scrapes it, and answers with the values that went in."""

import http.server
import json
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.exporters.runs import LOSS, STEP_TIME, block_of, header_of
from tests.server_programs import find_program, free_port, running, wait_until
from trainermon.exporters.discovery import clear_targets, write_targets
from trainermon.exporters.prometheus import Exposition
from trainermon.monitor.values import Kind, SeriesKey, Severity

pytestmark = pytest.mark.server

WEIGHT = SeriesKey(Kind.GRAD_REDUCED, 'h.0."w"\\')
CONFIGURATION = """
global: {scrape_interval: 200ms, scrape_timeout: 200ms}
scrape_configs:
- job_name: trainermon
  file_sd_configs: [{files: ["DISCOVERY/*.json"]}]
"""


class Agent:
    """Serves an exposition as the agent does: rendered anew for each scrape, one request at a time."""

    def __init__(self, exposition: Exposition) -> None:
        self.exposition = exposition
        self.lock = threading.Lock()
        self.accepted: list[str | None] = []
        agent = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                agent.accepted.append(self.headers.get("Accept"))
                with agent.lock:
                    body, content_type = agent.exposition.render(agent.accepted[-1])
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"

    def update(self, rank: int, tensors: dict[SeriesKey, np.ndarray], step: int) -> None:
        with self.lock:
            self.exposition.update(header_of(rank), list(tensors), block_of(tensors, list(tensors), step=step))

    def remove_rank(self, rank: int) -> None:
        with self.lock:
            self.exposition.remove_rank(rank)

    def wait_for_a_whole_scrape(self) -> None:
        """Return when a scrape that began after this call was taken in: the one after it has begun."""
        begun = len(self.accepted)
        wait_until(lambda: len(self.accepted) >= begun + 2, timeout_s=20, what="two scrapes")


class Prometheus:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def ready(self) -> bool:
        try:
            return bool(self._get("/-/ready"))
        except OSError:
            return False

    def query(self, expression: str) -> dict[str, float]:
        """Return the values by rank; empty where there is none."""
        found = json.loads(self._get("/api/v1/query?" + urllib.parse.urlencode({"query": expression})))
        return {s["metric"].get("rank", ""): float(s["value"][1]) for s in found["data"]["result"]}

    def exemplars(self, expression: str) -> list[dict]:
        span = {"query": expression, "start": time.time() - 3600, "end": time.time() + 3600}
        found = json.loads(self._get("/api/v1/query_exemplars?" + urllib.parse.urlencode(span)))
        return [exemplar for series in found["data"] for exemplar in series["exemplars"]]

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return response.read()


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent(Exposition("run", rules={"loss_spike": Severity.WARNING}))
    thread = threading.Thread(target=agent.server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield agent
    agent.server.shutdown()
    thread.join()
    agent.server.server_close()


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    port = free_port()
    server = Prometheus(port)
    discovery = tmp_path / "discovery"
    discovery.mkdir()
    configuration = tmp_path / "prometheus.yml"
    configuration.write_text(CONFIGURATION.replace("DISCOVERY", str(discovery)))
    command = [
        find_program("prometheus"),
        f"--config.file={configuration}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
    ]
    with running(command, log=tmp_path / "prometheus.log", ready=server.ready):
        yield server


def test_prometheus_reads_back_what_went_in_and_forgets_what_has_gone(
    agent: Agent, prometheus: Prometheus, tmp_path: Path
):
    """One long test: Prometheus takes five seconds to find a target, whatever it is told."""
    targets = tmp_path / "discovery" / "run.json"
    step = int(time.time() - 1.7e9)  # blocks are dated 1.7e9 + step, and exemplars have to be recent
    for rank in range(2):
        weight = np.array([0.1 + rank, 1e-30])
        agent.update(rank, {LOSS: np.array([1 / 3 + rank]), STEP_TIME: np.array([0.2]), WEIGHT: weight}, step)

    write_targets(targets, agent.address, {"host": "node-1"})
    wait_until(lambda: prometheus.query("trainermon_step"), what="first scrape")
    assert_values_and_labels_come_back(prometheus, step)
    assert_exemplars_come_back(prometheus, step)
    assert "application/openmetrics-text" in agent.accepted[0]

    agent.update(0, {LOSS: np.array([np.nan]), STEP_TIME: np.array([0.2]), WEIGHT: np.ones(2)}, step + 1)
    agent.wait_for_a_whole_scrape()
    assert set(prometheus.query("trainermon_loss")) == {"1"}, "a loss that is not finite has no sample"
    assert prometheus.query('trainermon_nonfinite_elements_total{kind="loss"}') == {"0": 1, "1": 0}

    agent.remove_rank(1)
    agent.wait_for_a_whole_scrape()
    assert set(prometheus.query("trainermon_step")) == {"0"}, "gone at the next scrape, not after five minutes"
    assert set(prometheus.query("trainermon_gradient_rms")) == {"0"}

    clear_targets(targets)
    wait_until(lambda: not prometheus.query("trainermon_step or up"), what="the target gone")


def assert_values_and_labels_come_back(prometheus: Prometheus, step: int) -> None:
    assert prometheus.query("trainermon_step") == {"0": step, "1": step}
    assert prometheus.query('trainermon_loss{host="node-1",run="run"}') == {"0": 1 / 3, "1": 1 / 3 + 1}
    rms = {str(rank): float(np.sqrt(np.mean(np.square([0.1 + rank, 1e-30])))) for rank in range(2)}
    assert prometheus.query('trainermon_gradient_rms{module="h.0.\\"w\\"\\\\"}') == pytest.approx(rms, rel=1e-15)
    assert prometheus.query("sum by (rank) (trainermon_nonfinite_elements_total)") == {"0": 0, "1": 0}
    assert prometheus.query('trainermon_alerts_firing{rule="loss_spike"}') == {"": 0}
    assert prometheus.query("count by (rank) (trainermon_run_info)") == {"0": 1, "1": 1}
    assert prometheus.query('count({run="run"}) == bool scalar(scrape_samples_scraped)') == {"": 1}


def assert_exemplars_come_back(prometheus: Prometheus, step: int) -> None:
    quantile = prometheus.query("histogram_quantile(0.5, sum by (le) (trainermon_step_duration_seconds_bucket))")
    exemplars = prometheus.exemplars("trainermon_step_duration_seconds_bucket")

    assert 0.1 <= quantile[""] <= 0.25
    assert {exemplar["labels"]["step"] for exemplar in exemplars} == {str(step)}
