"""Notes and matches by hand on the page, and what its server keeps of them."""

from __future__ import annotations

import http.client
import json
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, Position, Route, expect

from tests.analysis.compare.dumps import forward, tensor, write_dump
from tests.dashboards.conftest import DRAWN, READY_MS, NewPage
from tests.dashboards.graph.conftest import OpenGraph, ServeGraph
from trainermon.analysis.graph.page.serving import GraphServer

pytestmark = pytest.mark.server

CHANGE = '{"before": {}, "after": {"notes": {"a": "b"}}}'
HOSTILE = "<img src=x onerror=\"document.title='1'\">"


def _write_unlike(folder: Path) -> tuple[Path, Path]:
    """Write two dumps, of which the golden one has two layers where the other has one: nothing tells which it is."""
    for side, names in (("target", ["fc1"]), ("golden", ["dense", "gate"])):
        layers = {
            f"Module.{name}.Linear.forward.0": forward(tensor(value=1.0), output=tensor(value=2.0)) for name in names
        }
        head = {"Module.head.Linear.forward.0": forward(tensor(value=2.0), output=tensor(value=3.0))}
        write_dump(folder / side / "step0" / "rank0", layers | head)
    return folder / "target", folder / "golden"


@pytest.fixture
def server(tmp_path: Path, serve_graph: ServeGraph) -> GraphServer:
    target, golden = _write_unlike(tmp_path)
    return serve_graph(target, golden, notes=target)


@pytest.fixture
def page(new_page: NewPage, server: GraphServer) -> Page:
    return _opened(new_page(), server.url)


def _opened(page: Page, url: str) -> Page:
    page.goto(url)
    page.wait_for_selector("body[data-ready]")
    return page


def _kept(tmp_path: Path) -> dict[str, object]:
    found = json.loads((tmp_path / "target" / "graph_notes.json").read_text())
    assert isinstance(found, dict)
    return found


def _select(page: Page, words: str) -> None:
    page.fill("#search", words)
    page.press("#search", "Enter")


def test_a_note_is_kept_beside_the_dump_and_stays_text(page: Page, tmp_path: Path) -> None:
    _select(page, "head")
    page.get_by_label("note").fill(HOSTILE)
    page.get_by_label("note").blur()
    expect(page.locator("#panel section [role=status]")).to_have_text("kept")

    assert _kept(tmp_path)["notes"] == {"Module.head.Linear.forward.0": HOSTILE}
    _select(page, "dense")
    assert page.get_by_label("note").input_value() == ""
    _select(page, "head")
    assert page.get_by_label("note").input_value() == HOSTILE
    assert page.locator("img").count() == 0
    page.reload()
    page.wait_for_selector("body[data-ready]")
    _select(page, "head")
    assert page.get_by_label("note").input_value() == HOSTILE


def _write_note(page: Page, text: str) -> None:
    page.get_by_label("note").fill(text)
    page.get_by_label("note").blur()


def test_what_two_readers_write_at_the_same_node_is_kept_of_both(page: Page, new_page: NewPage, tmp_path: Path) -> None:
    other = _opened(new_page(), page.url)
    for one in (page, other):
        _select(one, "head")
    status = "#panel section [role=status]"

    _write_note(page, "of the first")
    expect(page.locator(status)).to_have_text("kept")
    _write_note(other, "of the second")
    expect(other.locator(status)).to_have_text("kept, with what somebody else has written here meanwhile")

    assert _kept(tmp_path)["notes"] == {"Module.head.Linear.forward.0": "of the first\n\nof the second"}
    assert other.get_by_label("note").input_value() == "of the first\n\nof the second"
    _select(other, "dense")
    _write_note(other, "elsewhere")
    expect(other.locator(status)).to_have_text("kept")
    _select(page, "head")
    _write_note(page, "")
    expect(page.locator(status)).to_have_text("kept, with what somebody else has written here meanwhile")
    assert set(_kept(tmp_path)["notes"].values()) == {"of the first\n\nof the second", "elsewhere"}  # type: ignore[attr-defined]


def test_a_note_outlasts_the_tensors_that_arrive_while_it_is_written(page: Page) -> None:
    asked: list[Route] = []
    page.route("**/details/*", lambda route: asked.append(route))
    _select(page, "head")
    page.get_by_label("note").fill("half a sen")
    expect(page.locator(".missing")).to_have_text("Reading its tensors…")
    for one in asked:
        one.continue_()
    expect(page.locator("#panel table")).to_be_visible()

    assert page.get_by_label("note").input_value() == "half a sen"


def test_two_nodes_are_matched_by_hand_and_no_longer(page: Page, tmp_path: Path) -> None:
    _select(page, "fc1")
    page.keyboard.press("Escape")
    page.keyboard.press("m")
    expect(page.locator(".told")).to_contain_text("Select what the golden dump alone has")
    page.keyboard.press("0")
    for name in ("fc1", "dense"):
        page.evaluate(DRAWN)
        page.locator("#graph").click(position=_middle(page, name), modifiers=["Shift"] if name == "dense" else [])
    with _answered(page):
        page.keyboard.press("m")
    expect(page.locator(".told")).to_contain_text("Matched fc1, dense")
    expect(page.locator("#panel")).to_contain_text("matched by hand: fc1.Linear = dense.Linear")
    expected = {"notes": {}, "matches": [{"target": ["fc1.Linear"], "golden": ["dense.Linear"]}]}
    assert _kept(tmp_path) == expected
    with _answered(page):
        page.keyboard.press("M")
    expect(page.locator(".told")).to_contain_text("no longer matched")
    assert _kept(tmp_path) == {"notes": {}, "matches": []}


def _answered(page: Page) -> AbstractContextManager[object]:
    """Wait at the end until the server has kept what was changed."""
    return page.expect_response(
        lambda reply: reply.request.method == "POST" and reply.url.endswith("/notes"), timeout=READY_MS
    )


def _middle(page: Page, name: str) -> Position:
    """Return where on the canvas the box of a module is: from the picture as SVG, at the zoom that shows all."""
    with page.expect_download() as download:
        page.keyboard.press("e")
        page.get_by_role("menuitem", name="SVG").click()
    svg = download.value.path().read_text()
    text = svg.split(f"{name}  Linear<")[0].rpartition("<text ")[2]
    x, y = (float(text.split(f'{axis}="')[1].split('"')[0]) for axis in "xy")
    width, height = (float(svg.split(f' {axis}="')[1].split('"')[0]) for axis in ("width", "height"))
    size = page.locator("#graph").bounding_box()
    assert size
    zoom = min(1.2, (size["width"] - 40) / width, (size["height"] - 40) / height)
    return {
        "x": size["width"] / 2 + (x + 20 - width / 2) * zoom,
        "y": size["height"] / 2 + (y - 4 - height / 2) * zoom,
    }


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (("notes", {}, CHANGE), 200),
        (("notes", {"Origin": "http://elsewhere.test"}, CHANGE), 403),
        (("notes", {}, "[1]"), 400),
        (("notes", {}, "{}"), 400),
        (("notes", {"Content-Length": "9999999"}, ""), 413),
        (("other", {}, "{}"), 404),
        (("../x/notes", {}, "{}"), 404),
    ],
)
def test_only_the_page_itself_writes_and_only_notes(
    server: GraphServer, request_: tuple[str, dict[str, str], str], status: int, tmp_path: Path
) -> None:
    path, headers, body = request_
    url = urlsplit(server.url)
    own = {"Origin": f"http://{url.netloc}"}
    connection = http.client.HTTPConnection(url.netloc)
    connection.request("POST", f"{url.path}{path}", body or None, {**own, **headers})

    assert connection.getresponse().status == status
    connection.close()
    assert (tmp_path / "target" / "graph_notes.json").exists() is (status == 200)


def test_a_file_keeps_notes_to_be_saved(open_graph: OpenGraph) -> None:
    page = open_graph("faulty")
    page.get_by_label("note").fill("look here")
    page.get_by_label("note").blur()
    page.keyboard.press("e")
    with page.expect_download() as download:
        page.get_by_role("menuitem", name="notes").click()

    assert list(json.loads(download.value.path().read_text())["notes"].values()) == ["look here"]
