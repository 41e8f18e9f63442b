"""The agent's own web application in front of a made-up run, in a thread.

`python -m tests.dashboards.fake_agent` prints its address and adds a step every half second: for looking at the page.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.dashboards.fake_run import Run, broken_run, frame, healthy_run
from trainermon.agent.feed import EventFeed
from trainermon.agent.orders.answers import OrderAnswer, OrderStatus
from trainermon.agent.orders.dumps import DumpKey
from trainermon.agent.web.access import TokenAccess
from trainermon.agent.web.guard import Application, Receive, Scope, Send
from trainermon.agent.web.http import build_application
from trainermon.agent.web.server import WebServer
from trainermon.exporters.store.curves import CurveQuery, encode_curve, read_curve, read_steps, read_table
from trainermon.exporters.store.histograms import (
    StepHistograms,
    encode_histograms,
    read_histogram_table,
    read_histograms,
)

TOKEN = "open-sesame"


class FakeNode:
    """Answers what the page asks out of `run`; a page never asks for the rest of `trainermon.agent.web.http.Node`."""

    def __init__(self, run: Run) -> None:
        self.fake = run
        self.said: list[tuple[str, Any]] = []
        self.feed = EventFeed()

    def run(self) -> dict[str, Any]:
        return self.fake.describe()

    def lines(self, names: list[str]) -> dict[str, Any]:
        return self.fake.lines(names)

    def heatmap(self, kind: str, statistic: str, columns: int) -> bytes:
        return frame(self.fake.rows, self.fake.heat, columns, kind=kind, statistic=statistic)

    def ranks(self, quantity: str, columns: int) -> bytes:
        return frame(self.fake.ranks, self.fake.rank_time, columns, quantity=quantity)

    async def curve(self, query: CurveQuery) -> bytes:
        if self.fake.stored is not None:
            return encode_curve(read_curve(self.fake.stored, query), query)
        return encode_curve(self.fake.curve(query), query)

    async def curve_table(self, query: CurveQuery) -> bytes:
        return read_table(self.fake.stored, query) if self.fake.stored is not None else b"step\n"

    async def steps_table(self, first: int | None, last: int | None) -> bytes:
        return read_steps(self.fake.stored, first=first, last=last) if self.fake.stored is not None else b"step\n"

    async def histograms(self, query: CurveQuery) -> bytes:
        if self.fake.stored is not None:
            return encode_histograms(read_histograms(self.fake.stored, query), query)
        nothing = np.zeros(0, np.int64)
        return encode_histograms(StepHistograms(nothing, nothing, np.zeros((0, 128), np.int64)), query)

    async def histogram_table(self, query: CurveQuery) -> bytes:
        return read_histogram_table(self.fake.stored, query) if self.fake.stored is not None else b"step\n"

    def alerts(self) -> list[dict[str, Any]]:
        return self.fake.alerts

    def dumps(self) -> list[dict[str, Any]]:
        return self.fake.dumps

    async def diagnosis(self, identity: str, attempt: int, step: int) -> bytes | None:
        report = self.fake.diagnoses.get(identity)
        return json.dumps(report).encode() if report else None

    async def diagnosis_page(self, key: DumpKey) -> bytes | None:
        raise NotImplementedError

    def evidence(self) -> dict[str, Any]:
        raise NotImplementedError

    async def report(self, name: str) -> bytes | None:
        raise NotImplementedError

    def metrics(self, accept: str) -> tuple[bytes, str]:
        return b"", "text/plain"

    def order(self, body: Any) -> OrderAnswer:
        self.said.append(("order", body))
        return OrderAnswer(status=OrderStatus.ACCEPTED)

    async def acknowledge(self, body: Any) -> OrderAnswer:
        self.said.append(("acknowledge", body))
        for entry in self.fake.alerts:
            if entry["id"] in body["alert"]:
                entry["acknowledged"] = {"by": body["by"], "note": body["note"], "time_s": time.time()}
                self.feed.publish("alert", entry)
        return OrderAnswer(status=OrderStatus.ACCEPTED)

    async def silence(self, body: Any) -> OrderAnswer:
        self.said.append(("silence", body))
        return OrderAnswer(status=OrderStatus.ACCEPTED)

    def take_finding(self, body: Any) -> dict[str, Any]:
        raise NotImplementedError

    async def flush(self) -> bool:
        return True

    def stop(self) -> None:
        raise NotImplementedError


class FakeAgent:
    """Serves a run until the `with` block of `serving` ends. `requests` lists the paths asked for, with their query."""

    def __init__(self, run: Run, *, port: int) -> None:
        self.requests: list[str] = []
        self.url = ""
        self._node = FakeNode(run)
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._begun = threading.Event()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="fake-agent")

    @property
    def run(self) -> Run:
        """What is served."""
        return self._node.fake

    @property
    def said(self) -> list[tuple[str, Any]]:
        """What was ordered and said, and how."""
        return self._node.said

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rstrip("/").rpartition(":")[2])

    def publish(self, event: str, value: Any) -> None:
        """Send an event to every open page."""
        self._loop.call_soon_threadsafe(self._node.feed.publish, event, value)

    def start(self) -> None:
        """Return once it listens."""
        self._thread.start()
        if not self._begun.wait(20):
            raise TimeoutError("the fake agent did not start within 20 s")

    def stop(self) -> None:
        """Return once nobody listens any more; nothing happens the second time."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(20)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _serve(self) -> None:
        node: Any = self._node
        application = self._recorded(build_application(node, access=TokenAccess(TOKEN)))
        server = WebServer(application, host="127.0.0.1", ports=(self._port,))
        self.url = server.url
        self._begun.set()
        await self._end.wait()
        self._node.feed.close()
        await server.close()

    def _recorded(self, inner: Application) -> Application:
        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            query = scope.get("query_string", b"").decode()
            self.requests.append(f"{scope['path']}?{query}" if query else scope["path"])
            await inner(scope, receive, send)

        return application


@contextlib.contextmanager
def serving(run: Run, *, port: int = 0) -> Iterator[FakeAgent]:
    """Serve `run` until the end of the block."""
    agent = FakeAgent(run, port=port)
    agent.start()
    try:
        yield agent
    finally:
        agent.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--healthy", action="store_true", help="without the fault")
    options = parser.parse_args()
    run = healthy_run() if options.healthy else broken_run()
    run.measure()
    with serving(run, port=options.port) as agent, contextlib.suppress(KeyboardInterrupt):
        sys.stdout.write(f"{agent.url}\n")
        sys.stdout.flush()
        while True:
            time.sleep(0.5)
            agent.publish("step", run.append())


if __name__ == "__main__":
    main()
