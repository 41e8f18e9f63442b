"""Numbers of the step, features, shares and times on the page."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.dashboards.charts import LAYERS, LEFT, RANKS, cell_centre, hover, small_run
from tests.dashboards.conftest import OpenPage, Serve
from tests.dashboards.fake_run import alert
from trainermon.core.values import Finding, Kind, SeriesKey

pytestmark = pytest.mark.server

MEASURE = 3  # place of the chart of the other numbers, where a run has any: before the layers


def test_other_numbers_of_the_step_are_a_chart_of_choice(serve: Serve, open_page: OpenPage) -> None:
    run = small_run()
    run.measure()
    run.learning_rate[149], run.loss_scale[149], run.global_grad_norm[149], run.grad_norm[149] = 0.125, 512, 0.75, 0.5

    agent = serve(run)
    page = open_page(agent)
    hover(page, MEASURE, cell_centre(page, MEASURE, row=0.4, step=150, rows=1, steps=200))

    title, readout = (page.locator(".track").nth(MEASURE).locator(part) for part in ("h2", ".readout"))
    expect(title).to_have_text("Learning rate")
    expect(readout).to_have_text("0.1250 at step 150")
    expect(page.locator(".readout").nth(2)).to_have_text("0.5000 (0.7500) at step 150")
    expect(page.locator("#figure-tokens .number")).to_have_text(re.compile(r"^1\.\d\d M$"))
    page.get_by_label("Number of the step").select_option("loss_scale")
    hover(page, MEASURE, cell_centre(page, MEASURE, row=0.4, step=150, rows=1, steps=200))
    expect(title).to_have_text("Loss scale")
    expect(readout).to_have_text("512 at step 150")
    expect(page.get_by_label("Loss scale scale").get_by_text("log")).to_have_attribute("aria-pressed", "true")


def test_a_number_that_comes_with_a_step_brings_its_chart(serve: Serve, open_page: OpenPage) -> None:
    run = small_run()

    agent = serve(run)
    page = open_page(agent)
    expect(page.get_by_label("Number of the step")).to_have_count(0)
    agent.publish("step", {**run.append(), "clip_ratio": 0.25, "loss_scale": None})

    expect(page.locator(".track").nth(MEASURE).locator("h2")).to_have_text("Clip ratio")
    assert page.get_by_label("Number of the step").locator("option").all_text_contents() == ["clip ratio", "step time"]


def test_features_shares_and_times_are_shown_as_what_they_are(serve: Serve, open_page: OpenPage) -> None:
    run = small_run()
    run.measure()
    run.rank_time[2, 99] = 0.25

    agent = serve(run)
    page = open_page(agent)
    layers, ranks = LAYERS + 1, RANKS + 1
    pressed = page.get_by_label("Colours").locator("[aria-pressed=true]")
    for kind, tip in [
        ("mg_direction", "gradient and momentum agree, mean: "),
        ("feature/attention_max_logit", "feature: attention max logit, maximum: "),
        ("comm/wait_seconds", "collectives: waiting time in seconds, mean: "),
    ]:
        page.get_by_label("Quantity", exact=True).select_option(kind)
        expect(pressed).to_have_text("linear")
        hover(page, layers, {"x": LEFT + 10, "y": 10})
        expect(page.locator(".tip")).to_contain_text(tip)
    page.get_by_label("Quantity", exact=True).select_option("state/momentum_buffer")
    expect(pressed).to_have_text("log")
    hover(page, layers, {"x": LEFT + 12, "y": 10})
    expect(page.locator(".tip")).to_contain_text("optimizer state: momentum buffer, RMS: ")
    page.get_by_label("Quantity of the ranks").select_option("wait")
    hover(page, ranks, cell_centre(page, ranks, row=2, step=100, rows=4, steps=200))
    expect(page.locator(".tip")).to_contain_text("waited 250 ms for collectives")


def test_only_times_are_written_in_seconds(serve: Serve, open_page: OpenPage) -> None:
    run = small_run()
    for name, value in (("loss_scale", 2048.0), ("duration_seconds", 0.5)):
        finding = Finding(series=SeriesKey(Kind.STEP, name), value=value, baseline=4 * value)
        values: dict[str, Any] = {"kind": Kind.STEP, "value": value, "baseline": 4 * value, "findings": (finding,)}
        run.alerts.append({**alert(id=name, rule=name.replace("_", "-"), num_series=1, **values), "statistic": "rms"})

    agent = serve(run)
    page = open_page(agent)

    rows = page.locator("#alerts tbody tr")
    for place, texts in enumerate([("2,048 (÷ 4)", "8,192"), ("500 ms (÷ 4)", "2.00 s")]):
        for column, text in zip((5, 6), texts, strict=True):
            expect(rows.nth(place).locator("td").nth(column)).to_have_text(text)
