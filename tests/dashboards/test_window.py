"""The page in windows of every width, from a phone to a wide screen."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.dashboards.conftest import OpenPage, Serve
from tests.dashboards.fake_run import broken_run

pytestmark = pytest.mark.server


@pytest.mark.parametrize("width", [390, 700, 900, 1320, 1900])
def test_nothing_overflows_the_window(serve: Serve, open_page: OpenPage, width: int) -> None:
    agent = serve(broken_run())
    page = open_page(agent, viewport={"width": width, "height": 1000})

    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    page.get_by_role("link", name="Open the diagnosis").click()
    expect(page.locator(".chain")).to_be_visible()
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width


def test_a_phone_shows_sentence_and_tables_whole(serve: Serve, open_page: OpenPage) -> None:
    agent = serve(broken_run())
    page = open_page(agent, viewport={"width": 390, "height": 844})

    size = page.locator(".headline").bounding_box()
    assert size is not None
    assert size["width"] > 200
    assert size["height"] < 80
    page.get_by_role("button", name="+ 97 more").first.click()
    for place in ("#alerts", "#dumps"):
        visible, needed, height = page.locator(place).evaluate("e => [e.clientWidth, e.scrollWidth, e.clientHeight]")
        assert needed <= visible
        rows = page.locator(f"{place} tbody > tr").count()
        assert height < 400 * rows
    expect(page.locator(".alert td").nth(5)).to_have_attribute("data-label", "Value")
    kind = page.locator(".finding-table td").nth(1)
    lines, words = kind.evaluate(
        "e => [e.clientHeight / parseFloat(getComputedStyle(e).lineHeight), e.innerText.split(' ').length]"
    )
    assert lines < words + 1  # of its padding
