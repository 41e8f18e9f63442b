"""How soon the web page is ready, and what it costs: 200 layers x 2 000 steps in headless Chromium.

    python -m benchmarks.bench_page [--loads 15] [--layers 200] [--steps 2000]

The agent's own web application serves a made-up run from a process of its own. Each load is a new browser context, so
nothing is cached. "Ready" counts from the start of the navigation to the frame after everything was drawn; CPU time is
that of the page's main thread up to then, which a busy machine does not stretch.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from playwright.sync_api import Browser, sync_playwright

from tests.dashboards.conftest import CHROMIUM_FLAGS
from tests.dashboards.fake_agent import serving
from tests.dashboards.fake_run import Run
from tests.server_programs import find_program

ROWS_BESIDE_BLOCKS, ROWS_PER_BLOCK = 4, 4
# The work for one refresh of the layers, apart from the drawing of labels: values to codes, codes to pixels.
HEAT_MAP = """async ([rows, columns]) => {
    const { encode, onsets, rasterise } = await import("/static/heat/raster.js");
    const { getGrid } = await import("/static/api.js");
    const grid = await getGrid(`api/heatmap?kind=grad_reduced&statistic=rms&columns=${columns}`);
    const image = new ImageData(1036, 245);
    const begin = performance.now();
    const encoded = encode(grid, "log");
    onsets(encoded, rows, columns);
    const pixels = { table: new Uint32Array(256), none: 0, nonfinite: 1, nonfinite2: 2 };
    rasterise(image, encoded, { rows, columns, from: 0, to: columns, ...pixels });
    return performance.now() - begin;
}"""
UNITS = {"ready": "ms", "main thread CPU": "ms", "heat map": "ms", "heap": "MB", "transferred": "MB", "requests": ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, default=15)
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    blocks = math.ceil((options.layers - ROWS_BESIDE_BLOCKS) / ROWS_PER_BLOCK)
    rows = ROWS_BESIDE_BLOCKS + ROWS_PER_BLOCK * blocks
    with _agent(blocks, options.steps) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_program("chromium"), args=list(CHROMIUM_FLAGS))
        _load(browser, url, [rows, options.steps])  # the first one also starts the browser's own processes
        loads = [_load(browser, url, [rows, options.steps]) for _ in range(options.loads)]
        browser.close()
    print(f"{rows} layers x {options.steps} steps, {options.loads} loads: median (least to most)")
    for name, unit in UNITS.items():
        values = [load[name] for load in loads]
        print(f"{name:16} {statistics.median(values):7.1f} ({min(values):.1f} to {max(values):.1f}) {unit}")


@contextmanager
def _agent(blocks: int, steps: int) -> Iterator[str]:
    """Serve a run from another process: in this one, the agent would wait for the test driver's interpreter lock."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, blocks, steps))
    process.start()
    yield ours.recv()
    ours.send("end")
    process.join()


def _serve(pipe: Connection, blocks: int, steps: int) -> None:
    with serving(Run(num_steps=steps, num_blocks=blocks, world_size=16)) as agent:
        pipe.send(agent.url)
        pipe.recv()


def _load(browser: Browser, url: str, shape: list[int]) -> dict[str, float]:
    page = browser.new_page(viewport={"width": 1320, "height": 1060})
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(url)
    ready = page.locator("html[data-ready]")
    ready.wait_for()
    metrics = {entry["name"]: entry["value"] for entry in session.send("Performance.getMetrics")["metrics"]}
    sizes = page.evaluate(
        "() => performance.getEntries().map((entry) => entry.transferSize).filter((size) => size >= 0)"
    )
    result = {
        "ready": float(ready.get_attribute("data-ready") or "nan"),
        "main thread CPU": 1e3 * metrics["TaskDuration"],
        "heat map": page.evaluate(HEAT_MAP, shape),
        "heap": metrics["JSHeapUsedSize"] / 1e6,
        "transferred": sum(sizes) / 1e6,
        "requests": float(len(sizes)),
    }
    page.close()
    return result


if __name__ == "__main__":
    main()
