"""`trainermon serve` in a thread: its web application over the runs of a folder, on a free port of loopback."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from trainermon.agent.runs.http import RunDesk, build_application
from trainermon.agent.runs.run_list import RunList
from trainermon.agent.web.access import TokenAccess
from trainermon.agent.web.server import WebServer

TOKEN = "of nobody"
LIMIT_S = 900


class RunsServer(NamedTuple):
    """Where the runs are served."""

    url: str


@contextlib.contextmanager
def serving_runs(*opened: Path) -> Iterator[RunsServer]:
    """Serve the runs of these folders until the end of the block."""
    loop = asyncio.new_event_loop()
    begun, end = threading.Event(), asyncio.Event()
    urls: list[str] = []

    async def serve() -> None:
        with ThreadPoolExecutor(2) as executor:
            desk = RunDesk(RunList(opened), executor)
            server = WebServer(build_application(desk, access=TokenAccess(TOKEN)), host="127.0.0.1", ports=(0,))
            urls.append(server.url)
            begun.set()
            await end.wait()
            await desk.close()
            await server.close()

    def run() -> None:
        loop.run_until_complete(serve())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    thread = threading.Thread(target=run, name="runs-server")
    thread.start()
    try:
        if not begun.wait(LIMIT_S):
            raise TimeoutError(f"the server did not start within {LIMIT_S} s")
        yield RunsServer(urls[0])
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(LIMIT_S)
