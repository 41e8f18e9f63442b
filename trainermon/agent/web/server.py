"""Listens for the page and serves it inside the agent's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import socket
from collections import Counter
from collections.abc import Iterator, Sequence

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from trainermon.agent.web.access import AccessSettings
from trainermon.agent.web.guard import Application

BACKLOG = 64
MAX_CONNECTIONS = 256
"""Beyond this, connections on which nothing is being answered make room for new ones."""

HEADER_LIMIT_S = 10.0
"""A connection is closed on which the header of a request does not arrive within this time."""

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - of a socket that listens everywhere


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerCertificate:
    """Paths of the files, in PEM form, for HTTPS: `chain`, the certificate chain, and `key`, its private key."""

    chain: str
    key: str


def certificate_of(settings: AccessSettings) -> ServerCertificate | None:
    """Return the paths of certificate and key that `settings` name; None if there is no certificate."""
    if not settings.tls_cert_file or not settings.tls_key_file:
        return None
    return ServerCertificate(chain=settings.tls_cert_file, key=settings.tls_key_file)


class WebServer:
    """A listening socket and the task that answers on it.

    Args:
        application: Answers the requests.
        host: Address to listen on.
        ports: Ports to listen on, the first that is free; 0 lets the system choose.
        certificate: With it HTTPS is spoken, and nothing else.

    Raises:
        OSError: No port can be listened on, or the certificate cannot be used.
    """

    def __init__(
        self,
        application: Application,
        *,
        host: str,
        ports: Sequence[int],
        certificate: ServerCertificate | None = None,
    ) -> None:
        self._scheme = "https" if certificate else "http"
        config = uvicorn.Config(
            application,
            access_log=False,
            http=_Protocol,
            lifespan="off",
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=5,
            ws="none",
            ssl_certfile=certificate.chain if certificate else None,
            ssl_keyfile=certificate.key if certificate else None,
        )
        config.load()  # here, where a wrong certificate is an error of whoever starts this
        self._socket = _listen(host, ports)
        self._uvicorn = _QuietServer(config)
        self._task = asyncio.get_running_loop().create_task(self._uvicorn.serve(sockets=[self._socket]))

    @property
    def port(self) -> int:
        """The port that is listened on."""
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """Address of the page as this node reaches it, with a slash at the end."""
        host, port = self._socket.getsockname()[:2]
        return f"{self._scheme}://{_bracketed(_LOOPBACK.get(host, host))}:{port}/"

    @property
    def target(self) -> str:
        """`host:port` as other nodes reach it, and as Prometheus wants it."""
        host, port = self._socket.getsockname()[:2]
        return f"{socket.gethostname() if host in _LOOPBACK else _bracketed(host)}:{port}"

    async def close(self) -> None:
        """Stop listening; open streams have a second to end."""
        self._uvicorn.should_exit = True
        await asyncio.wait([self._task], timeout=5)
        self._socket.close()


class _Protocol(H11Protocol):
    """HTTP that does not wait for ever for a header: connections that never ask would keep out those that do."""

    _header_timer: asyncio.TimerHandle | None = None
    _numbers = itertools.count()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as its base
        super().connection_made(transport)
        self.number = next(self._numbers)
        if len(self.connections) > MAX_CONNECTIONS:
            self._make_room()
        self._time_header()

    @property
    def is_silent(self) -> bool:
        """Whether nothing is being answered: no request has come (yet), or only what nobody reads is left of it."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.response_complete or self.transport.is_closing()

    def _make_room(self) -> None:
        """Close the oldest silent connection of whoever has most of them; this one if all others are busy."""
        silent = [other for other in self.connections if isinstance(other, _Protocol) and other.is_silent]
        by_peer = Counter(other.peer for other in silent)
        victim = min(silent, key=lambda other: (-by_peer[other.peer], other.number), default=self)
        self.connections.discard(victim)
        victim.transport.abort()

    @property
    def peer(self) -> str:
        """Address of the other side."""
        return self.client[0] if self.client else ""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def handle_events(self) -> None:
        super().handle_events()
        self._time_header()

    def _time_header(self) -> None:
        """Let the time run while a header is waited for; what arrives of it does not prolong it."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_LIMIT_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


class _QuietServer(uvicorn.Server):
    """Leaves the signals to the agent, which has more to finish than the server."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _listen(host: str, ports: Sequence[int]) -> socket.socket:
    """Listen on the first of `ports` that is free: a page somewhere else is better than none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports[:-1]:
        with contextlib.suppress(OSError):
            return _bound(family, host, port)
    return _bound(family, host, ports[-1])


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
