"""Where things are on the page, in CSS pixels, and what is there."""

from __future__ import annotations

from playwright.sync_api import Locator, Page, Position

from tests.dashboards.fake_run import Run

LAYERS, RANKS = 3, 5  # place of the heat maps among the charts: ruler, loss, norm, layers, picked rows (hidden), ranks
LEFT, RIGHT = 168, 84  # gutters of a chart on a wide window, in CSS pixels
AXIS = 20  # height of the step numbers below a heat map


def small_run() -> Run:
    return Run(num_steps=200, num_blocks=4, world_size=4)


def chart(page: Page, place: int) -> Locator:
    return page.locator(".plot").nth(place)


def cell_centre(page: Page, place: int, *, row: float, step: float, rows: int, steps: int) -> dict[str, float]:
    """Where a cell is in its chart, in CSS pixels, while all steps are shown."""
    size = chart(page, place).bounding_box()
    assert size is not None
    width, height = size["width"] - LEFT - RIGHT, size["height"] - AXIS
    return {"x": LEFT + (step - 1 + 0.5) / steps * width, "y": (row + 0.5) / rows * height}


def pixel(page: Page, place: int, at: dict[str, float]) -> list[int]:
    script = (
        "(c, at) => [...c.getContext('2d').getImageData(Math.floor(at.x), Math.floor(at.y), 1, 1).data].slice(0, 3)"
    )
    return list(chart(page, place).locator("canvas").first.evaluate(script, at))


def hover(page: Page, place: int, at: dict[str, float]) -> None:
    chart(page, place).hover(position=Position(x=at["x"], y=at["y"]))


def shown_step(page: Page) -> int:
    return int(page.locator("#figure-step .number").inner_text().replace(",", ""))
