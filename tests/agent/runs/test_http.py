"""What `trainermon serve` lets in: reading of the opened folders under known names, and nothing else."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.dashboards.runs_server import RunsServer, serving_runs
from tests.dashboards.stored_runs import StoredCurves, store_run
from trainermon.dashboards.headers import CONTENT_SECURITY_POLICY


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunsServer]:
    top = tmp_path_factory.mktemp("top")
    store_run(top / "opened/run", StoredCurves.made(5))
    store_run(top / "outside", StoredCurves.made(5))
    with serving_runs(top / "opened") as found:
        yield found


def ask(
    server: RunsServer, path: str, *, method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("path", ["/", "/api/runs", "/run/run/", "/run/run/api/run"])
def test_reading_needs_a_known_host_and_gets_the_policy(server: RunsServer, path: str) -> None:
    status, headers, _ = ask(server, path)
    assert status == 200
    assert headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert headers["x-content-type-options"] == "nosniff"
    assert ask(server, path, Host="evil.example")[0] == 421


@pytest.mark.parametrize("path", ["/api/runs", "/run/run/api/commands", "/run/run/api/stop", "/run/run/api/flush"])
def test_nothing_can_be_ordered(server: RunsServer, path: str) -> None:
    assert ask(server, path, method="POST")[0] == 401
    assert ask(server, path, method="POST", Origin="http://evil.example")[0] == 403
    assert ask(server, path, method="POST", Authorization="Bearer of nobody")[0] in (404, 405)


@pytest.mark.parametrize(
    "path",
    [
        "/run/outside/api/run",
        "/run/..%2Foutside/api/run",
        "/run/../../outside/api/run",
        "/run/run/static/../../../run.json",
        "/run/run/static/..%2F..%2Frun.json",
        "/run/run/api/reports/..%2F..%2Frun.json",
        "/run/run/api/diagnosis/..%2F..%2Foutside/1/2",
        "/static/..%2F..%2F__init__.py",
    ],
)
def test_no_path_leads_out_of_the_opened_folders(server: RunsServer, path: str) -> None:
    assert ask(server, path)[0] == 404


@pytest.mark.parametrize(
    "path",
    [
        "/api/curves?runs=outside&names=loss",
        "/api/curves?runs=run&names=SELECT%201",
        "/api/curves?runs=run&names=loss&axis=luck",
        "/api/curves?runs=&names=loss",
        "/api/difference?runs=run",
        f"/api/series?runs={','.join(f'r{number}' for number in range(33))}",
    ],
)
def test_what_is_wrong_is_said(server: RunsServer, path: str) -> None:
    status, _, body = ask(server, path)

    assert status == 400
    assert json.loads(body)["detail"]


def test_a_run_without_a_slash_leads_to_its_page(server: RunsServer) -> None:
    status, headers, _ = ask(server, "/run/run")

    assert status in (307, 308)
    assert urlsplit(headers["location"]).path == "/run/run/"


def test_events_of_a_run_are_a_stream(server: RunsServer) -> None:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    connection.request("GET", "/run/run/events")
    answer = connection.getresponse()

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.read(12) == b"retry: 1000\n"
    connection.close()
