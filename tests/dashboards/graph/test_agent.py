"""The graphs of a run's dumps on the page of a real agent: the link, the wait, the page, and the tensors of a node."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.agent.nodes import Run
from tests.dashboards.conftest import NewPage

pytestmark = pytest.mark.server

RECORDED = Path(__file__).parents[2] / "analysis" / "compare" / "recorded"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    """A run with a real agent, and dumps of two steps, one of them not finite, and of an earlier attempt."""
    run = Run(tmp_path)
    for folder, name in (("a1/attempt2/step7", "nan"), ("a1/attempt2/step8", "sound"), ("a0/attempt1/step3", "sound")):
        target = run.output / "dumps" / folder / "rank0"
        shutil.copytree(next((RECORDED / name).rglob("rank0")), target)
    run.rank(start_agent=True, attempt=2).steps(0, 2)
    yield run
    run.close()


@pytest.fixture
def page(new_page: NewPage) -> Page:
    """A page on which no script fails and no policy is broken; it may be refused."""
    return new_page(lambda message: "olicy" in message.text, viewport={"width": 1300, "height": 900})


def test_each_dump_leads_to_its_graph(run: Any, page: Page) -> None:
    page.goto(run.running()["url"])
    page.locator("#dumps tr", has_text="step8").get_by_role("link", name="graph").click()
    page.wait_for_selector("body[data-ready]")

    assert page.text_content("#sentence") == "Everything is finite."
    assert "step8 rank0" in str(page.text_content("#facts"))
    page.get_by_label("step and rank").select_option(label="▲ step7 rank0")
    expect(page.locator("#sentence")).to_have_text(
        "The first value that is not finite arose in mul_ (forward) in layers.1 (Block), record_with_msprobe.py:27."
    )
    expect(page.locator("#panel table")).to_contain_text("NaN")


def test_a_note_is_kept_with_the_runs_token_and_is_there_for_the_next_reader(run: Any, page: Page) -> None:
    page.goto(f"{run.running()['url']}graph/a1/2/7/")
    page.wait_for_selector("body[data-ready]")
    note = page.get_by_label("note", exact=True)
    note.fill("look here")
    note.blur()
    expect(page.locator("#panel section [role=status]")).to_contain_text("with its token only")
    (token,) = (path.read_text().strip() for path in run.output.glob("nodes/*/token"))
    page.get_by_label("Token").fill(token)
    page.get_by_label("Token").blur()
    expect(page.locator("#panel section [role=status]")).to_have_text("kept")

    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert note.input_value() == "look here"
    assert "look here" in (run.output / "dumps" / "graph_notes.json").read_text()


def test_a_graph_that_cannot_be_drawn_says_why(run: Any, page: Page) -> None:
    (run.output / "dumps/a0/attempt1/step3/rank0/dump.json").write_text("{")
    page.goto(f"{run.running()['url']}graph/a0/1/3/")
    expect(page.locator("h1")).to_have_text("The graph cannot be shown")
    assert "it is damaged" in str(page.text_content("p"))


def test_what_is_no_dump_is_refused(run: Any, page: Page) -> None:
    reply = page.goto(f"{run.running()['url']}graph/..%2F..%2Fx/1/3/")

    assert reply is not None
    assert reply.status == 404
