"""Both sides beside each other, the tabs of the panel, searches over ranks, and the map that one can look closer at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.analysis.graph.shared_dumps import write_shared
from tests.analysis.graph.test_notes import write_renamed_around
from tests.dashboards.conftest import DRAWN
from tests.dashboards.graph.conftest import OpenGraph, expect_shown
from trainermon.cli import main

pytestmark = pytest.mark.server

SELECTED = "#panel h2"
COMMON = {"model", "micro step 0", "forward", "head Linear"}


@pytest.fixture(scope="module")
def renamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of two dumps of which one calls a module otherwise."""
    folder = tmp_path_factory.mktemp("renamed")
    main(["graph", *map(str, write_renamed_around(folder)), "-o", str(folder / "page.html")])
    return folder / "page.html"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of two ranks, of which the second has a fault: where it gave 1 it gives 3."""
    folder = tmp_path_factory.mktemp("shared")
    main(["graph", *map(str, write_shared(folder)), "-o", str(folder / "page.html")])
    return folder / "page.html"


def _seen(page: Page, canvas: str) -> set[str]:
    """Return what a click selects anywhere on the line down the middle of a canvas."""
    size = page.locator(canvas).bounding_box()
    assert size
    seen = set()
    for y in range(4, int(size["height"]), 14):
        page.locator(canvas).click(position={"x": size["width"] / 2, "y": y})
        seen.add(" ".join(str(page.text_content(SELECTED)).split()))
    return seen


def test_two_panes_have_the_calls_of_one_side_each_and_one_has_all(open_graph: OpenGraph, renamed: Path) -> None:
    page = open_graph(renamed, "#node=0")
    both = _seen(page, "#graph")
    page.keyboard.press("0")
    page.keyboard.press("\\")
    expect(page.locator("#split")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("0")
    target = _seen(page, "#graph")
    page.keyboard.press("0")
    golden = _seen(page, "#golden")

    assert target == COMMON | {"mlp Mlp", "mlp.up Linear"}
    assert golden == COMMON | {"ffn Ffn", "ffn.up Linear"}
    assert both == target | golden
    assert page.locator(".side:visible").all_text_contents() == ["target", "golden"]
    page.get_by_role("button", name="two panes").click()
    assert page.is_hidden("#golden")


def test_panes_are_moved_and_unfolded_together(open_graph: OpenGraph) -> None:
    page = open_graph("faulty")
    page.keyboard.press("\\")
    page.keyboard.press("0")
    box = page.locator("#graph").bounding_box()
    assert box
    for act in (
        lambda: page.mouse.wheel(0, 40),
        lambda: page.keyboard.press("+"),
        lambda: page.mouse.dblclick(box["x"] + box["width"] / 2, box["y"] + 40),
    ):
        page.evaluate(DRAWN)
        before = page.locator("#golden").screenshot()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        act()
        page.evaluate(DRAWN)
        assert page.locator("#golden").screenshot() != before


def test_a_single_dump_has_one_pane(open_graph: OpenGraph) -> None:
    page = open_graph("sound")
    page.keyboard.press("\\")

    assert page.is_hidden("#golden")
    assert page.locator("#split").count() == 0
    assert page.text_content("#status") == "There is one side only."
    assert page.get_by_role("tab").all_text_contents() == ["Tensors", "Code", "Raw"]


def test_tabs_show_differences_code_and_what_is_known(open_graph: OpenGraph, shared: Path) -> None:
    page = open_graph(shared)
    tabs = page.get_by_role("tab")
    assert tabs.all_text_contents() == ["Tensors", "Difference", "Ranks", "Code", "Raw"]
    tabs.first.focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Difference")).to_be_focused()
    cells = [row.split("\t") for row in page.locator("#panel tbody tr:not(.message)").all_inner_texts()]
    # place, verdict, relative; then what the statistics are apart: 3 and -3 where 1 and -1 should be
    assert cells[0][0] == "output.0"
    assert cells[0][1] == "error"
    assert cells[0][3:] == ["2", "\N{MINUS SIGN}2", "0", "2"]
    assert cells[1] == ["input.0", "pass", "0", "0", "0", "0", "0"]
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    known = json.loads(str(page.text_content("#panel pre")))
    assert known["key"] == "Module.norm.LayerNorm.forward.0"
    assert [row["place"] for row in known["rows"]] == ["input.0", "output.0"]
    page.get_by_role("tab", name="Code").click()
    assert page.text_content("[role=tabpanel]") == "No stack was recorded."


def test_a_line_of_code_leads_to_all_of_them(open_graph: OpenGraph) -> None:
    page = open_graph("faulty")
    page.get_by_role("button", name="record_with_msprobe.py").click()

    assert page.get_by_role("tab", name="Code").get_attribute("aria-selected") == "true"
    assert page.locator("#panel .stack").count() > 3


def test_a_search_over_ranks_leads_from_rank_to_rank(open_graph: OpenGraph) -> None:
    page = open_graph("ranks")
    page.keyboard.press(",")
    expect_shown(page, "step0 rank0")
    page.keyboard.press("/")
    page.keyboard.type("rank:*")
    expect(page.locator("#finding")).to_have_text("1 found")  # where it began in any rank
    page.keyboard.press("Enter")
    expect_shown(page, "step0 rank1")
    expect(page.locator(SELECTED)).to_have_text("layers.1 Block")
    page.fill("#search", "rank:0,2 class:linear fc1")
    expect(page.locator("#finding")).to_have_text("12 found in 2 ranks")
    page.press("#search", "Shift+Enter")
    page.press("#search", "Shift+Enter")
    expect_shown(page, "step0 rank2")
    expect(page.locator("#finding")).to_have_text("11 of 12")
    page.press("#search", "Escape")
    page.keyboard.press(",")
    expect_shown(page, "step0 rank1")
    expect(page.locator("#finding")).to_have_text("1 finding")


def test_a_drag_on_the_map_looks_closer_and_a_double_click_shows_all(open_graph: OpenGraph) -> None:
    page = open_graph("faulty")
    strip = page.locator("#map")
    box = strip.bounding_box()
    assert box
    page.evaluate(DRAWN)
    whole = strip.screenshot()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 15)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 15, steps=4)
    page.mouse.up()
    page.evaluate(DRAWN)
    assert strip.screenshot() != whole
    # What is at the left edge now is the node in the middle of the step.
    strip.click(position={"x": 1, "y": 15})
    node = int(page.evaluate("new URLSearchParams(location.hash.slice(1)).get('node')"))
    assert 51 <= node <= 56  # of 107
    page.keyboard.press("o")
    strip.dblclick(position={"x": 1, "y": 15})
    page.keyboard.press("o")
    page.evaluate(DRAWN)
    assert strip.screenshot() == whole
    page.keyboard.press("Z")
    page.evaluate(DRAWN)
    assert strip.screenshot() != whole
    page.keyboard.press("Z")
    page.evaluate(DRAWN)
    assert strip.screenshot() == whole


def test_one_level_up_leads_from_a_call_to_the_whole_model(open_graph: OpenGraph, shared: Path) -> None:
    page = open_graph(shared)
    seen = []
    for _ in range(3):
        page.keyboard.press("Alt+ArrowUp")
        seen.append(str(page.text_content(SELECTED)).strip())
    page.keyboard.press("Alt+ArrowUp")

    assert seen == ["forward", "micro step 0", "model"]
    expect_shown(page, "step0 whole model")


def test_overflow_and_numbers_of_ones_own_are_colours(open_graph: OpenGraph, tmp_path: Path) -> None:
    write_renamed_around(tmp_path)
    (tmp_path / "mine.csv").write_text("name,loss\nmlp,3\nhead,30\n")
    words = ["graph", str(tmp_path / "target"), "--overlay", f"mine={tmp_path / 'mine.csv'}"]
    main([*words, "-o", str(tmp_path / "page.html")])
    page = open_graph(tmp_path / "page.html")
    page.keyboard.press("7")
    expect(page.locator("#legend")).to_contain_text("critical: gives them, and was given none")
    page.keyboard.press("8")
    expect(page.locator("#legend")).to_contain_text("mine")
    assert page.locator("#legend span").first.text_content() == "3"
    page.keyboard.press("1")
    expect(page.locator("#legend")).not_to_contain_text("mine")


def test_the_key_of_a_call_is_copied(open_graph: OpenGraph) -> None:
    page = open_graph("faulty")
    page.evaluate("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }")
    page.keyboard.press("C")

    assert page.evaluate("window.copied") == "Module.layers.1.Block.forward.0"
    assert page.text_content("#status") == "copied"
