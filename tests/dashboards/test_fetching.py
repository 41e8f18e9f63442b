"""How often the page asks for its heat maps, by a clock that the test turns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.dashboards.charts import shown_step, small_run
from tests.dashboards.conftest import OpenPage, Serve
from tests.dashboards.fake_run import broken_run

pytestmark = pytest.mark.server

TOLD_WHAT_IS_SEEN = "new Promise((done) => new IntersectionObserver(done).observe(document.body))"
"""A promise, fulfilled when all that asked before whether they are seen have been told."""


def stop_clock(page: Page) -> None:
    """Have time pass on the page only when the test says so."""
    page.clock.install()
    page.clock.pause_at(page.evaluate("Date.now()") / 1000 + 1)


def pass_until(condition: Callable[[], bool], page: Page) -> int:
    """Have time pass on a page with a stopped clock; return how much, in milliseconds."""
    passed_ms = 0
    while not condition():
        page.clock.run_for(20)
        passed_ms += 20
    return passed_ms


def test_heat_maps_are_refetched_at_a_bounded_rate(serve: Serve, open_page: OpenPage) -> None:
    run = small_run()

    def heat_requests() -> int:
        return sum(path.startswith("/api/heatmap") for path in agent.requests)

    agent = serve(run)
    page = open_page(agent)
    stop_clock(page)
    before = heat_requests()
    passed_ms = 0
    for _ in range(15):
        agent.publish("step", run.append())
        passed_ms += pass_until(lambda: shown_step(page) == run.num_steps, page)
    passed_ms += pass_until(lambda: heat_requests() > before, page)

    assert heat_requests() - before <= 1 + passed_ms / 1000


def test_heat_maps_that_nobody_sees_are_not_fetched(serve: Serve, open_page: OpenPage) -> None:
    run = broken_run()

    agent = serve(run)
    page = open_page(agent)
    page.get_by_role("link", name="Open the diagnosis").click()
    expect(page.locator(".chain")).to_be_visible()
    page.evaluate(TOLD_WHAT_IS_SEEN)
    stop_clock(page)
    before = len([path for path in agent.requests if "columns=" in path])
    agent.publish("step", run.append())
    pass_until(lambda: shown_step(page) == run.num_steps, page)
    page.clock.run_for(60_000)

    assert len([path for path in agent.requests if "columns=" in path]) == before
