"""Rows of a heat map as lines on the page: picked by pointer, keys and search, true to the store, in the address."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page, Position, expect

from tests.dashboards.charts import LAYERS, cell_centre, chart, hover, small_run
from tests.dashboards.conftest import OpenPage, Serve
from tests.dashboards.fake_run import Run
from tests.exporters.recorded_run import BAD_STEP, GRADIENTS, commit
from trainermon.exporters.store import curves
from trainermon.exporters.store.query import run_query

pytestmark = pytest.mark.server

ROWS = LAYERS + 1  # place of the chart of picked rows, which is hidden until there is one
NUM_STEPS = 12


def stored_run(folder: Path) -> Run:
    """Return a page's run whose rows lie in a store."""
    segments = folder / "nodes" / "host-a" / "segments"
    segments.mkdir(parents=True)
    commit(segments, range(1, NUM_STEPS + 1))
    run = Run(num_steps=NUM_STEPS, num_blocks=1, world_size=2)
    run.rows = [key.label for key in GRADIENTS]
    run.heat = run.heat[: len(run.rows)]
    run.stored = folder
    return run


def told_at(page: Page, step: int) -> str:
    chart(page, ROWS).focus()
    page.keyboard.press("Home")
    for _ in range(step - 1):
        page.keyboard.press("ArrowRight")
    readout = page.locator(".track").nth(ROWS).locator(".readout")
    expect(readout).to_contain_text(f"at step {step}")
    return readout.text_content() or ""


def test_numbers_of_a_line_are_those_of_the_store(serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
    run = stored_run(tmp_path)
    where = f"kind = 'grad_reduced' AND name = '{GRADIENTS[1].name}'"
    sql = f"SELECT sqrt(sum(sum_sq) / sum(finite)), max(max) FROM stats WHERE {where} GROUP BY step ORDER BY step"
    truth = run_query(tmp_path, sql).rows

    agent = serve(run)
    page = open_page(agent)
    at = cell_centre(page, LAYERS, row=1, step=5, rows=4, steps=NUM_STEPS)
    chart(page, LAYERS).click(position=Position(x=at["x"], y=at["y"]))

    expect(page.locator(".chip code")).to_have_text(GRADIENTS[1].label)
    for step in (1, BAD_STEP, NUM_STEPS):
        text = told_at(page, step)
        assert float(text.split(" ")[0].split(",")[0].replace("\N{MINUS SIGN}", "-")) == pytest.approx(
            truth[step - 1][0], rel=5e-3
        )
        assert ("2 not finite" in text) == (step == BAD_STEP)
    page.get_by_label("Value of the rows").select_option("max")
    expect(page.locator(".track").nth(ROWS).locator(".hint").first).to_contain_text("maximum of the finite elements")
    assert float(told_at(page, 2).split(" ")[0]) == pytest.approx(truth[1][1], rel=5e-3)
    with page.expect_download() as download:
        page.get_by_role("link", name="csv").click()
    table = np.genfromtxt(download.value.path(), delimiter=",", names=True)
    np.testing.assert_array_equal(table["max"], [largest for _, largest in truth])
    np.testing.assert_array_equal(table["rms"], [rms for rms, _ in truth])


def test_numbers_of_the_steps_are_saved_as_they_are_stored(serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
    sql = "SELECT step, rank, loss, grad_norm, learning_rate, recorded['accuracy'] FROM step_values"
    run = stored_run(tmp_path)
    truth = np.array(run_query(tmp_path, sql).rows, float)
    page = open_page(serve(run))
    csv = page.get_by_role("button", name="csv")

    with page.expect_download() as download:
        csv.click()
    table = np.genfromtxt(download.value.path(), delimiter=",", names=True, deletechars="")
    columns = ("step", "rank", "loss", "grad_norm", "learning_rate", "recorded.accuracy")
    np.testing.assert_array_equal(np.stack([table[name] for name in columns], axis=1), truth)

    chart(page, LAYERS).focus()
    page.keyboard.press("End")
    page.keyboard.press("+")
    first, last = (int(text) for text in re.findall(r"\d+", page.locator("#zoom-text").inner_text()))
    with page.expect_download() as download:
        csv.click()
    assert download.value.suggested_filename == f"{run.describe()['run_id']}_{first}-{last}.csv"
    table = np.genfromtxt(download.value.path(), delimiter=",", names=True)
    np.testing.assert_array_equal(table["step"], [step for step, *_ in truth if first <= step <= last])


def test_it_is_said_why_a_table_is_not_saved(
    serve: Serve, open_page: OpenPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = open_page(serve(stored_run(tmp_path)), may_lose=True)
    problem = page.locator("#tools .problem")

    monkeypatch.setattr(curves, "MAX_STEP_LINES", 1)
    page.get_by_role("button", name="csv").click()
    expect(problem).to_contain_text("not saved: 24 lines, one per step and rank, are more than the 1 of one table")
    monkeypatch.undo()
    with page.expect_download():
        page.get_by_role("button", name="csv").click()
    expect(problem).to_be_empty()


def test_what_is_shown_stands_in_the_address_and_comes_back(serve: Serve, open_page: OpenPage) -> None:
    agent = serve(small_run())
    page = open_page(agent)
    page.get_by_label("Quantity", exact=True).select_option("actv")
    finder = page.get_by_role("combobox", name="Find a row")
    finder.fill("H.2 qkv")
    expect(page.locator(".found [role=option]")).to_have_text(["h.2.attn.qkv.weight"])
    finder.press("Enter")
    page.get_by_label("Ranks of the rows").get_by_text("each rank").click()
    page.get_by_label("Value of the rows").select_option("std")
    page.get_by_label("Theme").get_by_text("dark").click()
    page.get_by_text("without outliers").click()
    chart(page, LAYERS).focus()
    page.keyboard.press("End")
    page.keyboard.press("+")
    expect(page).to_have_url(re.compile("steps=150-200"))

    other = open_page(agent, page.url[len(agent.url) :])

    assert other.url == page.url
    expect(other.locator(".chip code")).to_have_text("h.2.attn.qkv.weight")
    expect(other.locator(".chip .hint")).to_have_text("activations")
    expect(other.get_by_label("Quantity", exact=True)).to_have_value("actv")
    expect(other.get_by_label("Value of the rows")).to_have_value("std")
    expect(other.locator("#zoom-text")).to_have_text("steps 150 to 200")
    expect(other.locator("html")).to_have_attribute("data-theme", "dark")
    expect(other.get_by_label("without outliers")).to_be_checked()
    for shown in (page, other):
        hover(shown, ROWS, {"x": 400, "y": 100})
        expect(shown.locator(".tip")).to_contain_text("rank 3: ")
    page.get_by_role("button", name="Take h.2.attn.qkv.weight out").click()
    expect(chart(page, ROWS)).to_be_hidden()


def test_the_theme_is_remembered(serve: Serve, open_page: OpenPage) -> None:
    agent = serve(small_run())
    page = open_page(agent)
    page.get_by_label("Theme").get_by_text("dark").click()
    page.goto("about:blank")
    page.goto(agent.url)

    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_hostile_names_are_text_and_keys_reach_every_row(serve: Serve, open_page: OpenPage) -> None:
    run = small_run()
    run.rows[2] = '<img src=x onerror="document.title=1">&row=actv:x#?'
    run.heat[2, 49] = np.inf

    agent = serve(run)
    page = open_page(agent)
    chart(page, LAYERS).focus()
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    expect(page.locator(".track").nth(LAYERS).get_by_role("status")).to_contain_text(run.rows[2])
    page.keyboard.press("Enter")

    expect(page.locator(".chip code")).to_have_text(run.rows[2])
    assert "1 not finite" in told_at(page, 50)
    page.reload()
    expect(page.locator(".chip code")).to_have_text(run.rows[2])
    assert page.locator("img").count() == 0
