"""Real servers that hold the recorded run, and what Grafana does to a query before it sends it to one."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.dashboards.grafana.recorded_run import RUN_ID, SCRAPE_S, GrafanaRun
from tests.exporters.influx_servers import InfluxDB, influxdb
from tests.ports import free_port
from tests.server_programs import find_program, running

PICKED = {"run": RUN_ID, "stage": ["0", "1"], "rank": [str(rank) for rank in range(8)], "module": "h.11.attn"}
_VARIABLE = re.compile(r"\$\{([a-zA-Z_]\w*)(?::\w+)?\}|\$([a-zA-Z_]\w*)")  # as Grafana; $1 is left alone


class History:
    """A Prometheus that holds a recorded run."""

    def __init__(self, url: str, run: GrafanaRun) -> None:
        self.url = url
        self.run = run

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=900):
                return True
        except OSError:
            return False

    def ask(self, path: str, parameters: Mapping[str, Any]) -> Any:
        """Return the data of an answer of the API; an error of the query fails the test with Prometheus's message."""
        query = urllib.parse.urlencode(parameters, doseq=True).encode()
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}", data=query, timeout=900) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def query(self, target: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return what a panel's query gives, over the whole run or at its end, as the panel asks for it."""
        expression = interpolate(target["expr"], self.variables())
        if target["instant"]:
            found = self.ask("query", {"query": expression, "time": self.run.end_s})
        else:
            span = {"start": self.run.start_s, "end": self.run.end_s, "step": SCRAPE_S}
            found = self.ask("query_range", {"query": expression, **span})
        return list(found["result"])

    def variables(self) -> dict[str, str]:
        """Return the variables as Grafana fills them in for this data source."""
        several = {name: value if isinstance(value, str) else f"({'|'.join(value)})" for name, value in PICKED.items()}
        times = {"__rate_interval": "60s", "__interval": "15s", "__range": f"{self.run.end_s - self.run.start_s:.0f}s"}
        return {**several, **times}


class Points:
    """An InfluxDB that holds a recorded run."""

    def __init__(self, server: InfluxDB, run: GrafanaRun) -> None:
        self.server = server
        self.run = run

    def query(self, text: str) -> list[dict[str, Any]]:
        """Return the rows of a query, its variables filled in as Grafana does."""
        several = {name: value if isinstance(value, str) else f"({'|'.join(value)})" for name, value in PICKED.items()}
        times = f"time >= {self.run.start_s * 1000:.0f}ms and time <= {self.run.end_s * 1000 + 999:.0f}ms"
        return self.server.query(interpolate(text, {**several, "timeFilter": times, "__interval": "15s"}))


def interpolate(text: str, variables: Mapping[str, str]) -> str:
    """Return the text with every variable filled in; one that is not known fails."""
    return _VARIABLE.sub(lambda found: variables[found[1] or found[2]], text)


@contextlib.contextmanager
def prometheus_with(run: GrafanaRun, folder: Path) -> Iterator[History]:
    """Start a Prometheus on the run's whole history, written into its store as its own tool does."""
    text, data = folder / "run.om", folder / "prometheus"
    text.write_text(run.openmetrics())
    backfill = [find_program("promtool"), "tsdb", "create-blocks-from", "openmetrics", str(text), str(data)]
    subprocess.run(backfill, check=True, capture_output=True)
    text.unlink()
    configuration = folder / "prometheus.yml"
    configuration.write_text("global: {}\n")
    history = History(f"http://127.0.0.1:{free_port()}", run)
    command = [
        find_program("prometheus"),
        f"--config.file={configuration}",
        f"--storage.tsdb.path={data}",
        "--storage.tsdb.retention.time=100y",
        f"--web.listen-address={history.url.removeprefix('http://')}",
    ]
    with running(command, log=folder / "prometheus.log", ready=history.ready):
        yield history


@contextlib.contextmanager
def influxdb_with(run: GrafanaRun, folder: Path) -> Iterator[Points]:
    """Start an InfluxDB and write every point of the run to it."""
    lines = list(run.line_protocol())
    with influxdb(folder / "influxdb") as server:
        for start in range(0, len(lines), 20_000):
            body = "\n".join(lines[start : start + 20_000]).encode()
            url = f"{server.url}/write?db=trainermon&precision=u"
            with urllib.request.urlopen(urllib.request.Request(url, data=body, method="POST"), timeout=900):
                pass
        yield Points(server, run)
