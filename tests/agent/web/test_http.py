"""The border that everything from the network passes, and what stands behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import httpx
import pytest

import trainermon.agent.web.server
from trainermon.agent.feed import MAX_CLIENTS, MAX_PENDING, EventFeed
from trainermon.agent.orders.answers import OrderAnswer, OrderStatus
from trainermon.agent.orders.commands import DuplicateError, parse_command
from trainermon.agent.web.access import TokenAccess
from trainermon.agent.web.guard import MAX_BODY_BYTES, MAX_REQUESTS_OF_PEER, MAX_UNREAD_BYTES, RequestGuard
from trainermon.agent.web.http import build_application
from trainermon.agent.web.server import MAX_CONNECTIONS, WebServer
from trainermon.core.errors import QueryError
from trainermon.core.values import Action, Command, DumpTask

TOKEN = "correct-horse"
AUTHORISED = {"authorization": f"Bearer {TOKEN}"}


class FakeNode:
    """Answers like an agent and keeps what it was asked to do."""

    def __init__(self) -> None:
        self.feed = EventFeed()
        self.orders: list[object] = []
        self.flushed = True
        self.stopped = False

    def run(self):
        return {"run_id": "r", "loss": float("nan"), "state": "running"}

    def lines(self, names):
        if "nonsense" in names:
            raise QueryError("unknown line nonsense")
        return {"steps": [1], "series": {name: [float("inf")] for name in names}}

    def heatmap(self, kind, statistic, columns):
        return f"{kind} {statistic} {columns}".encode()

    def ranks(self, quantity, columns):
        return f"{quantity} {columns}".encode()

    def alerts(self):
        return [{"message": "<script>"}]

    def dumps(self):
        return []

    async def diagnosis(self, identity, attempt, step):
        return b'{"found": true}' if (identity, attempt, step) == ("a1", 1, 7) else None

    def metrics(self, accept):
        return b"# EOF\n", "application/openmetrics-text" if "openmetrics" in accept else "text/plain"

    def order(self, body):
        if body == {"id": "twice"}:
            raise DuplicateError("used before")
        command = parse_command(body, next_step=12)
        self.orders.append(command)
        known = self.orders.count(command) > 1
        return OrderAnswer(status=OrderStatus.DUPLICATE if known else OrderStatus.ACCEPTED, id=command.id)

    async def flush(self):
        return self.flushed

    def stop(self):
        self.stopped = True


def fake_node() -> Any:
    """Return a node that has no more than the web asks for."""
    return FakeNode()


@pytest.fixture
def node():
    return fake_node()


def request(node, method, path, **options):
    async def send():
        application = build_application(node, access=TokenAccess(TOKEN), hosts=("gpu7",))
        transport = httpx.ASGITransport(app=application)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:1") as client:
            return await client.request(method, path, **options)

    return asyncio.run(send())


def test_page_and_data_are_readable_without_a_token(node):
    for path in ("/", "/healthz", "/api/run", "/api/lines?names=loss", "/api/alerts", "/api/dumps", "/metrics"):
        assert request(node, "GET", path).status_code == 200, path


def test_non_finite_numbers_become_texts_that_json_has(node):
    assert json.loads(request(node, "GET", "/api/run").text)["loss"] == "NaN"
    assert request(node, "GET", "/api/lines?names=loss").json() == {"steps": [1], "series": {"loss": ["Infinity"]}}


def test_arrays_are_passed_through_and_columns_are_bounded(node):
    assert request(node, "GET", "/api/heatmap?kind=actv&statistic=rms&columns=1000000").content == b"actv rms 4000"
    assert request(node, "GET", "/api/ranks?quantity=loss").content == b"loss 1000"


@pytest.mark.parametrize(("accepted", "coding"), [("gzip", "gzip"), ("br", None), ("gzip;q=0", None)])
def test_metrics_are_compressed_for_those_who_read_that(node, accepted, coding):
    headers = {"accept": "application/openmetrics-text", "accept-encoding": accepted}

    answer = request(node, "GET", "/metrics", headers=headers)

    assert answer.headers.get("content-encoding") == coding
    assert answer.content == b"# EOF\n"  # httpx has decompressed it
    assert answer.headers["content-type"] == "application/openmetrics-text"


def test_metrics_are_negotiated_by_accept(node):
    answer = request(node, "GET", "/metrics", headers={"accept": "application/openmetrics-text"})
    assert answer.headers["content-type"] == "application/openmetrics-text"


def test_a_wrong_query_is_the_clients_fault(node):
    answer = request(node, "GET", "/api/lines?names=nonsense")
    assert (answer.status_code, answer.json()["detail"]) == (400, "unknown line nonsense")


def test_a_diagnosis_is_served_once_it_is_there(node):
    assert request(node, "GET", "/api/diagnosis/a1/1/7").json() == {"found": True}
    assert request(node, "GET", "/api/diagnosis/a1/1/8").status_code == 404


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json"])
def test_documentation_of_the_interface_is_not_served(node, path):
    assert request(node, "GET", path).status_code == 404


@pytest.mark.parametrize(
    "path",
    ["/static/../settings.py", "/static/..%2f..%2fagent%2fsettings.py", "/static/%2e%2e/__init__.py", "/static/"],
)
def test_only_listed_files_are_served(node, path):
    assert request(node, "GET", path).status_code == 404


@pytest.mark.parametrize("path", ["/", "/api/run", "/nowhere"])
def test_every_answer_forbids_framing_sniffing_and_foreign_scripts(node, path):
    headers = request(node, "GET", path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;")
    assert "connect-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"


def test_data_is_never_stored_by_a_browser(node):
    assert request(node, "GET", "/api/run").headers["cache-control"] == "no-store"
    assert request(node, "GET", "/metrics").headers["cache-control"] == "no-store"


@pytest.mark.parametrize("host", ["127.0.0.1:80", "localhost", "LOCALHOST:1", "[::1]:9", "gpu7:9100", "127.0.0.1"])
def test_known_hosts_are_served(node, host):
    assert request(node, "GET", "/healthz", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "evil.example:80", "", "localhost.", "gpu7.x"]
)
def test_unknown_hosts_are_refused(node, host):
    assert request(node, "GET", "/api/run", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("path", ["/api/commands", "/api/flush", "/api/stop", "/nowhere"])
@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}, {"authorization": f"Basic {TOKEN}"}],
)
def test_every_post_needs_the_token(node, path, headers):
    answer = request(node, "POST", path, headers=headers, json={"id": "a", "action": "stop"})
    assert answer.status_code == 401
    assert TOKEN not in answer.text
    assert not node.orders
    assert not node.stopped


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS"])
def test_other_methods_need_the_token_too(node, method):
    assert request(node, method, "/api/run").status_code == 401


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:2", "http://localhost:1"])
def test_a_post_from_another_origin_is_refused_even_with_the_token(node, origin):
    answer = request(node, "POST", "/api/stop", headers={**AUTHORISED, "origin": origin})
    assert answer.status_code == 403
    assert not node.stopped


def test_a_post_from_the_page_itself_is_accepted(node):
    answer = request(node, "POST", "/api/stop", headers={**AUTHORISED, "origin": "http://127.0.0.1:1"})
    assert answer.status_code == 202
    assert node.stopped


def test_a_command_is_checked_and_handed_on(node):
    body = {"id": "manual-1", "action": "dump", "num_steps": 2, "scope": ["h.3"], "task": "tensor"}
    answer = request(node, "POST", "/api/commands", headers=AUTHORISED, json=body)
    assert answer.status_code == 202
    expected = Command(
        id="manual-1", action=Action.DUMP, first_step=12, num_steps=2, scope=("h.3",), task=DumpTask.TENSOR
    )
    assert node.orders == [expected]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"id": "../../etc"}, "id"),
        ({"id": ".."}, "id"),
        ({"id": 3}, "id"),
        ({"action": "explode"}, "action"),
        ({"first_step": -1}, "first_step"),
        ({"first_step": True}, "first_step"),
        ({"num_steps": 1.5}, "num_steps"),
        ({"num_steps": 10**6}, "num_steps"),
        ({"scope": "h.3"}, "scope"),
        ({"scope": [1]}, "scope"),
        ({"task": "everything"}, "task"),
        ({"level": "L9"}, "level"),
        ({"max_bytes": "many"}, "max_bytes"),
        ({"reason": "x" * 2000}, "reason"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_a_wrong_command_is_refused_by_the_name_of_what_is_wrong(node, change, named):
    answer = request(node, "POST", "/api/commands", headers=AUTHORISED, json={"id": "a", "action": "dump", **change})
    assert answer.status_code == 400
    assert named in answer.json()["detail"]
    assert not node.orders


def test_a_body_that_is_no_json_is_refused(node):
    assert request(node, "POST", "/api/commands", headers=AUTHORISED, content=b"\xff{").status_code == 400
    assert request(node, "POST", "/api/commands", headers=AUTHORISED, content=b"[]").status_code == 400
    answer = request(node, "POST", "/api/commands", headers=AUTHORISED, content=b"[" * 500_000)
    assert (answer.status_code, "nested too deeply" in answer.text) == (400, True)


def test_a_repeated_command_is_acknowledged_but_not_accepted_again(node):
    body = {"id": "manual-1", "action": "dump"}
    first, second = (request(node, "POST", "/api/commands", headers=AUTHORISED, json=body) for _ in range(2))
    assert (first.status_code, second.status_code) == (202, 200)


def test_the_same_id_for_another_command_is_a_conflict(node):
    assert request(node, "POST", "/api/commands", headers=AUTHORISED, json={"id": "twice"}).status_code == 409


def test_a_failed_flush_is_not_called_done(node):
    node.flushed = False
    assert request(node, "POST", "/api/flush", headers=AUTHORISED).status_code == 503


def test_a_large_body_is_refused_by_its_announced_size(node):
    headers = {**AUTHORISED, "content-length": str(10**9)}
    assert request(node, "POST", "/api/commands", headers=headers, content=b"{}").status_code == 413


def test_a_large_body_is_refused_while_it_streams(node):
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 1 << 16
            yield b" " * (1 << 16)

    answer = request(node, "POST", "/api/commands", headers=AUTHORISED, content=endless())
    assert answer.status_code == 413
    assert sent <= MAX_BODY_BYTES + MAX_UNREAD_BYTES + (3 << 16)


@pytest.mark.parametrize(("headers", "status"), [({}, 401), (AUTHORISED, 413)])
def test_a_body_that_is_refused_is_read_off_so_that_its_sender_sees_the_answer(node, headers, status):
    sent = 0

    async def body():
        nonlocal sent
        for _ in range(32):
            sent += 1 << 16
            yield b" " * (1 << 16)

    headers = {**headers, "content-length": str(32 << 16)}
    answer = request(node, "POST", "/api/commands", headers=headers, content=body())
    assert (answer.status_code, sent) == (status, 32 << 16)


def test_events_reach_an_open_page_and_closing_ends_them(node):
    async def scenario():
        server = WebServer(build_application(node, access=TokenAccess(TOKEN)), host="127.0.0.1", ports=(0,))
        received: list[str] = []
        async with httpx.AsyncClient() as client, client.stream("GET", f"{server.url}events") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert "server" not in stream.headers
            async for line in stream.aiter_lines():
                received.append(line)
                if line.startswith("retry"):
                    node.feed.publish("step", {"step": 3, "loss": float("nan")})
                    node.feed.close()
        await server.close()
        return received

    received = asyncio.run(scenario())

    assert "event: step" in received
    assert 'data: {"step":3,"loss":"NaN"}' in received


def test_a_server_ends_although_a_page_is_open(node):
    async def scenario():
        server = WebServer(build_application(node, access=TokenAccess(TOKEN)), host="127.0.0.1", ports=(0,))
        loop = asyncio.get_running_loop()
        async with httpx.AsyncClient() as client, client.stream("GET", f"{server.url}events") as stream:
            await stream.aiter_lines().__anext__()
            began = loop.time()
            await server.close()
            return loop.time() - began

    assert asyncio.run(scenario()) < 4


async def see_closed(server, *parts):
    """Send these bytes and nothing else, and wait until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.target.rpartition(":")[2]))
    for part in parts:
        writer.write(part)
        await writer.drain()
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 60)
    writer.close()


def test_connections_that_never_finish_their_header_are_closed(node, monkeypatch):
    monkeypatch.setattr(trainermon.agent.web.server, "HEADER_LIMIT_S", 0.5)
    half = b"GET /api/v1/run HTTP/1.1\r\nHost: 127.0.0.1\r\n"

    async def scenario():
        server = WebServer(build_application(node, access=TokenAccess(TOKEN)), host="127.0.0.1", ports=(0,))
        await asyncio.gather(*(see_closed(server, half) for _ in range(300)), see_closed(server))
        await see_closed(server, half + b"\r\n", half)  # on a connection that was used before
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"{server.url}healthz")
        await server.close()
        return answer.status_code

    assert asyncio.run(scenario()) == 200


def test_silent_connections_keep_nobody_out_and_are_bounded(node):
    async def scenario():
        server = WebServer(build_application(node, access=TokenAccess(TOKEN)), host="127.0.0.1", ports=(0,))
        port = int(server.target.rpartition(":")[2])
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * MAX_CONNECTIONS)]
        statuses = []
        async with httpx.AsyncClient() as client:
            for path in ("healthz", "metrics", "api/run"):
                statuses.append((await client.get(f"{server.url}{path}", timeout=60)).status_code)
            answer = await client.post(f"{server.url}api/flush", headers=AUTHORISED, timeout=60)
        ended = [reader for reader, _ in silent if reader.at_eof()]
        for _, writer in silent:
            writer.close()
        await server.close()
        return [*statuses, answer.status_code], len(ended)

    statuses, num_closed = asyncio.run(scenario())

    assert statuses == [200] * 4
    assert num_closed >= MAX_CONNECTIONS  # the oldest have made room


def test_requests_under_way_are_bounded_but_for_probes_and_whoever_may_order():
    async def scenario():
        leave = asyncio.Event()

        async def hang(scope, receive, send):
            await leave.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        guard = RequestGuard(hang, access=TokenAccess(TOKEN))

        async def ask(path, peer="10.0.0.1", **options):
            transport = httpx.ASGITransport(app=guard, client=(peer, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                return (await client.get(path, **options)).status_code

        held = [asyncio.ensure_future(ask("/metrics")) for _ in range(MAX_REQUESTS_OF_PEER)]
        await asyncio.sleep(0)
        while guard.num_under_way < MAX_REQUESTS_OF_PEER:
            await asyncio.sleep(0)
        refused = await ask("/metrics")
        others = [
            asyncio.ensure_future(ask("/metrics", peer="10.0.0.2")),
            asyncio.ensure_future(ask("/healthz")),
            asyncio.ensure_future(ask("/metrics", headers=AUTHORISED)),
        ]
        while guard.num_under_way < MAX_REQUESTS_OF_PEER + len(others):
            await asyncio.sleep(0)
        leave.set()
        return refused, await asyncio.gather(*held, *others), guard.num_under_way

    refused, answered, left = asyncio.run(scenario())

    assert refused == 503
    assert set(answered) == {200}
    assert left == 0


def test_a_slow_page_loses_the_oldest_events_and_they_are_counted():
    async def scenario():
        feed = EventFeed()
        stream: Any = feed.subscribe()
        await stream.__anext__()
        for step in range(MAX_PENDING + 10):
            feed.publish("step", {"step": step})
        first = await stream.__anext__()
        await stream.aclose()
        return feed, first

    feed, first = asyncio.run(scenario())

    assert b'"step":10}' in first
    assert feed.dropped == 10
    assert feed.num_clients == 0


def test_the_number_of_open_pages_is_bounded():
    async def scenario():
        feed = EventFeed()
        streams: list[Any] = [feed.subscribe() for _ in range(MAX_CLIENTS)]
        for stream in streams:
            await stream.__anext__()
        assert feed.subscribe() is None
        await streams[0].aclose()
        assert feed.subscribe() is not None
        for stream in streams:
            await stream.aclose()

    asyncio.run(scenario())
