"""What the controller passes on of a node's page, and what it does not."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import threading
import urllib.error
import urllib.request

import pytest

from tests.agent.controller.controllers import TOKEN
from tests.agent.controller.test_end_to_end import address
from tests.agent.nodes import wait_for

HALF = b"0123456789abcdef" * 4096


@pytest.fixture
def job(make_node, make_controller, monkeypatch):
    """A node with two ranks that have done three steps, its controller, and the path of its page there."""
    monkeypatch.setenv("TRAINERMON_TOKEN", TOKEN)
    node = make_node("a", (0, 1), world_size=2)
    for rank in node.ranks:
        rank.steps(0, 3)
    controller = make_controller(discovery={"agents": [address(node)]}).ready()
    wait_for(lambda: node.get_json("api/lines?names=loss")["steps"][-1:] == [2], "the steps")
    wait_for(lambda: controller.get_json("api/v1/job")["runs"], "the agent's report")
    (agent,) = controller.get_json("api/v1/job")["agents"]
    return node, controller, f"node/{agent['run_id']}/{agent['host']}/"


@pytest.mark.parametrize(
    "path",
    [
        "api/lines?names=loss,grad_norm",
        "api/heatmap?kind=grad_reduced&statistic=rms&columns=10",
        "api/row.csv?kind=grad_reduced&row=h.0.weight",
        "api/steps.csv?first=1&last=2",
        "api/ranks?quantity=step_time",
    ],
)
def test_data_are_those_of_the_node(job, path):
    node, controller, page = job

    passed, own = answer_of(controller, page + path), answer_of(node, path)

    assert passed == own


def test_files_of_the_page_are_the_controllers_own_and_the_agents_interface_stays_closed(job):
    node, controller, page = job

    assert answer_of(controller, page) == answer_of(node, "")
    assert answer_of(controller, f"{page}static/app.js") == answer_of(node, "static/app.js")
    for path in ("api/v1/ranks", "metrics", "nothing"):
        assert answer_of(controller, page + path)[0] == 404
    assert answer_of(controller, page.replace("node/", "node/other"))[0] == 200  # files alone
    status, _, body = answer_of(controller, page.replace("node/", "node/other") + "api/run")
    assert (status, b"no node" in body) == (404, True)


def test_events_arrive_as_they_happen(job):
    node, controller, page = job
    with urllib.request.urlopen(f"{controller.url}{page}events", timeout=60) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        for rank in node.ranks:
            rank.steps(3, 1)
        lines = iter(stream.readline, b"")

        assert any(line.startswith(b"event: ") for line in lines)


@pytest.mark.parametrize(
    "path", ["api/../metrics", "api/%2e%2e/metrics", "api/%2E/run", "api//run", "graph/../metrics", "diagnosis/%2e%2e/"]
)
def test_a_path_that_leads_elsewhere_is_no_page(job, path):
    _, controller, page = job

    status, _, body = answer_of(controller, page + path)

    assert (status, b"no such page" in body) == (404, True)


def test_a_question_mark_within_a_path_begins_no_query(job):
    node, controller, page = job

    assert answer_of(controller, f"{page}api/lines%3Fnames=loss") == answer_of(node, "api/lines%3Fnames=loss")


def test_open_pages_leave_the_controller_its_own_way_to_the_node(job):
    node, controller, page = job
    with contextlib.ExitStack() as opened:
        for _ in range(8):
            stream = opened.enter_context(urllib.request.urlopen(f"{controller.url}{page}events", timeout=60))
            assert stream.readline()

        assert answer_of(controller, f"{page}api/run")[0] == 200
        assert controller.post(f"{page}api/commands", {"id": "a", "action": "dump"})[0] == 202
        node.ranks[0].steps(3, 4)
        wait_for(lambda: step_of(controller, rank=0) == 6, "the controller's own questions")


def test_orders_need_the_token_and_reach_the_node(job):
    node, controller, page = job
    silence = {"rule": "loss-spike", "minutes": 5, "by": "ada", "series": "", "note": ""}

    refused, _ = controller.post(f"{page}api/silences", silence, token=None)
    status, _ = controller.post(f"{page}api/silences", silence)
    unknown, _ = controller.post(f"{page}api/stop", {})
    nested, _ = controller.post(f"{page}api/silences", b"[" * 100_000)

    assert (refused, status, unknown, nested) == (401, 202, 404, 400)
    wait_for(lambda: (node.node_dir / "alerts.handled.jsonl").exists(), "the silence")
    said = (node.node_dir / "alerts.handled.jsonl").read_text().splitlines()
    assert [json.loads(line)["silenced"]["by"] for line in said] == ["ada"]


def test_a_silenced_alert_is_told_apart_from_those_that_are_heard(job):
    node, controller, page = job
    for rank in node.ranks:
        rank.steps(3, 3, nan=True)
    wait_for(lambda: len(rules_of(controller, "alerts")) > 1, "the alerts")
    rule, *others = sorted(rules_of(controller, "alerts"))

    silence = {"rule": rule, "minutes": 5, "by": "ada", "series": "", "note": ""}
    assert controller.post(f"{page}api/silences", silence)[0] == 202

    wait_for(lambda: rules_of(controller, "silenced") == {rule}, "the silenced alert")
    assert rules_of(controller, "alerts") == set(others)


def rules_of(controller, key):
    (agent,) = controller.get_json("api/v1/job")["agents"]
    return {alert["rule"] for alert in agent[key]}


def test_what_a_browser_would_run_is_not_passed_on(make_controller, monkeypatch):
    monkeypatch.setenv("TRAINERMON_TOKEN", TOKEN)
    with serving_scripts() as agent:
        controller = make_controller(discovery={"agents": [agent]}).ready()
        wait_for(lambda: controller.get_json("api/v1/job")["runs"], "the report")

        status, media_type, body = answer_of(controller, "node/run/host/api/run")
        moved = urllib.request.Request(f"{controller.url}node/run/host/diagnosis/a/1/2?x=1")
        with pytest.raises(urllib.error.HTTPError) as found:
            urllib.request.build_opener(StayHere).open(moved, timeout=60)

        assert (status, media_type, b"<script>" in body) == (502, "application/json", False)
        with found.value as answer:
            assert (answer.code, answer.headers["location"]) == (307, f"http://{agent}/diagnosis/a/1/2?x=1")


@pytest.mark.parametrize("status", [302, 401, 999])
def test_a_status_that_tells_a_browser_nothing_of_the_data_is_not_passed_on(make_controller, monkeypatch, status):
    monkeypatch.setenv("TRAINERMON_TOKEN", TOKEN)
    with serving_scripts() as agent:
        controller = make_controller(discovery={"agents": [agent]}).ready()
        wait_for(lambda: controller.get_json("api/v1/job")["runs"], "the report")

        read, _, said = answer_of(controller, f"node/run/host/api/status/{status}")
        ordered, answer = controller.post("node/run/host/api/commands", {"status": status})

        assert (read, f"status {status}" in said.decode()) == (502, True)
        assert (ordered, f"status {status}" in answer["detail"]) == (502, True)
        assert answer_of(controller, "node/run/host/api/status/503")[0] == 503


def test_an_answer_that_is_nested_too_deeply_is_none(make_controller, monkeypatch):
    monkeypatch.setenv("TRAINERMON_TOKEN", TOKEN)
    with serving_scripts() as agent:
        controller = make_controller(discovery={"agents": [agent]}).ready()
        wait_for(lambda: controller.get_json("api/v1/job")["runs"], "the report")

        status, answer = controller.post("node/run/host/api/commands", {"answer": "[" * 100_000})

        assert (status, "nested too deeply" in answer["detail"]) == (502, True)


def test_an_answer_passes_on_as_it_comes_and_one_that_breaks_off_is_no_whole_one(make_controller, monkeypatch):
    monkeypatch.setenv("TRAINERMON_TOKEN", TOKEN)
    with serving_scripts() as agent:
        controller = make_controller(discovery={"agents": [agent]}).ready()
        wait_for(lambda: controller.get_json("api/v1/job")["runs"], "the report")

        with urllib.request.urlopen(f"{controller.url}node/run/host/api/halves/both", timeout=60) as answer:
            first = answer.read(len(HALF))  # nothing is held back until the rest is there
            ScriptAgent.goes_on.set()
            assert (first, answer.read()) == (HALF, HALF)
        with (
            urllib.request.urlopen(f"{controller.url}node/run/host/api/halves/first", timeout=60) as answer,
            pytest.raises((http.client.IncompleteRead, ConnectionError)),
        ):
            answer.read()


class StayHere(urllib.request.HTTPRedirectHandler):
    """Follows nothing."""

    def redirect_request(self, *_):
        return None


class ScriptAgent(http.server.BaseHTTPRequestHandler):
    """Tells of a rank, answers as it is asked to, and everything else with a page that has a script."""

    goes_on = threading.Event()

    def do_GET(self):
        if self.path.startswith("/api/halves/"):
            return self.answer_in_halves(is_whole=self.path.endswith("/both"))
        if self.path.startswith("/api/status/"):
            return self.answer(int(self.path.rsplit("/", 1)[1]), "application/json", b"{}")
        report = {
            "run_id": "run",
            "attempt": 1,
            "host": "host",
            "world_size": 1,
            "step": None,
            "steps_per_s": 1.0,
            "ranks": [],
        }
        is_report = self.path == "/api/v1/ranks"
        body = json.dumps(report | {"alerts": [], "dumps": {}}).encode() if is_report else b"<script>alert(1)</script>"
        return self.answer(200, "application/json" if is_report else "text/html", body)

    def do_POST(self):
        order = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.answer(order.get("status", 200), "application/json", order.get("answer", "{}").encode())

    def answer_in_halves(self, *, is_whole):
        self.answer(200, "application/octet-stream", HALF, length=2 * len(HALF))
        self.wfile.flush()
        if is_whole:
            assert self.goes_on.wait(60)
            self.wfile.write(HALF)

    def answer(self, status, media_type, body, *, length=None):
        self.send_response(status)
        self.send_header("content-type", media_type)
        self.send_header("content-length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving_scripts():
    """Return a context in which a `ScriptAgent` answers; gives its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ScriptAgent)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def step_of(controller, *, rank):
    """Return the step on which the controller knows `rank` to be."""
    (agent,) = controller.get_json("api/v1/job")["agents"]
    return next(state["step"] for state in agent["ranks"] if state["rank"] == rank)


def answer_of(server, path):
    """Return status, media type and body of the answer to GET `path`."""
    url = server.url if hasattr(server, "url") else server.running()["url"]
    try:
        with urllib.request.urlopen(url + path, timeout=60) as answer:
            return answer.status, answer.headers.get_content_type(), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers.get_content_type(), error.read()
