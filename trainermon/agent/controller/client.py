"""Speaks to agents: bounded answers, no redirects, no proxies, connections that are kept.

What browsers look at has a pool of its own: an open page holds a connection for hours, and the controller's own
questions and orders do not wait for it.

aiohttp, because a round of 128 agents costs httpx 0.8 s of CPU and aiohttp 15 ms.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import json
import os
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from yarl import URL

from trainermon.agent.controller.settings import AgentAccess
from trainermon.core.errors import ConfigError
from trainermon.core.signing import sign

MAX_ANSWER_BYTES = 8 << 20
PAGE_TIMEOUT_S = 55.0
"""Until there is more of what a person looks at, such as a row over a million steps."""

STREAM_PAUSE_S = 60.0
"""A stream of events that is silent for longer is over: agents send a sign of life every 15 s."""

MAX_CONNECTIONS = 64
"""So many questions, and so many orders, are under way at once. Each takes this process a quarter of a millisecond, for
which all others wait: with 256 of both, agents that had long answered were taken for silent."""
FAULTS = (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError)
"""What a request may end with if there is no proper answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class AgentAddress:
    """Where an agent is, and what requests to it are signed with.

    Attributes:
        url: Its address, with a slash at the end.
        token: The secret for signing; None: the token of all agents; "": no signature, as nobody has vouched for this
            address.
    """

    url: str
    token: str | None = dataclasses.field(default=None, repr=False)


def describe(fault: Exception) -> str:
    """Return in words why a request to an agent got no answer (timed out, refused …), for pages and logs."""
    if isinstance(fault, asyncio.TimeoutError):
        return "no answer in time"
    if isinstance(fault, aiohttp.ClientConnectorError):
        number = fault.os_error.errno
        return f"cannot connect: {os.strerror(number) if number else fault.os_error}"
    return str(fault) or type(fault).__name__


class AgentClient:
    """Sends signed HTTP requests from the controller to agents. Make it inside the event loop; close it there.

    Args:
        settings: Time limits, HTTPS and certificates.
        token: Requests to agents without one of their own are signed with it. It is never sent.

    Attributes:
        keeps_connections: Whether connections are kept for the next request; False where there are too many agents for
            the limit of open files.

    Raises:
        ConfigError: The certificates cannot be read.
    """

    def __init__(self, settings: AgentAccess, *, token: str) -> None:
        self.keeps_connections = True
        self._token = token
        self._server_name = settings.server_name
        self._speaks_plain_http = settings.plain_http
        self._timeout = aiohttp.ClientTimeout(total=settings.timeout_s)
        self._ssl = _ssl_context(settings) if settings.https else None
        # Waiting for one's turn is no part of the time limit: agents that hang shall not make others seem to.
        self._turns = {"GET": asyncio.Semaphore(MAX_CONNECTIONS), "POST": asyncio.Semaphore(MAX_CONNECTIONS)}
        self._session = _session(limit_per_host=4)
        self._pages = _session(limit_per_host=0)

    async def get(self, target: AgentAddress, path: str) -> Any:
        """Send GET `path` to the agent `target`; return the parsed JSON.

        Raises one of `FAULTS` if there is no answer within the time limit.
        """
        status, answer = await self._request("GET", target, path, None)
        if status != 200:
            raise ValueError(f"status {status}: {str(answer)[:200]}")
        return answer

    async def post(self, target: AgentAddress, path: str, body: Any) -> tuple[int, Any]:
        """Send the order `body` as JSON to `path` of the agent `target`; return the HTTP status and the parsed JSON.

        Raises one of `FAULTS` if there is no answer in time.
        """
        return await self._request("POST", target, path, json.dumps(body).encode())

    async def open(self, target: AgentAddress, path: str) -> aiohttp.ClientResponse:
        """Send GET `path`, which may have a query, for somebody who looks at a page; return the answer's beginning.

        The rest comes as it is read: close it in any case. Raises one of `FAULTS` if nothing comes for 55 s.
        """
        return await self._open(target, path, PAGE_TIMEOUT_S)

    async def stream(self, target: AgentAddress, path: str) -> AsyncIterator[bytes]:
        """Send GET `path`; yield what comes, as it comes. Raises one of `FAULTS` when it ends otherwise than well."""
        async with await self._open(target, path, STREAM_PAUSE_S) as reply:
            reply.raise_for_status()
            async for part in reply.content.iter_any():
                yield part

    async def _open(self, target: AgentAddress, path: str, pause_s: float) -> aiohttp.ClientResponse:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout.total, sock_read=pause_s)
        return await self._pages.get(**self._asking("GET", target, path, b"", timeout))

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()
        await self._pages.close()

    async def _request(self, method: str, target: AgentAddress, path: str, body: bytes | None) -> tuple[int, Any]:
        asking = self._asking(method, target, path, body or b"", self._timeout)
        async with self._turns[method], self._session.request(method, **asking) as reply:
            content = await _read(reply, MAX_ANSWER_BYTES)
        try:
            return reply.status, json.loads(content)
        except RecursionError:
            raise ValueError("the answer is nested too deeply") from None

    def _asking(
        self, method: str, target: AgentAddress, path: str, body: bytes, timeout: aiohttp.ClientTimeout
    ) -> dict[str, Any]:
        """Return what a request of either pool is made with."""
        url = URL(target.url + path)
        self._require_safe(url)
        token = self._token if target.token is None else target.token
        headers = {}
        if token:
            headers["Authorization"] = sign(token, method, url.raw_path_qs, body, now_s=time.time())
        if not self.keeps_connections:
            headers["Connection"] = "close"
        return {
            "url": url,
            "data": body or None,
            "headers": headers,
            "allow_redirects": False,
            "ssl": self._ssl if self._ssl is not None else True,
            "server_hostname": self._server_name if self._ssl is not None else None,
            "timeout": timeout,
        }

    def _require_safe(self, url: URL) -> None:
        if url.scheme == "http" and not self._speaks_plain_http and not _is_loopback(url.host or ""):
            raise ValueError(
                f"plain HTTP to {url.host} is not spoken: set agents.https, or agents.plain_http (--plain-http) if the "
                "network between is trusted"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _session(*, limit_per_host: int) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=limit_per_host)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())


async def _read(reply: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    content = bytearray()
    async for part in reply.content.iter_any():
        content += part
        if len(content) > max_bytes:
            raise ValueError(f"the answer has more than {max_bytes} bytes")
    return bytes(content)


def _ssl_context(settings: AgentAccess) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=settings.ca_file)
    except OSError as error:
        raise ConfigError(f"agents.ca_file {settings.ca_file} cannot be used: {error}") from error
