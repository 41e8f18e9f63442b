"""Thousands of small HTTP servers in one process, for peers of what is measured: they must cost next to nothing.

Only what the clients here send is understood: HTTP/1.1 with a `Content-Length`, connections that stay open, and
`Connection: close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TypeAlias

Answer: TypeAlias = tuple[int, str, bytes]
"""Status, content type, body."""
Handler: TypeAlias = Callable[[int, str, str, bytes], Answer | Awaitable[Answer]]
"""Takes the port that was asked, method, path with query, and body."""


class ManyServers:
    """Listens on as many ports of 127.0.0.1 as asked for; one function answers for all.

    Attributes:
        ports: Where it listens, once it has started.
    """

    def __init__(self, handler: Handler) -> None:
        self.ports: list[int] = []
        self._handler = handler
        self._servers: list[asyncio.Server] = []
        self._connections: set[_Connection] = set()

    async def start(self, number: int) -> None:
        """Listen on `number` free ports."""
        loop = asyncio.get_running_loop()
        for _ in range(number):
            server = await loop.create_server(lambda: _Connection(self._handler, self._connections), "127.0.0.1", 0)
            self._servers.append(server)
            self.ports.append(server.sockets[0].getsockname()[1])

    async def cleanup(self) -> None:
        """Stop listening, and close every connection."""
        for server in self._servers:
            server.close()
        for connection in list(self._connections):
            connection.close()


class _Connection(asyncio.Protocol):
    """One connection: requests one after the other."""

    def __init__(self, handler: Handler, connections: set[_Connection]) -> None:
        self._handler = handler
        self._connections = connections
        self._received = b""
        self._port = 0
        self._is_answering = False
        self._transport: asyncio.Transport | None = None
        self._later: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._port = transport.get_extra_info("sockname")[1]
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._connections.discard(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._go_on()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _go_on(self) -> None:
        while not self._is_answering:
            head, end, rest = self._received.partition(b"\r\n\r\n")
            if not end:
                return
            lines = head.decode("latin-1").split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines[1:])
            size = int(headers.get("content-length", 0))
            if len(rest) < size:
                return
            self._received = rest[size:]
            method, path, _ = lines[0].split(" ", 2)
            is_last = headers.get("connection") == "close"
            answer = self._handler(self._port, method, path, rest[:size])
            if isinstance(answer, tuple):
                self._send(answer, is_last=is_last)
            else:
                self._is_answering = True
                self._later = asyncio.ensure_future(self._send_later(answer, is_last=is_last))

    async def _send_later(self, answer: Awaitable[Answer], *, is_last: bool) -> None:
        self._send(await answer, is_last=is_last)
        self._is_answering = False
        self._go_on()

    def _send(self, answer: Answer, *, is_last: bool) -> None:
        status, content_type, body = answer
        assert self._transport is not None
        lines = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            f"Content-Type: {content_type}",
            f"Content-Length: {len(body)}",
        )
        self._transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        if is_last:
            self._transport.close()
