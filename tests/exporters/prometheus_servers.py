"""A real Prometheus, and an exposition served as the agent serves it."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.exporters.runs import block_of, header_of
from tests.ports import free_port
from tests.server_programs import find_program, running, wait_until
from trainermon.core.values import SeriesKey
from trainermon.exporters.prometheus.exposition import Exposition

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
        wait_until(lambda: len(self.accepted) >= begun + 2, timeout_s=900, what="two scrapes")


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

    def history(self, metric: str) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """Return, for each series of a metric, its labels and every sample as (time, value)."""
        found = json.loads(self._get("/api/v1/query?" + urllib.parse.urlencode({"query": f"{metric}[1h]"})))
        return [
            (series["metric"], [(time_s, float(value)) for time_s, value in series["values"]])
            for series in found["data"]["result"]
        ]

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=900) as response:
            return response.read()


@contextlib.contextmanager
def serving(exposition: Exposition) -> Iterator[Agent]:
    """Serve an exposition."""
    agent = Agent(exposition)
    thread = threading.Thread(target=agent.server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield agent
    finally:
        agent.server.shutdown()
        thread.join()
        agent.server.server_close()


@contextlib.contextmanager
def prometheus(folder: Path, *arguments: str) -> Iterator[Prometheus]:
    """Start a Prometheus that finds its targets in `folder/discovery`."""
    port = free_port()
    server = Prometheus(port)
    discovery = folder / "discovery"
    discovery.mkdir(parents=True)
    configuration = folder / "prometheus.yml"
    configuration.write_text(CONFIGURATION.replace("DISCOVERY", str(discovery)))
    command = [
        find_program("prometheus"),
        f"--config.file={configuration}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
        *arguments,
    ]
    with running(command, log=folder / "prometheus.log", ready=server.ready):
        yield server
