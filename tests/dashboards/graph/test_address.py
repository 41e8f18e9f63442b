"""The address of a view: a link shows another person the very same picture, and going back shows what was before."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from tests.dashboards.conftest import DRAWN
from tests.dashboards.graph.conftest import OpenGraph, expect_shown

pytestmark = pytest.mark.server

ROUNDING = 1  # of 255
MOST_LOOKS = 20  # a busy browser may paint later than it says


def _zoom_map(page: Page) -> None:
    box = page.locator("#map").bounding_box()
    assert box
    page.mouse.move(box["x"] + 400, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 800, box["y"] + 20, steps=4)
    page.mouse.up()
    page.mouse.move(0, 0)


def _look_the_same(page: Page, other: Page, part: str) -> bool:
    """Whether a part of two pages looks the same; a browser may round a pixel at a corner either way."""
    one, another = (
        np.asarray(Image.open(io.BytesIO(shot.locator(part).screenshot())), np.int16) for shot in (page, other)
    )
    return one.shape == another.shape and int(np.abs(one - another).max()) <= ROUNDING


def _parts_that_stay_apart(page: Page, again: Page) -> list[str]:
    parts = ["#stage", "#map", "#panel"]
    for _ in range(MOST_LOOKS):
        for one in (page, again):
            one.mouse.move(0, 0)  # what the pointer is over looks otherwise
            one.evaluate(DRAWN)
        parts = [part for part in parts if not _look_the_same(page, again, part)]
        if not parts:
            break
    return parts


def _set_apart(page: Page) -> None:
    """Leave a layer apart from those that are like it."""
    page.get_by_label("step and rank").select_option("0")
    expect_shown(page, "step0 rank0")
    page.keyboard.press("ArrowLeft")


VIEWS: dict[str, Callable[[Page], object]] = {
    "folded": lambda page: page.keyboard.press("Enter"),
    "unfolded": lambda page: [page.keyboard.press(key) for key in ("ArrowUp", "Enter")],
    "set apart": _set_apart,
    "moved": lambda page: [page.keyboard.press(key) for key in ("+", "+", "d", "s")],
    "coloured": lambda page: page.keyboard.press("3"),
    "backward alone": lambda page: page.keyboard.press("b"),
    "two panes": lambda page: page.keyboard.press("\\"),
    "searched": lambda page: page.fill("#search", "class:linear fc1"),
    "map": _zoom_map,
    "tab": lambda page: page.get_by_role("tab", name="Difference").click(),
    "other rank": lambda page: page.get_by_label("step and rank").select_option("2"),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_link_shows_the_very_same(open_graph: OpenGraph, name: str) -> None:
    page = open_graph("ranks")
    page.wait_for_selector("body[data-complete]")
    VIEWS[name](page)
    page.evaluate("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }")
    if name == "other rank":
        expect_shown(page, "rank2")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("c")
    address = page.evaluate("window.copied")

    again = open_graph("ranks", f"#{address.partition('#')[2]}")
    again.wait_for_selector("body[data-complete]")
    assert _parts_that_stay_apart(page, again) == []
    assert again.input_value("#search") == page.input_value("#search")
    assert again.text_content("#facts") == page.text_content("#facts")


def test_going_back_shows_what_was_selected_before(open_graph: OpenGraph) -> None:
    page = open_graph("ranks")
    selected = page.locator("#panel h2")
    page.keyboard.press("ArrowUp")
    expect(selected).to_have_text("layers.0 Block")
    page.get_by_label("step and rank").select_option("2")
    expect_shown(page, "step0 rank2")
    page.keyboard.press("ArrowLeft")
    expect(selected).to_have_text("forward ")

    page.go_back()
    expect(selected).to_have_text("layers.0 Block")
    expect_shown(page, "step0 rank2")
    page.go_back()
    expect_shown(page, "step0 rank1")
    expect(selected).to_have_text("layers.0 Block")
    page.go_back()
    expect(selected).to_have_text("layers.1 Block")
    page.go_forward()
    expect(selected).to_have_text("layers.0 Block")


@pytest.mark.parametrize(
    "fragment",
    [
        "#node=99999",
        "#node=-1",
        "#node=x",
        "#open=zz.zz.zzzz&apart=-1.q",
        "#at=1_2_NaN",
        "#map=9-1&tab=x&colour=y&of=z",
    ],
)
def test_a_broken_address_shows_the_graph(open_graph: OpenGraph, fragment: str) -> None:
    page = open_graph("faulty", fragment)

    assert page.text_content("#panel h2")
    assert page.input_value("[aria-label='colour by']") == "verdict"
