"""InfluxDB for tests: the real server of the 1.x line, and the v2 API's surface in front of it.

No InfluxDB 2 or 3 can be installed from a package here. Whatever parses, refuses and stores points is therefore the 1.x
server, at its own `/write`; `V2Surface` adds what the v2 API has beside it: token, org, bucket, error bodies.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.ports import free_port
from tests.server_programs import find_program, running

CONFIGURATION = """
reporting-disabled = true
bind-address = "127.0.0.1:{rpc}"
[meta]
  dir = "{folder}/meta"
[data]
  dir = "{folder}/data"
  wal-dir = "{folder}/wal"
[http]
  bind-address = "127.0.0.1:{port}"
  auth-enabled = {auth}
  log-enabled = false
[monitor]
  store-enabled = false
"""


class InfluxDB:
    """A running 1.x server with the database `trainermon`."""

    def __init__(self, port: int, credentials: str = "") -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._credentials = credentials

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ping", timeout=900):
                return True
        except OSError:
            return False

    def query(self, text: str) -> list[dict]:
        """Return every row of every series as a mapping, tags and columns together, times in microseconds."""
        parameters = {"db": "trainermon", "epoch": "u"}
        if self._credentials:
            parameters["u"], _, parameters["p"] = self._credentials.partition(":")
        url = f"{self.url}/query?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, data=urllib.parse.urlencode({"q": text}).encode(), timeout=900) as response:
            (result,) = json.load(response)["results"]
        assert "error" not in result, result
        return [
            {**series.get("tags", {}), **dict(zip(series["columns"], row, strict=True))}
            for series in result.get("series", [])
            for row in series["values"]
        ]


@contextlib.contextmanager
def influxdb(folder: Path, *, port: int = 0, user: str = "") -> Iterator[InfluxDB]:
    """Start a server with its data in `folder`; with `user` ("name:password") it asks for credentials."""
    folder.mkdir(exist_ok=True)
    port = port or free_port()
    configuration = folder / "influxdb.conf"
    auth = "true" if user else "false"
    configuration.write_text(CONFIGURATION.format(rpc=free_port(), port=port, folder=folder, auth=auth))
    server = InfluxDB(port, user)
    command = [find_program("influxd"), "-config", str(configuration)]
    with running(command, log=folder / "influxd.log", ready=server.ready):
        if user:
            name, _, password = user.partition(":")
            server.query(f"CREATE USER \"{name}\" WITH PASSWORD '{password}' WITH ALL PRIVILEGES")
        server.query("CREATE DATABASE trainermon")
        yield server


class VictoriaMetrics:
    """A running VictoriaMetrics: a second implementation that takes line protocol by the v2 API."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def ready(self) -> bool:
        try:
            return self._get("/health") == b"OK"
        except OSError:
            return False

    def samples(self, metric: str) -> list[tuple[dict[str, str], list[tuple[int, float]]]]:
        """Return, for each series of `measurement_field`, its labels and every sample as (time in ms, value)."""
        self._get("/internal/force_flush")
        lines = self._get("/api/v1/export?" + urllib.parse.urlencode({"match[]": metric})).splitlines()
        series = [json.loads(line) for line in lines]
        return [(one["metric"], list(zip(one["timestamps"], one["values"], strict=True))) for one in series]

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=900) as response:
            return response.read()


@contextlib.contextmanager
def victoria_metrics(folder: Path) -> Iterator[VictoriaMetrics]:
    """Start a VictoriaMetrics with its data in `folder`."""
    folder.mkdir()
    port = free_port()
    server = VictoriaMetrics(port)
    command = [find_program("victoria-metrics"), f"-httpListenAddr=127.0.0.1:{port}", f"-storageDataPath={folder}"]
    with running([*command, "-retentionPeriod=100y"], log=folder / "log", ready=server.ready):
        yield server


class V2Surface:
    """What an InfluxDB 2 answers at `/api/v2/write`, in front of a 1.x server.

    Attributes:
        faults: Statuses and headers of the next answers, instead of passing the request on.
        requests: Path, query, headers and size of what came.
    """

    def __init__(self, upstream: str, token: str = "secret-token") -> None:
        self.faults: list[tuple[int, dict[str, str]]] = []
        self.requests: list[tuple[str, dict[str, str], dict[str, str], int]] = []
        self.token = token
        surface = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                path, _, query = self.path.partition("?")
                body = self.rfile.read(int(self.headers["Content-Length"]))
                found = dict(urllib.parse.parse_qsl(query))
                surface.requests.append((path, found, dict(self.headers), len(body)))
                status, message, headers = surface.answer(path, found, self.headers, body, upstream)
                text = b"" if status == 204 else json.dumps({"code": "x", "message": message}).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def answer(self, path, query, headers, body, upstream) -> tuple[int, str, dict[str, str]]:
        if self.faults:
            status, extra = self.faults.pop(0)
            return status, "injected", extra
        if headers.get("Authorization") != f"Token {self.token}":
            return 401, "unauthorized access", {}
        if path != "/api/v2/write" or not query.get("org") or not query.get("bucket"):
            return 404, "not found", {}
        target = urllib.parse.urlencode({"db": query["bucket"], "precision": {"us": "u"}[query["precision"]]})
        request = urllib.request.Request(f"{upstream}/write?{target}", data=body, method="POST")
        request.add_header("Content-Encoding", headers.get("Content-Encoding", "identity"))
        try:
            with urllib.request.urlopen(request, timeout=900):
                return 204, "", {}
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"], {}

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
