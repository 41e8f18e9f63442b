"""What a reader may ask of the agent from an alert: each needs the token, and says why it was refused."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.dashboards.conftest import OpenPage, Serve
from tests.dashboards.fake_agent import TOKEN
from tests.dashboards.fake_run import broken_run

pytestmark = pytest.mark.server


def test_an_alert_is_acknowledged_dumped_and_silenced(serve: Serve, open_page: OpenPage) -> None:
    agent = serve(broken_run())
    page = open_page(agent, may_lose=True)
    row = page.locator("tr.alert", has_text="gradient-nonfinite-local")
    expect(row.get_by_role("link", name="runbook")).to_have_attribute("href", "runbook/gradient-nonfinite-local")
    row.get_by_role("button", name="+ 97 more").click()
    page.get_by_role("button", name="Acknowledge…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Your name").fill("<b>mia</b>")
    dialog.get_by_label("Note").fill("known bad node")
    dialog.get_by_label("Token").fill("wrong")
    dialog.get_by_role("button", name="Acknowledge").click()
    expect(dialog.get_by_role("alert")).to_contain_text("not the right one")
    dialog.get_by_label("Token").fill(TOKEN)
    dialog.get_by_role("button", name="Acknowledge").click()

    expect(dialog).to_have_count(0)
    expect(row.locator(".said")).to_contain_text("known to <b>mia</b>")
    assert agent.said == [("acknowledge", {"alert": ["alert-local"], "by": "<b>mia</b>", "note": "known bad node"})]
    page.get_by_role("button", name="Dump…").click()
    page.get_by_role("dialog").get_by_label("What").select_option("tensor")
    page.get_by_role("dialog").get_by_role("button", name="Dump the next step").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    name, order = agent.said[1]
    assert name == "order"
    assert order.items() >= {"action": "dump", "task": "tensor", "ranks": [3]}.items()
    page.get_by_role("button", name="Silence the rule…").click()
    page.get_by_role("dialog").get_by_label("For").select_option("480")
    page.get_by_role("dialog").get_by_label("Series").fill("h.3.*")
    page.get_by_role("dialog").get_by_role("button", name="Silence").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert agent.said[2][1].items() >= {"rule": "gradient-nonfinite-local", "minutes": 480, "series": "h.3.*"}.items()


def test_a_run_that_takes_no_orders_offers_none(serve: Serve, open_page: OpenPage) -> None:
    run = broken_run()
    usual = run.describe
    run.describe = lambda: {**usual(), "takes_orders": False}  # type: ignore[method-assign]
    page = open_page(serve(run))
    page.get_by_role("button", name="+ 97 more").first.click()

    expect(page.locator(".findings")).to_contain_text("on the page of the run's agent")
    expect(page.get_by_role("button", name="Acknowledge…")).to_have_count(0)


@pytest.mark.parametrize("state", ["finished", "stopped", "interrupted", "killed", "failed", "crashed"])
def test_a_run_that_has_ended_says_why_there_is_nothing_to_order(serve: Serve, open_page: OpenPage, state: str) -> None:
    run = broken_run()
    run.state = state
    page = open_page(serve(run))
    page.get_by_role("button", name="+ 97 more").first.click()

    expect(page.locator(".findings")).to_contain_text("The run has ended")
    expect(page.get_by_role("button", name="Dump…")).to_have_count(0)
    expect(page.locator("#figure-ranks")).not_to_contain_text("alive")
