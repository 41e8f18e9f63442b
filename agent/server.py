"""Listens for the page and serves it inside the agent's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn

from trainermon.agent.guard import Application

BACKLOG = 64
MAX_CONNECTIONS = 256

_log = logging.getLogger(__name__)


class Server:
    """A listening socket and the task that answers on it.

    Raises:
        OSError: Neither the wanted port nor a free one can be listened on.
    """

    def __init__(self, application: Application, *, host: str, port: int) -> None:
        self._socket = _listen(host, port)
        config = uvicorn.Config(
            application,
            access_log=False,
            http="h11",
            lifespan="off",
            limit_concurrency=MAX_CONNECTIONS,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=5,
            ws="none",
        )
        self._uvicorn = _QuietServer(config)
        self._task = asyncio.get_running_loop().create_task(self._uvicorn.serve(sockets=[self._socket]))

    @property
    def url(self) -> str:
        """Address of the page, with a slash at the end."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"

    @property
    def target(self) -> str:
        """`host:port`, as Prometheus wants it."""
        return self.url.removeprefix("http://").rstrip("/")

    async def close(self) -> None:
        """Stop listening; open streams have a second to end."""
        self._uvicorn.should_exit = True
        await asyncio.wait([self._task], timeout=5)
        self._socket.close()


class _QuietServer(uvicorn.Server):
    """Leaves the signals to the agent, which has more to finish than the server."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return _bound(family, host, port)
    except OSError as error:
        if port == 0:
            raise
        # Another run on this node has it; a page somewhere else is better than none, and the target file names it.
        _log.warning("cannot listen on %s port %d (%s); using a free port", host, port, error)
        return _bound(family, host, 0)


def _bound(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.settimeout(0)
    return listener
