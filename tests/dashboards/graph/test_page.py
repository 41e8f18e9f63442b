"""The page of a graph in a real browser: the first screen, every key, the pointer, and what is saved."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from playwright.sync_api import expect

from tests.analysis.compare.dumps import forward, tensor, write_dump
from tests.dashboards.conftest import DRAWN
from tests.dashboards.graph.conftest import RECORDED, OpenGraph, expect_shown
from trainermon.cli import main

pytestmark = pytest.mark.server

SELECTED = "#panel h2"


def test_the_first_screen_shows_where_it_began(open_graph: OpenGraph) -> None:
    page = open_graph("faulty")

    assert page.text_content("#sentence").startswith("The first difference arose in Module.layers.1.Block.forward.0")
    assert page.text_content(SELECTED) == "layers.1 Block"
    assert "is where it began" in page.text_content(".verdict")
    assert "what it gave to Module.layers.1.fc2" in page.text_content(".said").replace("W", "w", 1)
    assert "record_with_msprobe.py" in page.text_content("#panel section")


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (390, 844)])
def test_a_long_sentence_is_there_to_its_end(width: int, height: int, open_graph: OpenGraph, tmp_path: Path) -> None:
    scale = f"Module.{'decoder.layers.1.' * 16}scale.Scale.forward.0"
    ours, theirs = ({scale: forward(tensor(), output=tensor(value=value))} for value in (2.0, 1.0))
    files = [str(write_dump(tmp_path / name, data)) for name, data in (("ours", ours), ("theirs", theirs))]
    main(["graph", *files, "-o", str(tmp_path / "page.html")])
    page = open_graph(tmp_path / "page.html", viewport={"width": width, "height": height})

    sentence = page.locator("#sentence")
    assert len(sentence.text_content()) > 350
    assert sentence.evaluate("each => each.scrollHeight - each.clientHeight") <= 1
    expect(page.locator("#graph")).to_be_in_viewport(ratio=0.3)


def test_what_is_not_finite_is_shown_without_another_dump(open_graph: OpenGraph) -> None:
    page = open_graph("nan")

    assert page.text_content("#sentence") == (
        "The first value that is not finite arose in mul_ (forward) in layers.1 (Block), record_with_msprobe.py:27."
    )
    assert page.text_content(SELECTED).strip() == "mul_"
    assert "NaN" in page.text_content("#panel table")


def test_a_sound_dump_says_so_and_shows_the_whole_model(open_graph: OpenGraph) -> None:
    page = open_graph("sound")

    assert page.text_content("#sentence") == "Everything is finite."
    assert page.text_content(SELECTED).strip() == "model"
    assert page.is_hidden("#steps")


def test_arrows_walk_through_the_tree(open_graph: OpenGraph) -> None:
    page = open_graph("faulty")

    seen = []
    for key in ("ArrowUp", "ArrowDown", "ArrowRight", "ArrowDown", "ArrowLeft", "ArrowLeft"):
        page.keyboard.press(key)
        seen.append(page.text_content(SELECTED).split()[0])

    assert seen == ["layers.0", "layers.1", "norm", "fc1", "layers.1", "forward"]


def test_findings_are_gone_through_and_the_worst_is_found_again(open_graph: OpenGraph) -> None:
    page = open_graph("faulty")
    for _ in range(2):
        page.keyboard.press("ArrowLeft")
    assert page.text_content(SELECTED).strip() == "micro step 0"

    for key in ("Shift+Enter", "n", "p", "o"):
        page.keyboard.press("ArrowLeft")
        page.keyboard.press(key)
        assert page.text_content(SELECTED) == "layers.1 Block", key
    assert page.text_content("#finding") == "1 of 1"


def test_a_search_is_counted_and_gone_through(open_graph: OpenGraph) -> None:
    page = open_graph("faulty")
    page.keyboard.press("/")
    page.keyboard.type("class:linear fc*")

    assert page.text_content("#finding") == "12 found"
    page.keyboard.press("Enter")
    assert page.text_content(SELECTED).split() == ["fc1", "Linear"]
    assert page.text_content("#finding") == "1 of 12"
    page.keyboard.press("Escape")
    assert page.text_content("#finding") == "1 finding"


def test_what_a_search_found_is_listed_and_each_leads_there(open_graph: OpenGraph) -> None:
    page = open_graph("ranks")
    page.keyboard.press("/")
    page.keyboard.type("class:linear fc* rank:0-1")
    expect(page.locator("#finding")).to_have_text("24 found in 2 ranks")
    page.keyboard.press("ArrowDown")

    listed = page.get_by_role("menuitem")
    assert listed.count() == 24
    assert listed.first.text_content() == "step0 rank0: micro step 0 > forward > layers.0 > fc1"
    listed.nth(13).click()
    expect(page.locator("#finding")).to_have_text("14 of 24")
    expect_shown(page, "step0 rank1")
    assert page.text_content(SELECTED).split() == ["fc2", "Linear"]


def test_nothing_is_wider_than_a_narrow_screen(open_graph: OpenGraph) -> None:
    page = open_graph("ranks", viewport={"width": 390, "height": 844})

    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_a_click_selects_and_a_double_click_unfolds(open_graph: OpenGraph) -> None:
    page = open_graph("sound")
    canvas = page.locator("#graph")
    box = canvas.bounding_box()
    assert box is not None

    before = canvas.screenshot()
    canvas.click(position={"x": box["width"] / 2, "y": box["height"] / 2})
    assert "node=0" not in page.evaluate("location.hash")
    selected = canvas.screenshot()
    assert selected != before
    canvas.dblclick(position={"x": box["width"] / 2, "y": box["height"] / 2})
    page.evaluate(DRAWN)

    assert canvas.screenshot() != selected


def test_the_strip_leads_to_the_worst_at_its_place(open_graph: OpenGraph) -> None:
    page = open_graph("faulty")
    page.keyboard.press("ArrowUp")
    strip = page.locator("#map")
    box = strip.bounding_box()
    assert box is not None

    page.keyboard.press("o")
    place = float(page.evaluate("new URLSearchParams(location.hash.slice(1)).get('node')"))
    page.keyboard.press("ArrowUp")
    strip.click(position={"x": box["width"] * (place + 0.5) / 107, "y": 10})

    assert page.text_content(SELECTED) == "layers.1 Block"


def test_the_rank_with_the_finding_is_shown_and_the_others_are_a_key_away(open_graph: OpenGraph) -> None:
    page = open_graph("ranks")
    expect_shown(page, "step0 rank1")
    assert page.text_content(SELECTED) == "layers.1 Block"

    page.keyboard.press(",")
    expect_shown(page, "step0 rank0")
    assert page.text_content("#sentence").startswith("The dumps agree")
    page.keyboard.press(",")
    expect_shown(page, "step0 rank2")
    page.get_by_label("step and rank").select_option("1")
    expect(page.locator(SELECTED)).to_have_text("layers.1 Block")


def test_ranks_that_are_judged_alike_share_a_line_of_the_map(open_graph: OpenGraph) -> None:
    page = open_graph("ranks")
    strip = page.locator("#map")
    box = strip.bounding_box()
    assert box is not None

    assert box["height"] < 80  # ranks 0 and 2 are judged alike, and share a line
    strip.hover(position={"x": box["width"] / 2, "y": box["height"] - 12})
    assert strip.get_attribute("title") == "rank1"
    strip.hover(position={"x": box["width"] / 2, "y": 24})
    assert strip.get_attribute("title") == "ranks 0, 2"
    expect(page.locator("#legend")).to_contain_text("cells below a box: ranks 0, 2 | rank1")
    strip.click(position={"x": box["width"] / 2, "y": 24})
    expect_shown(page, "step0 rank0")
    page.keyboard.press(",")
    expect_shown(page, "step0 rank2")
    strip.click(position={"x": box["width"] / 2, "y": 24})
    expect_shown(page, "step0 rank2")
    address = page.evaluate("location.hash")
    again = open_graph("ranks", address)
    assert again.text_content("#facts") == page.text_content("#facts")
    assert again.text_content(SELECTED) == page.text_content(SELECTED)


def test_the_address_leads_back_to_what_was_selected(open_graph: OpenGraph) -> None:
    page = open_graph("faulty")
    page.keyboard.press("ArrowRight")
    fragment = page.evaluate("location.hash")

    again = open_graph("faulty", fragment)

    assert again.text_content(SELECTED) == page.text_content(SELECTED) == "norm LayerNorm"


def test_what_is_saved_is_a_picture_with_every_box(open_graph: OpenGraph, tmp_path: Path) -> None:
    page = open_graph("faulty")
    with page.expect_download() as download:
        page.keyboard.press("e")
        page.keyboard.press("Enter")
    path = tmp_path / "graph.svg"
    download.value.save_as(path)

    drawn = ElementTree.parse(path)
    texts = [node.text for node in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "▲ layers.1  Block" in texts
    assert "norm  LayerNorm" in texts
    boxes = [box for box in drawn.iter("{http://www.w3.org/2000/svg}rect") if box.get("stroke-width")]
    outer = max(boxes, key=lambda box: float(box.get("width", 0)) * float(box.get("height", 0)))
    assert float(outer.get("stroke-width", 0)) == 1  # its title alone says what is within


def test_help_lists_every_key(open_graph: OpenGraph) -> None:
    page = open_graph("sound")
    page.keyboard.press("?")

    assert page.is_visible("#help")
    keys = set(page.locator("#keys kbd").all_text_contents())
    named = "n p o i u [ ] { } , . f b / 0 z Z + - w a s d c C e ? m M x 1 2 3 4 5 6 7 \\"
    arrows = "ArrowUp ArrowDown ArrowLeft ArrowRight Alt+ArrowUp Enter Shift+Enter"
    assert {*named.split(), *arrows.split()} <= keys


def test_text_of_a_dump_stays_text(open_graph: OpenGraph, tmp_path: Path) -> None:
    key = "Module.</script><img src=x onerror=alert(1)>.Bo<b>x.forward.0"
    write_dump(tmp_path / "dump", {key: forward(output=tensor(value=float("nan")))}, construct={key: None})
    main(["graph", str(tmp_path / "dump"), "-o", str(tmp_path / "page.html")])

    page = open_graph(tmp_path / "page.html")

    assert page.locator("img, b").count() == 0
    page.keyboard.press("ArrowRight")
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    assert "<img src=x onerror=alert(1)>" in page.text_content("#panel")


def test_a_page_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "missing" / "page.html"

    assert main(["graph", str(RECORDED / "sound"), "-o", str(target)]) == 1
    assert "choose another file with -o" in capsys.readouterr().err
