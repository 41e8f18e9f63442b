"""What can be looked at in other ways: ranks, directions, micro steps, producers, colours; what is saved and copied."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.analysis.compare.dumps import forward, tensor, write_dump
from tests.dashboards.conftest import DRAWN
from tests.dashboards.graph.conftest import OpenGraph, expect_shown
from trainermon.cli import main

pytestmark = pytest.mark.server

SELECTED = "#panel h2"
HOSTILE = '<img src=x onerror="document.title=1">'


def _items(page: Page) -> list[str]:
    page.evaluate(DRAWN)
    return page.locator("#tree [role=treeitem]").all_text_contents()


def test_ranks_that_are_judged_alike_share_a_row(open_graph: OpenGraph) -> None:
    page = open_graph("ranks")
    page.get_by_role("tab", name="Ranks").click()

    rows = [row.split("\n") for row in page.locator("#panel tbody tr").all_inner_texts()]
    assert [row[0].split("\t")[:2] for row in rows] == [["0, 2", "2"], ["1 dp 1", "1"]]
    assert "began here" in rows[1][0]
    page.get_by_role("button", name="0, 2").click()
    expect_shown(page, "step0 rank0")
    assert page.get_by_role("tab", name="Ranks").get_attribute("aria-selected") == "true"


def test_boxes_have_a_cell_for_each_group_of_ranks(open_graph: OpenGraph, tmp_path: Path) -> None:
    colours = {}
    for name in ("ranks", "faulty"):
        page = open_graph(name)
        with page.expect_download() as download:
            page.keyboard.press("e")
            page.keyboard.press("Enter")
        download.value.save_as(tmp_path / name)
        colours[name] = (tmp_path / name).read_text().count('height="6" rx="1"')

    assert colours["faulty"] == 0
    assert colours["ranks"] > 0
    assert colours["ranks"] % 2 == 0  # ranks 0 and 2, and rank 1


def test_one_direction_can_be_shown_alone(open_graph: OpenGraph) -> None:
    page = open_graph("sound")
    assert {"forward", "backward"} <= set(_items(page))
    page.keyboard.press("f")
    assert "backward" not in _items(page)
    page.keyboard.press("b")
    assert "forward" not in _items(page)
    page.keyboard.press("b")
    assert {"forward", "backward"} <= set(_items(page))


def test_the_same_place_of_another_micro_step_is_a_key_away(open_graph: OpenGraph, tmp_path: Path) -> None:
    keys = [f"Module.fc.Linear.{direction}.{call}" for call in (0, 1) for direction in ("forward", "backward")]
    write_dump(tmp_path / "dump", {key: forward(tensor(), output=tensor()) for key in keys})
    main(["graph", str(tmp_path / "dump"), "-o", str(tmp_path / "page.html")])
    page = open_graph(tmp_path / "page.html", "#node=3")
    assert page.text_content(SELECTED) == "fc Linear"
    page.keyboard.press("]")
    assert page.text_content(SELECTED) == "fc Linear"
    assert "micro step 1" in str(page.text_content("#panel dd"))
    page.keyboard.press("[")
    assert "micro step 0" in str(page.text_content("#panel dd"))


def test_producers_and_consumers_lead_back_and_forth(open_graph: OpenGraph) -> None:
    page = open_graph("sound")
    page.keyboard.press("/")
    page.keyboard.type("class:Linear fc2")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    selected = page.text_content(SELECTED)
    page.keyboard.press("i")
    producer = page.text_content(SELECTED)
    page.keyboard.press("u")

    assert producer != selected
    assert "fc2" in str(page.text_content("#panel dd")) or page.text_content(SELECTED) == selected


@pytest.mark.parametrize(("key", "text"), [("2", "relative error"), ("3", "norm"), ("5", "type"), ("6", "bytes")])
def test_colours_state_their_scale(open_graph: OpenGraph, key: str, text: str) -> None:
    page = open_graph("faulty")
    plain = page.locator("#graph").screenshot()
    page.keyboard.press(key)

    expect(page.locator("#legend")).to_contain_text(text)
    assert page.locator("#legend .swatch").count() >= 1
    assert page.locator("#graph").screenshot() != plain
    page.keyboard.press("1")
    said = [
        "▲ began here",
        "! differs or is not finite, because of what came before",
        "+ \N{MINUS SIGN} on one side only",
    ]
    assert page.locator("#legend .swatch").count() == len(said)
    assert page.locator("#legend span").all_text_contents()[: len(said)] == said


def test_a_measure_is_a_search_word(open_graph: OpenGraph) -> None:
    page = open_graph("sound")
    page.keyboard.press("/")
    page.keyboard.type("dtype:float32 norm>0")
    some = int(str(page.text_content("#finding")).split()[0].replace(",", ""))
    page.keyboard.type(" norm>1e30")

    assert some > 10
    assert page.text_content("#finding") == "0 found"


def test_the_levels_lead_to_what_stands_beside(open_graph: OpenGraph) -> None:
    page = open_graph("faulty")
    level = page.get_by_label("module", exact=True).first
    assert "layers.1" in str(level.text_content())
    level.focus()
    options = level.locator("option").all_text_contents()
    level.select_option(label=next(option for option in options if "layers.0" in option))

    assert page.text_content(SELECTED) == "layers.0 Block"
    assert any("▲ layers.1" in option for option in options)


def test_the_tree_tells_what_the_boxes_show(open_graph: OpenGraph) -> None:
    page = open_graph("faulty")
    items = _items(page)
    selected = page.locator('#tree [aria-selected="true"]')

    assert "layers.1  Block, it began here" in items
    expect(selected).to_have_text("layers.1  Block, it began here")
    assert page.locator("#tree").get_attribute("aria-activedescendant") == selected.get_attribute("id")
    assert selected.get_attribute("aria-expanded") == "true"
    page.locator("#tree").focus()
    page.keyboard.press("Enter")
    _items(page)
    assert selected.get_attribute("aria-expanded") == "false"


def test_a_menu_copies_keys_and_a_configuration(open_graph: OpenGraph) -> None:
    page = open_graph("faulty")
    page.evaluate("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }")
    page.keyboard.press("x")
    page.get_by_role("menuitem", name="s key").click()
    assert page.evaluate("window.copied") == "Module.layers.1.Block.forward.0"
    page.keyboard.press("x")
    page.get_by_role("menuitem", name="configuration").click()

    config = json.loads(page.evaluate("window.copied"))
    assert (config["task"], config["step"], config["rank"]) == ("tensor", [0], [0])
    assert config["tensor"]["list"] == ["Module.layers.1.Block"]
    page.keyboard.press("x")
    page.keyboard.press("Escape")
    assert page.locator(".menu").count() == 0


def test_a_right_click_selects_and_opens_the_menu(open_graph: OpenGraph) -> None:
    page = open_graph("faulty")
    page.locator("#graph").click(button="right")

    assert page.get_by_role("menuitem", name="Copy the address").is_visible()


def test_the_picture_can_be_saved_in_pixels_and_the_selection_as_json(open_graph: OpenGraph, tmp_path: Path) -> None:
    page = open_graph("faulty")
    for item, name in (("PNG", "graph.png"), ("JSON", "node.json")):
        page.keyboard.press("e")
        with page.expect_download() as download:
            page.get_by_role("menuitem", name=item).click()
        assert download.value.suggested_filename == name
        download.value.save_as(tmp_path / name)

    assert (tmp_path / "graph.png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads((tmp_path / "node.json").read_text())
    assert saved["key"] == "Module.layers.1.Block.forward.0"
    assert saved["verdict"] == "blamed"
    assert any(row["golden"] for row in saved["rows"])


def test_hostile_names_stay_text_everywhere(open_graph: OpenGraph, tmp_path: Path) -> None:
    key = f"Module.{HOSTILE}.Linear.forward.0"
    write_dump(tmp_path / "dump", {key: forward(tensor(), output=tensor())}, info={"root": {}})
    main(["graph", str(tmp_path / "dump"), "-o", str(tmp_path / "page.html")])
    page = open_graph(tmp_path / "page.html", "#node=3")

    page.keyboard.press("x")
    page.keyboard.press("Escape")
    page.keyboard.press("5")
    assert any(HOSTILE in item for item in _items(page))
    assert page.locator("img").count() == 0
    assert page.title() != "1"


def test_it_prints_without_its_tools(open_graph: OpenGraph) -> None:
    page = open_graph("faulty")
    page.emulate_media(media="print")

    assert page.is_hidden(".tools")
    assert page.is_visible("#panel table")
    assert page.is_visible("#graph")
