"""Who may ask the agent for what, and how much: the border in front of the web application.

Loopback is no authentication: every local user reaches it, and so does any web page in the user's browser. Therefore a
request without credentials must name a host we know, every request that changes something must carry the token, reading
needs credentials where that is asked for, a body is read only after that and only up to a limit, and no answer may be
framed, sniffed or scripted.

The host is checked against DNS rebinding, where a foreign page reaches us under a name of its own. A request by IP
address cannot come from such a page, and one that holds a secret is no such page.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, MutableMapping
from typing import Any, NamedTuple

from trainermon.agent.web.access import TokenAccess
from trainermon.core.signing import body_digest
from trainermon.dashboards.headers import CONTENT_SECURITY_POLICY, SECURITY_HEADERS

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 1 << 20
BODY_TIMEOUT_S = 10.0
MAX_UNREAD_BYTES = 4 << 20
UNREAD_TIMEOUT_S = 1.0
MAX_REQUESTS = 192
MAX_REQUESTS_OF_PEER = 96
KEPT_REQUESTS = 32
"""So many requests are under way at once: altogether, from one address; beyond that, with the token or as a probe."""

ANSWER_LIMIT_S = 60.0
STREAM = "/events"  # at the end of a path: of this page, or of one below it
READING_METHODS = frozenset({"GET", "HEAD"})
OPEN_PATHS = frozenset({"/healthz", "/readyz"})  # a kubelet has no credentials
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
_HEADERS = tuple((name.encode(), value.encode()) for name, value in SECURITY_HEADERS)
_POLICY = b"content-security-policy"

_log = logging.getLogger(__name__)


class RequestRefusal(Exception):  # noqa: N818 - not an error of ours: the answer to a request
    """Raised to refuse an HTTP request.

    Args:
        status: The HTTP status.
        reason: A message for the client.
        challenge: Value of the header `WWW-Authenticate`; "": none is sent.
    """

    def __init__(self, status: int, reason: str, *, challenge: str = "") -> None:
        super().__init__(reason)
        self.status = status
        self.challenge = challenge


class _Credentials(NamedTuple):
    """What a request brings: its header, the digest of the body if it is signed, whether it may order."""

    authorization: bytes | None
    digest: str | None
    may_order: bool


class _BodyReception:
    """What arrives of a request; knows whether its body has come to its end."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._ended = False

    async def __call__(self) -> Message:
        message = await self._receive()
        self._ended = message["type"] == "http.disconnect" or not message.get("more_body", False)
        return message

    async def read_off(self) -> None:
        """Drop the rest of the body, within limits: a client that still writes would be cut off, and see no answer."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._drop(), UNREAD_TIMEOUT_S)

    async def _drop(self) -> None:
        size_bytes = 0
        while not self._ended and size_bytes <= MAX_UNREAD_BYTES:
            size_bytes += len((await self()).get("body", b""))


class _RequestLimits:
    """Counts the requests that are under way, by address of the client; some places are kept for those who matter."""

    def __init__(self) -> None:
        self._num_of: Counter[str] = Counter()

    @property
    def num(self) -> int:
        """How many there are."""
        return self._num_of.total()

    @contextlib.contextmanager
    def entered(self, peer: str, *, is_kept: bool) -> Iterator[None]:
        """Return a context in which a request is counted as under way.

        Raises:
            RequestRefusal: There are too many, altogether or from this address; a probe, or a request that may order,
                has places of its own.
        """
        is_full = self.num >= MAX_REQUESTS or self._num_of[peer] >= MAX_REQUESTS_OF_PEER
        if is_full and (not is_kept or self.num >= MAX_REQUESTS + KEPT_REQUESTS):
            raise RequestRefusal(503, "too many requests are under way; try again")
        self._num_of[peer] += 1
        try:
            yield
        finally:
            self._num_of[peer] -= 1
            if not self._num_of[peer]:
                del self._num_of[peer]


class RequestGuard:
    """ASGI application that passes allowed requests to `inner` and refuses the others.

    Args:
        inner: The application behind it.
        access: Which credentials allow reading and ordering.
        hosts: Names that the `Host` header may have besides `localhost` and IP addresses.
    """

    def __init__(self, inner: Application, *, access: TokenAccess, hosts: Collection[str] = ()) -> None:
        self._inner = inner
        self._crowd = _RequestLimits()
        self._access = access
        self._hosts = frozenset(host.lower() for host in (*LOOPBACK_NAMES, *hosts))

    @property
    def num_under_way(self) -> int:
        """How many requests are being answered now."""
        return self._crowd.num

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return  # no lifespan is needed and web sockets are not spoken
        send = _with_headers(scope["path"], send)
        reception = _BodyReception(receive)
        credentials = self._credentials(scope)
        peer = scope["client"][0] if scope.get("client") else ""
        try:
            with self._crowd.entered(peer, is_kept=credentials.may_order or scope["path"] in OPEN_PATHS):
                await self._serve(scope, await self._admit(scope, credentials, reception), send)
        except RequestRefusal as refusal:
            await reception.read_off()
            await _answer(send, refusal)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit_s = None if scope["path"].endswith(STREAM) else ANSWER_LIMIT_S
        try:
            await asyncio.wait_for(self._inner(scope, receive, send), limit_s)
        except asyncio.TimeoutError:
            _log.info("%s %r was not taken within %g s", scope["method"], scope["path"], ANSWER_LIMIT_S)
        except Exception:  # whatever it was, the log shall say it; it goes on to the server, which answers 500
            _log.exception("%s %r could not be answered", scope["method"], scope["path"])
            raise

    def _credentials(self, scope: Scope) -> _Credentials:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        authorization = given[0] if len(given) == 1 else None
        digest = self._access.signed_digest(authorization, scope["method"], _target(scope))
        return _Credentials(authorization, digest, digest is not None or self._access.may_order(authorization))

    async def _admit(self, scope: Scope, credentials: _Credentials, receive: Receive) -> Receive:
        headers = [(name.decode("latin-1"), value) for name, value in scope["headers"]]
        authorization, digest, may_order = credentials
        if scope["method"] in READING_METHODS:
            if not may_order:
                self._check_reader(headers, authorization, path=scope["path"])
            return receive
        self._check_origin(headers)
        if not may_order:
            self._check_host(headers)
            wanted = (
                "this needs a token: Authorization: Bearer <token>; an agent's is in nodes/<host>/token of the run, a "
                "controller's is that of its --token-file"
            )
            raise RequestRefusal(401, wanted, challenge="Bearer")
        try:
            body = await asyncio.wait_for(_read_body(headers, receive), BODY_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise RequestRefusal(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
        if digest is not None and digest != body_digest(body):
            raise RequestRefusal(401, "the signature is for another body")
        return _replay(body, receive)

    def _check_reader(self, headers: list[tuple[str, bytes]], authorization: bytes | None, *, path: str) -> None:
        if path in OPEN_PATHS:
            return
        if not self._access.may_read(authorization):
            raise RequestRefusal(401, "reading this needs credentials", challenge=self._access.challenge)
        if self._access.reading_is_open:
            self._check_host(headers)

    def _check_host(self, headers: list[tuple[str, bytes]]) -> None:
        values = [value for name, value in headers if name == "host"]
        if len(values) != 1 or not self._is_known(_host_name(values[0])):
            raise RequestRefusal(421, "this host name is not served here; add it to allowed_hosts if it is meant to be")

    def _is_known(self, host: str) -> bool:
        if host in self._hosts or _is_address(host):
            return True
        return any(known.startswith("*.") and host.endswith(known[1:]) for known in self._hosts)

    def _check_origin(self, headers: list[tuple[str, bytes]]) -> None:
        host = next((value for name, value in headers if name == "host"), b"")
        for name, value in headers:
            if name == "origin" and value.partition(b"://")[2].lower() != host.lower():
                raise RequestRefusal(403, "requests from other origins are refused")


def _target(scope: Scope) -> str:
    """Return path and query as they were sent."""
    path = scope.get("raw_path") or str(scope["path"]).encode()
    query = scope.get("query_string", b"")
    return (path + b"?" + query if query else path).decode("latin-1")


def _host_name(value: bytes) -> str:
    text = value.decode("latin-1").lower()
    name, colon, port = text.rpartition(":")
    return name if colon and port.isdigit() else text


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


async def _read_body(headers: list[tuple[str, bytes]], receive: Receive) -> bytes:
    for name, value in headers:
        if name == "content-length" and (not value.isdigit() or int(value) > MAX_BODY_BYTES):
            raise RequestRefusal(413, f"a body may have up to {MAX_BODY_BYTES} bytes")
    parts: list[bytes] = []
    size_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestRefusal(400, "the client left")
        parts.append(message.get("body", b""))
        size_bytes += len(parts[-1])
        if size_bytes > MAX_BODY_BYTES:
            raise RequestRefusal(413, f"a body may have up to {MAX_BODY_BYTES} bytes")
        if not message.get("more_body", False):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return pending.pop() if pending else await receive()

    return next_message


def _with_headers(path: str, send: Send) -> Send:
    cache = b"no-cache" if path == "/" or path.startswith("/static/") else b"no-store"

    async def guarded_send(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = list(message.get("headers", ()))
            if _POLICY not in dict(own):  # a page that is one file has a policy of its own
                own.append((_POLICY, CONTENT_SECURITY_POLICY.encode()))
            message["headers"] = [*own, *_HEADERS, (b"cache-control", cache)]
        await send(message)

    return guarded_send


async def _answer(send: Send, refusal: RequestRefusal) -> None:
    body = json.dumps({"detail": str(refusal)}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.challenge:
        headers.append((b"www-authenticate", refusal.challenge.encode()))
    # The body of a refused request may be unread; the connection cannot be used for another one.
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
