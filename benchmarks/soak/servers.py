"""Real servers that come and go while a run tells them its numbers: InfluxDB and a Pushgateway."""

from __future__ import annotations

import contextlib
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.exporters.influx_servers import InfluxDB, influxdb
from tests.ports import free_port
from tests.server_programs import find_program, running


class ComingAndGoing:
    """Starts both servers on the same ports and with the same data, and stops them, again and again, in a thread.

    Attributes:
        influxdb_url, pushgateway_url: Their addresses.
        num_outages: How often they were stopped.
    """

    def __init__(self, folder: Path, *, up_s: float, down_s: float) -> None:
        self._folder = folder
        self._influx_port, self._push_port = free_port(), free_port()
        self._periods_s = (up_s, down_s)
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.influxdb_url = f"http://127.0.0.1:{self._influx_port}"
        self.pushgateway_url = f"http://127.0.0.1:{self._push_port}"
        self.num_outages = 0

    def __enter__(self) -> ComingAndGoing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending.set()
        self._thread.join()

    @contextlib.contextmanager
    def up(self) -> Iterator[InfluxDB]:
        """Have the servers up; not while they come and go."""
        command = [
            find_program("prometheus-pushgateway"),
            f"--web.listen-address=127.0.0.1:{self._push_port}",
            "--persistence.file=",
        ]
        ready = lambda: _answers(f"{self.pushgateway_url}/-/ready")  # noqa: E731
        with (
            running(command, log=self._folder / "pushgateway.log", ready=ready),
            influxdb(self._folder / "influxdb", port=self._influx_port) as server,
        ):
            yield server

    def _run(self) -> None:
        up_s, down_s = self._periods_s
        while not self._is_ending.wait(down_s):  # the run begins without them
            self.num_outages += 1
            with self.up():
                self._is_ending.wait(up_s)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=60):
            return True
    except OSError:
        return False
