"""The page of all runs in a real browser, in front of the server's own application and runs on disk."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from tests.dashboards.conftest import OpenPage
from tests.dashboards.runs_server import RunsServer, serving_runs
from tests.dashboards.stored_runs import StoredCurves, add_segment, alert_of, store_run
from trainermon.agent.runs import stored_history

pytestmark = pytest.mark.server

HOSTILE = '<img src=x onerror="document.title=1">'
CURVES = StoredCurves.made(200, seed=1, started_s=1.7e9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that no test changes: `base` and `tuned` part at step 120, one fails, one is broken, one hostile."""
    folder = tmp_path_factory.mktemp("runs")
    loss = CURVES.loss.copy()
    loss[120:] *= 1.1
    store_run(folder / "base", CURVES, tags=("baseline",), alerts=(alert_of(),))
    store_run(folder / "tuned", dataclasses.replace(CURVES, loss=loss), tags=("sweep",))
    failed = StoredCurves.made(200, seed=2, started_s=1.6e9)
    failed.loss[150:] = np.nan
    store_run(folder / "failed", failed)
    store_run(folder / HOSTILE, StoredCurves.made(5, started_s=1.5e9), tags=(HOSTILE,))
    store_run(folder / "broken", StoredCurves.made(5, started_s=1.4e9))
    (folder / "broken/run.json").write_text('{"run_id"')
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunsServer]:
    with serving_runs(folder) as found:
        yield found


def names(page: Page) -> list[str]:
    return page.locator("#runs .name").all_inner_texts()


def comparison(*runs: str, more: str = "") -> str:
    return f"#?runs={','.join(runs)}{more}&view=compare"


def ink(page: Page, chart: int, colour: str) -> int:
    """Count the pixels of a chart that have exactly the colour of a custom property."""
    script = """([chart, colour]) => {
        const canvas = document.querySelectorAll("#charts .plot")[chart].querySelector("canvas");
        const hex = getComputedStyle(document.documentElement).getPropertyValue(colour).trim();
        const wanted = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        let count = 0;
        for (let i = 0; i < data.length; i += 4) if (wanted.every((value, k) => data[i + k] === value)) count++;
        return count;
    }"""
    return int(page.evaluate(script, [chart, colour]))


def test_list_shows_every_run_with_what_is_wrong(server: RunsServer, open_page: OpenPage) -> None:
    page = open_page(server)

    assert names(page)[-1] == "broken"
    assert sorted(names(page)) == sorted(["base", "tuned", "failed", HOSTILE, "broken"])
    row = page.locator("#runs tbody tr")
    expect(row.filter(has_text="broken")).to_contain_text("run.json is not JSON")
    expect(row.filter(has_text="failed")).to_contain_text("not finite")
    expect(row.filter(has=page.get_by_role("link", name="base", exact=True))).to_contain_text("1 firing")
    expect(page.locator("#count")).to_have_text("5 runs")
    assert page.title() == "Runs · trainermon"


def test_search_tag_and_state_choose_and_are_in_the_address(server: RunsServer, open_page: OpenPage) -> None:
    page = open_page(server)

    page.fill("#search", "TUN ed")
    expect(page.locator("#runs .name")).to_have_text(["tuned"])
    page.fill("#search", "")
    page.get_by_label("Tag", exact=True).select_option("baseline")
    expect(page.locator("#runs .name")).to_have_text(["base"])
    page.get_by_label("Tag", exact=True).select_option("")
    page.get_by_role("button", name="with alerts").click()
    expect(page.locator("#runs .name")).to_have_text(["base"])

    page.get_by_role("button", name="with problems").click()
    page.fill("#search", "bro")
    expect(page).to_have_url(re.compile("search=bro"))
    again = open_page(server, page.url.removeprefix(server.url))
    expect(again.locator("#runs .name")).to_have_text(["broken"])
    expect(again.locator("#search")).to_have_value("bro")


def test_the_theme_of_the_address_stays_there(server: RunsServer, open_page: OpenPage) -> None:
    page = open_page(server, "#?theme=dark")

    page.fill("#search", "bro")

    expect(page).to_have_url(re.compile("search=bro"))
    expect(page).to_have_url(re.compile("theme=dark"))
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_columns_sort(server: RunsServer, open_page: OpenPage) -> None:
    page = open_page(server)

    page.get_by_role("button", name="Run", exact=True).click()
    assert names(page) == sorted(names(page), key=str.lower)
    page.get_by_role("button", name="Run ↓").click()
    assert names(page) == sorted(names(page), key=str.lower, reverse=True)


def test_new_runs_and_steps_appear(tmp_path: Path, open_page: OpenPage) -> None:
    curves = StoredCurves.made(20)
    store_run(tmp_path / "first", dataclasses.replace(curves, loss=curves.loss[:10]))
    with serving_runs(tmp_path) as server:
        page = open_page(server)
        expect(page.locator("#runs .name")).to_have_text(["first"])

        store_run(tmp_path / "second", StoredCurves.made(10, started_s=1.6e9))
        add_segment(tmp_path / "first", curves, range(10, 20))

        expect(page.locator("#runs .name")).to_have_text(["first", "second"])
        expect(page.locator("#runs tbody tr").first).to_contain_text("19")
        page.close()


def test_a_run_opens_as_the_page_of_its_agent(server: RunsServer, open_page: OpenPage) -> None:
    page = open_page(server, "run/base/")

    expect(page.locator("#run-id")).to_have_text("base")
    expect(page.locator("#state")).to_have_text("finished")
    expect(page.locator("#figure-step .number")).to_have_text("199")
    expect(page.locator(".headline")).to_have_text("Not healthy since step 3 on rank 0")
    page.get_by_role("link", name="All runs").click()
    expect(page.locator("#title")).to_have_text("Runs")


def test_an_open_page_follows_a_run_that_grows(tmp_path: Path, open_page: OpenPage) -> None:
    curves = StoredCurves.made(40)
    store_run(tmp_path / "run", dataclasses.replace(curves, loss=curves.loss[:20]), is_up=True)
    with serving_runs(tmp_path) as server:
        page = open_page(server, "run/run/")
        expect(page.locator("#figure-step .number")).to_have_text("19")

        add_segment(tmp_path / "run", curves, range(20, 40))

        expect(page.locator("#figure-step .number")).to_have_text("39")
        page.close()


def test_a_large_run_is_shown_by_its_newest_numbers_and_then_whole(
    tmp_path: Path, open_page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_run(tmp_path / "run", CURVES, segments=4)
    may_read = threading.Event()
    fill = stored_history.StoredHistory.fill

    def hold(read: stored_history.StoredHistory, segments: list[list[Path]], *, may_preview: bool) -> None:
        assert may_preview or may_read.wait(60)
        fill(read, segments, may_preview=may_preview)

    monkeypatch.setattr(stored_history, "PREVIEW_ROWS", 1)
    monkeypatch.setattr(stored_history.StoredHistory, "fill", hold)
    with serving_runs(tmp_path) as server:
        page = open_page(server, "run/run/")
        said = page.get_by_text("the newest steps only, until the others are read")
        expect(said).to_be_visible()
        expect(page.locator("#figure-step .number")).to_have_text("199")
        layers = page.get_by_text("6 rows, the input on top")
        expect(layers).to_have_count(0)

        with page.expect_response(re.compile("/api/lines")) as lines:
            may_read.set()

        assert lines.value.json()["steps"] == list(range(200))
        expect(layers).to_be_visible()
        expect(said).to_have_count(0)
        page.close()


def test_chosen_runs_are_drawn_in_one_chart(server: RunsServer, open_page: OpenPage) -> None:
    page = open_page(server)
    page.get_by_label("Compare base").check()
    page.get_by_label("Compare tuned").check()
    page.get_by_role("button", name="Compare 2 runs").click()

    expect(page.locator("#charts .track h2")).to_have_text(["Loss", "Gradient norm", "Step time", "Tokens per second"])
    expect(page.locator("#chosen a")).to_have_text(["base", "tuned"])
    for colour in ("--line-1", "--line-2"):
        assert ink(page, 0, colour) > 100, colour
    last = page.locator("#charts .track").first.locator(".legend output")
    expect(last).to_have_text([f"{CURVES.loss[-1]:.4g}", f"{CURVES.loss[-1] * 1.1:.4g}"])


def test_crosshair_tells_the_values_of_all_runs(server: RunsServer, open_page: OpenPage) -> None:
    page = open_page(server, comparison("base", "tuned"))
    plot = page.locator("#charts .plot").first

    plot.focus()
    page.keyboard.press("Home")

    expect(page.locator("#charts .readout").first).to_have_text("step 0")
    text = f"{CURVES.loss[0]:.4g}"
    expect(page.locator("#charts .track").first.locator(".legend output")).to_have_text([text, text])


def test_first_difference_is_said_with_the_command_and_shown(
    server: RunsServer, open_page: OpenPage, folder: Path
) -> None:
    page = open_page(server, comparison("base", "tuned"))

    sentences = page.locator(".difference")
    expect(sentences.first).to_contain_text("The loss differs from step 120 on:")
    expect(sentences.nth(1)).to_contain_text("The gradient norm is the same on all 200 common steps, 0 to 199.")
    expect(page.locator(".next")).to_contain_text("Where it begins, in which module and on which rank")
    expect(page.locator(".next code")).to_have_text(f"trainermon diagnose {folder}/base --against {folder}/tuned")
    page.get_by_role("button", name="Show step 120").click()
    expect(page.locator("#zoom-text")).to_have_text(re.compile(r"^10\d to 13\d$"))
    assert "from=" in page.url


def test_curves_that_are_the_same_begin_to_differ_nowhere(tmp_path: Path, open_page: OpenPage) -> None:
    for name in ("one", "other"):
        store_run(tmp_path / name, CURVES)
    with serving_runs(tmp_path) as server:
        page = open_page(server, comparison("one", "other"))

        expect(page.locator(".difference").first).to_contain_text("The loss is the same on all 200 common steps")
        expect(page.locator(".next")).to_have_text(
            f"Whether the runs differ in anything else, and where: "
            f"trainermon diagnose {tmp_path}/one --against {tmp_path}/other"
        )


def test_a_loss_that_is_not_finite_is_marked(server: RunsServer, open_page: OpenPage) -> None:
    page = open_page(server, comparison("base", "failed"))

    expect(page.locator("#charts .track").first.locator(".legend output").nth(1)).to_have_text("not finite")
    assert ink(page, 0, "--nonfinite") > 20


def test_axis_smoothing_scale_and_series_are_in_the_address(server: RunsServer, open_page: OpenPage) -> None:
    page = open_page(server, comparison("base", "tuned"))
    page.get_by_role("button", name="tokens", exact=True).click()
    page.get_by_label("Smoothing").fill("0.9")
    page.get_by_label("Add the chart of a series").fill("h.1.mlp")
    page.get_by_role("button", name="h.1.mlp.weight · rms · grad_reduced").click()
    expect(page.locator("#charts .track h2").last).to_have_text("h.1.mlp.weight")
    page.get_by_role("group", name="Loss scale").get_by_role("button", name="log").click()
    expect(page).to_have_url(re.compile("log=loss"))

    again = open_page(server, page.url.removeprefix(server.url))

    expect(again.get_by_role("button", name="tokens", exact=True)).to_have_attribute("aria-pressed", "true")
    expect(again.locator("#smoothing-text")).to_have_text("0.90")
    expect(again.locator("#charts .track h2").last).to_have_text("h.1.mlp.weight")
    group = again.get_by_role("group", name="Loss scale")
    expect(group.get_by_role("button", name="log")).to_have_attribute("aria-pressed", "true")


@pytest.mark.parametrize("smoothing", [0.5, 0.9])
def test_smoothing_is_a_corrected_average_without_what_is_not_finite(
    server: RunsServer, open_page: OpenPage, smoothing: float
) -> None:
    values: list[Any] = [3.0, 1.0, None, 2.0, "Infinity", 5.0]
    page = open_page(server)
    script = """async ([values, smoothing]) => {
        const { smoothed } = await import("/static/runs/overlay.js");
        return smoothed(values.map((value) => (value === null ? null : Number(value))), smoothing).map(String);
    }"""
    found = page.evaluate(script, [values, smoothing])

    weights = smoothing ** np.arange(4)[::-1]
    recorded = np.array([3.0, 1.0, 2.0, 5.0])
    averages = [float((weights[3 - k :] * recorded[: k + 1]).sum() / weights[3 - k :].sum()) for k in range(4)]
    assert found[2] == "null"
    assert found[4] == "Infinity"
    assert [float(found[place]) for place in (0, 1, 3, 5)] == pytest.approx(averages)


def test_list_fits_a_phone(server: RunsServer, open_page: OpenPage) -> None:
    for fragment in ("", comparison("base", "tuned")):
        page = open_page(server, fragment, viewport={"width": 390, "height": 840})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
