"""The distribution of a picked row on the page: where histograms were taken, with the counts that numpy makes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page, Position, expect

from tests.dashboards.charts import LEFT, RIGHT
from tests.dashboards.conftest import OpenPage, Serve
from tests.dashboards.fake_run import Run
from tests.exporters.recorded_run import BAD_STEP, GRADIENTS, counted_run, tensors_of
from tests.statistics.histogram_truth import numpy_histogram
from trainermon.core.values import BIN_BOUNDS

pytestmark = pytest.mark.server

NUM_STEPS = 12
LEGEND = 22  # height of what stands below the chart, in CSS pixels
ROW = GRADIENTS[1]


def stored_run(folder: Path, *, interval: int = 1, num_steps: int = NUM_STEPS) -> Run:
    counted_run(folder, range(interval, num_steps + 1, interval))
    run = Run(num_steps=num_steps, num_blocks=1, world_size=2)
    run.rows = [key.label for key in GRADIENTS]
    run.heat = run.heat[: len(run.rows)]
    run.stored = folder
    return run


def truth(step: int) -> list[int]:
    counts = sum(numpy_histogram(tensors_of(rank, step)[ROW].ravel()) for rank in (0, 1))
    return list(map(int, np.asarray(counts)))


def told_under(page: Page, *, step: int, height: float) -> list[str]:
    """Return the lines of the tooltip at a step and at a share of the chart's height, from below."""
    plot = page.locator(".track", has_text="Distribution").locator(".plot")
    size = plot.bounding_box()
    assert size is not None
    x = LEFT + (step - 0.5) / NUM_STEPS * (size["width"] - LEFT - RIGHT)
    plot.hover(position=Position(x=x, y=(size["height"] - LEGEND) * (1 - height) - 1))
    expect(page.locator(".tip-head")).to_have_text(f"step {step}")
    return page.locator(".tip > div").all_inner_texts()


def number(text: str) -> float:
    return float(text.replace("\N{MINUS SIGN}", "-").replace(",", ""))


@pytest.mark.parametrize("width", [1320, 390])
def test_the_chart_tells_what_is_in_each_bin(serve: Serve, open_page: OpenPage, tmp_path: Path, width: int) -> None:
    page = open_page(
        serve(stored_run(tmp_path)), f"#?row=grad_reduced:{ROW.label}", viewport={"width": width, "height": 900}
    )

    chart = page.locator(".track", has_text="Distribution")
    expect(chart.locator(".hint").first).to_contain_text(f"{ROW.label}, gradients, reduced")
    expect(chart.locator(".hint").first).to_contain_text("12 histograms")
    expect(chart.locator(".readout")).to_have_text(f"bars: step {NUM_STEPS}, 0 % zero")
    if width < 1100:
        return
    seen = {}
    for height in np.arange(0.005, 0.965, 0.008):  # each line of the chart is higher than that
        _, text, *_ = told_under(page, step=5, height=float(height))
        bounds, _, counted = text.rpartition(": ")
        seen[bounds] = counted
    expect(chart.locator(".readout")).to_have_text("bars: step 5, 0 % zero")
    expected = truth(5)
    for bounds, counted in seen.items():
        low, high = (0.0, 0.0) if bounds == "zero" else map(number, bounds.split(" to "))
        bin = int(np.argmin([abs(low - b) + abs(high - c) for b, c in BIN_BOUNDS[1:126]])) + 1
        assert counted.split(" elements")[0] == f"{expected[bin]} of 60", bounds
    assert sum(int(counted.split(" ")[0]) for counted in seen.values()) == 60
    assert told_under(page, step=BAD_STEP, height=0.5)[2] == "2 not finite"


@pytest.mark.parametrize("most", [1000, 150, 50])
def test_no_step_between_two_histograms_is_left_white(
    serve: Serve, open_page: OpenPage, tmp_path: Path, most: int
) -> None:
    agent = serve(stored_run(tmp_path, interval=7, num_steps=7 * 60))
    page = open_page(agent, "#")
    page.route(re.compile("/api/histograms"), lambda route: route.continue_(url=limited(route.request.url, most)))
    page.evaluate(f"location.hash = '#?row=grad_reduced:{ROW.label}'")
    page.reload()

    chart = page.locator(".track", has_text="Distribution")
    told = "60 histograms" if most >= 60 else "in 50 columns, neighbours together"
    expect(chart.locator(".hint").first).to_contain_text(told)
    white = chart.locator(".plot canvas").first.evaluate(
        """(canvas, [left, right, low]) => {
            const scale = canvas.width / canvas.clientWidth;
            const [from, to] = [left * scale, canvas.width - right * scale];
            const context = canvas.getContext("2d");
            const height = canvas.height - low * scale;
            const ground = context.getImageData(from + 1, 1, 1, 1).data.join();
            const isWhite = (at) => {
                const { data } = context.getImageData(from + at, 0, 1, height);
                const pixels = Array.from({ length: height }, (_, y) => data.slice(4 * y, 4 * y + 4).join());
                return pixels.every((one) => one === ground);
            };
            return Array.from({ length: to - from }, (_, at) => at).filter(isWhite).map((at) => at / (to - from));
        }""",
        [LEFT, RIGHT, LEGEND],
    )
    assert [share for share in white if share > 7 / 420] == []


def limited(url: str, most: int) -> str:
    return re.sub(r"points=(\d+)", lambda found: f"points={min(int(found[1]), most)}", url)


def test_the_first_histograms_are_asked_for_as_many_as_the_chart_has_room_for(
    serve: Serve, open_page: OpenPage, tmp_path: Path
) -> None:
    asked: list[str] = []
    page = open_page(serve(stored_run(tmp_path)), "#")
    page.on("request", lambda request: asked.append(request.url))
    page.evaluate(f"location.hash = '#?row=grad_reduced:{ROW.label}'")
    page.reload()
    expect(page.locator(".track", has_text="Distribution")).to_be_visible()

    (points,) = {int(found[1]) for url in asked if (found := re.search(r"/histograms\?.*points=(\d+)", url))}
    size = page.locator(".track", has_text="Distribution").locator(".plot").bounding_box()
    assert size is not None
    assert points >= (size["width"] - LEFT - RIGHT) / 2


def test_its_table_has_the_counts_of_the_store(serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page(serve(stored_run(tmp_path)), f"#?row=grad_reduced:{ROW.label}")

    with page.expect_download() as download:
        page.locator(".track", has_text="Distribution").get_by_role("link", name="csv").click()

    table = np.genfromtxt(download.value.path(), delimiter=",", names=True)
    for step in range(1, NUM_STEPS + 1):
        assert table["count"][table["step"] == step].sum() == 60
        np.testing.assert_array_equal(table["count"][table["step"] == step], [count for count in truth(step) if count])


def test_of_several_rows_one_is_chosen_and_a_run_without_histograms_has_no_such_chart(
    serve: Serve, open_page: OpenPage, tmp_path: Path
) -> None:
    rows = "&".join(f"row=grad_reduced:{key.label}" for key in GRADIENTS[:2])
    page = open_page(serve(stored_run(tmp_path)), f"#?{rows}")
    chart = page.locator(".track", has_text="Distribution")

    expect(chart.locator(".hint").first).to_contain_text(GRADIENTS[1].label)
    page.get_by_label("Distribution of", exact=True).select_option("0")
    expect(chart.locator(".hint").first).to_contain_text(GRADIENTS[0].label)
    page.get_by_role("button", name=f"Take {GRADIENTS[0].label} out").click()
    expect(chart.locator(".hint").first).to_contain_text(GRADIENTS[1].label)
    page.get_by_role("button", name=f"Take {GRADIENTS[1].label} out").click()
    expect(chart).to_have_count(0)

    run = Run(num_steps=NUM_STEPS, num_blocks=1)
    plain = open_page(serve(run), f"#?row=grad_reduced:{run.rows[0]}")
    expect(plain.locator(".chip code")).to_have_text(run.rows[0])
    expect(plain.locator(".track", has_text="Distribution")).to_have_count(0)
