"""The page of a graph as it is served: tensors when their node is chosen, nothing to who has not the address."""

from __future__ import annotations

import gzip
import http.client
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, Request, expect

from tests.analysis.compare.dumps import forward, tensor, write_dump
from tests.dashboards.conftest import NewPage
from tests.dashboards.graph.conftest import RECORDED, ServeGraph
from trainermon.analysis.graph.page.serving import GraphServer

pytestmark = pytest.mark.server

HOSTILE = '<img src=x onerror="document.title=1">'


@pytest.fixture
def server(tmp_path: Path, serve_graph: ServeGraph) -> GraphServer:
    """A server of the faulty dump against the sound one, both copied, so that a test may change them."""
    for name in ("faulty", "sound"):
        shutil.copytree(next((RECORDED / name).rglob("rank0")), tmp_path / name)
    return serve_graph(tmp_path / "faulty", tmp_path / "sound")


@pytest.fixture
def page(new_page: NewPage) -> Page:
    return new_page()


def _get(server: GraphServer, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1])
    connection.request("GET", path, headers=headers)
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return reply, body


def test_tensors_of_both_sides_are_fetched_once_when_their_node_is_chosen(server: GraphServer, page: Page) -> None:
    asked: list[Request] = []
    page.on("request", lambda request: asked.append(request))
    page.goto(server.url)
    page.wait_for_selector("#panel table")

    assert "layers.1" in str(page.text_content("#panel h2"))
    assert page.locator("#panel tr.golden").count() > 0
    assert "record_with_msprobe.py" in str(page.text_content("#panel section"))
    before = len(asked)
    for key in ("ArrowUp", "ArrowDown"):
        page.keyboard.press(key)
        page.wait_for_selector("#panel table")
    assert len(asked) == before + 1
    assert all(request.url.startswith(server.url) for request in asked)


def test_numbers_are_those_of_the_dump(tmp_path: Path, page: Page, serve_graph: ServeGraph) -> None:
    write_dump(tmp_path / "dump", {"Module.fc.Linear.forward.0": forward(tensor(value=0.5), output=tensor(value=0.25))})
    page.goto(f"{serve_graph(tmp_path, None).url}#node=3")
    expect(page.locator("#panel td.number").first).to_have_text("0.5")


def test_what_has_changed_since_is_said_and_not_shown(
    tmp_path: Path, new_page: NewPage, serve_graph: ServeGraph
) -> None:
    write_dump(tmp_path / "dump", {"Module.fc.Linear.forward.0": forward(tensor(value=0.5), output=tensor(value=0.25))})
    page = new_page(lambda message: False)  # a refusal stands in the console
    server = serve_graph(tmp_path, None)
    (tmp_path / "dump" / "dump.json").write_text("{}")
    page.goto(f"{server.url}#node=3")
    expect(page.locator(".missing")).to_contain_text("it has changed since it was read")


def test_hostile_text_stays_text_when_it_is_fetched(tmp_path: Path, page: Page, serve_graph: ServeGraph) -> None:
    key = f"Module.{HOSTILE}.Linear.forward.0"
    write_dump(tmp_path / "dump", {key: forward(tensor(), output=tensor())})
    (tmp_path / "dump" / "stack.json").write_text(json.dumps({"0": [[key], [f"File {HOSTILE}"]]}))
    page.goto(f"{serve_graph(tmp_path, None).url}#node=3")
    expect(page.locator("#panel .stack")).to_have_text(f"File {HOSTILE}")

    assert page.title() != "1"
    assert page.locator("img").count() == 0


@pytest.mark.parametrize(
    "path", ["/", "/index.html", "//details/1", "/wrong/", "/wrong/details/1", "/../../etc/passwd", "/%2e%2e/x"]
)
def test_without_the_secret_nothing_is_told(server: GraphServer, path: str) -> None:
    reply, body = _get(server, path)

    assert reply.status == 404
    assert server.secret.encode() not in body


@pytest.mark.parametrize(
    "rest",
    ["details/-1", "details/99999999999", f"details/{'1' * 5_000}", "details/x", "details/²", "../../etc/passwd", "a"],
)
def test_with_it_only_numbers_are_understood(server: GraphServer, rest: str) -> None:
    reply, _ = _get(server, f"/{server.secret}/{rest.replace('²', '%C2%B2')}")

    assert reply.status == 404


def test_answers_are_packed_and_told_apart_by_a_tag(server: GraphServer) -> None:
    path = f"/{server.secret}/"
    plain, page = _get(server, path)
    packed, body = _get(server, path, **{"Accept-Encoding": "gzip"})
    again, nothing = _get(server, path, **{"If-None-Match": str(plain.getheader("ETag"))})

    assert gzip.decompress(body) == page
    assert packed.getheader("Content-Encoding") == "gzip"
    assert (again.status, nothing) == (304, b"")


def test_a_browser_may_do_with_it_what_it_may_with_the_agents_page(server: GraphServer) -> None:
    reply, _ = _get(server, f"/{server.secret}/")

    policy = str(reply.getheader("content-security-policy"))
    for words in ("default-src 'none'", "script-src 'sha256-", "connect-src 'self'", "frame-ancestors 'none'"):
        assert words in policy
    assert "unsafe-eval" not in policy
    assert reply.getheader("referrer-policy") == "no-referrer"
    assert reply.getheader("x-content-type-options") == "nosniff"


@pytest.mark.parametrize("size", [3, 1 << 23])
def test_who_sends_what_is_not_read_is_told_why(server: GraphServer, size: int) -> None:
    for _ in range(5):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1])
        connection.putrequest("POST", f"/{server.secret}/other")
        connection.putheader("Content-Length", str(size))
        connection.endheaders()
        connection.send(b"x" * size)
        reply = connection.getresponse()

        assert (reply.status, json.loads(reply.read())) == (404, {"detail": "nothing can be written here"})
        connection.close()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let programs that are started end by Ctrl-C, also where the tests were started so that they ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_the_command_prints_sentence_and_address_and_ends_with_ctrl_c() -> None:
    command = [sys.executable, "-m", "trainermon", "graph", str(RECORDED / "nan"), "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        address = process.stderr.readline().strip()
        parts = urlsplit(address)
        connection = http.client.HTTPConnection(parts.netloc)
        connection.request("GET", parts.path)
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)

    assert process.returncode == 0
    assert printed.startswith("The first value that is not finite arose in mul_")
    assert parts.hostname == "127.0.0.1"
