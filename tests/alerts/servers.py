"""A real Prometheus and a real Alertmanager on free ports of loopback, with their data in a temporary folder."""

from __future__ import annotations

import contextlib
import json
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.server_programs import find_program, running


class Server:
    """One of the two, by its address."""

    def __init__(self, port: int) -> None:
        self.address = f"127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        query = "?" + urllib.parse.urlencode(parameters) if parameters else ""
        with urllib.request.urlopen(f"http://{self.address}{path}{query}", timeout=900) as answer:
            return json.loads(answer.read())

    def post(self, path: str, body: Any) -> None:
        content = json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://{self.address}{path}", data=content, headers={"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=900).close()

    def ready(self) -> bool:
        try:
            urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=900).close()
        except OSError:
            return False
        return True


@contextlib.contextmanager
def prometheus(folder: Path, configuration: str) -> Iterator[Server]:
    """Start a Prometheus with this text as its configuration."""
    server = Server(free_port())
    path = folder / "prometheus.yml"
    path.write_text(configuration)
    command = [
        find_program("prometheus"),
        f"--config.file={path}",
        f"--storage.tsdb.path={folder / 'prometheus-data'}",
        f"--web.listen-address={server.address}",
        f"--web.external-url=http://{server.address}",
        "--web.enable-lifecycle",
    ]
    with running(command, log=folder / "prometheus.log", ready=server.ready):
        yield server


@contextlib.contextmanager
def alertmanager(folder: Path, configuration: str) -> Iterator[Server]:
    """Start an Alertmanager with this text as its configuration, alone, without peers."""
    server = Server(free_port())
    path = folder / "alertmanager.yml"
    path.write_text(configuration)
    command = [
        find_program("prometheus-alertmanager"),
        f"--config.file={path}",
        f"--storage.path={folder / 'alertmanager-data'}",
        f"--web.listen-address={server.address}",
        f"--web.external-url=http://{server.address}",
        "--cluster.listen-address=",
    ]
    with running(command, log=folder / "alertmanager.log", ready=server.ready):
        yield server
