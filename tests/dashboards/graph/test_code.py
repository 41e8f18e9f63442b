"""The code behind a call, on the page of a graph."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.analysis.source.trained_script import RELU, SCRIPT, line_of, trained
from tests.dashboards.graph.conftest import OpenGraph
from trainermon.cli import main

pytestmark = pytest.mark.server

HOSTILE = SCRIPT.replace("self.fc2(h) + x", "self.fc2(h) + x  # </script><img src=x onerror=document.title='x'>")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of a dump whose script has gone since."""
    folder = tmp_path_factory.mktemp("code")
    dumps = trained(folder / "run", HOSTILE)
    (folder / "run" / "train.py").unlink()
    main(["graph", str(dumps), "-o", str(folder / "graph.html")])
    return folder / "graph.html"


@pytest.fixture
def page(open_graph: OpenGraph, file: Path) -> Page:
    page = open_graph(file)
    page.get_by_role("tab", name="Code").click()
    return page


def found_by(page: Page, words: str) -> str:
    """Search, go to the first hit, and return how many there are."""
    page.fill("#search", words)
    found = page.text_content("#finding")
    page.press("#search", "Enter")
    return found


def test_the_line_of_a_call_is_shown_among_those_of_its_function(page: Page) -> None:
    found_by(page, "relu")

    number = line_of(HOSTILE, "torch.relu(h)")
    assert page.text_content("#panel details[open] summary") == f"train.py:{number} in forward"
    assert page.text_content("#panel .code .hit").removeprefix(str(number)) == RELU
    shown = page.eval_on_selector_all("#panel details[open] pre div", "rows => rows.map((row) => row.textContent)")
    lines = HOSTILE.splitlines()
    assert shown == [f"{at}{lines[at - 1] or ' '}" for at in range(number - 2, number + 2)]


def test_a_backward_has_the_line_of_its_forward(page: Page) -> None:
    found_by(page, "relu")
    first = page.text_content("#panel .code .hit")
    for _ in range(3):
        page.press("#search", "Enter")

    assert "backward" in page.text_content("#panel dl")
    assert page.text_content("#panel .code .hit") == first


def test_a_line_finds_its_calls(page: Page) -> None:
    number = line_of(HOSTILE, "torch.relu(h)")

    assert found_by(page, f"line:train.py:{number}") == "6 found"  # forward and backward of three blocks
    assert page.text_content("#panel h2").strip() == "relu"
    assert found_by(page, f"line:rain.py:{number}") == "0 found"
    assert found_by(page, "line:train.py:1") == "0 found"


def test_code_is_text(page: Page) -> None:
    found_by(page, f"line:train.py:{line_of(HOSTILE, 'self.fc2(h)')}")

    assert "onerror" in page.text_content("#panel .code .hit")
    assert page.query_selector("#panel img") is None
    assert page.title() != "x"
