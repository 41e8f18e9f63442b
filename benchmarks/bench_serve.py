"""What the list of `trainermon serve` costs: 300 runs, read from disk, and opened in headless Chromium.

    python -m benchmarks.bench_serve [--runs 300] [--loads 5]

"First look" reads every run; "next look" finds that nothing has changed. CPU time is that of this process, or of the
page's main thread, which a busy machine does not stretch. "Ready" is the frame after the whole list was drawn.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from tests.dashboards.conftest import CHROMIUM_FLAGS
from tests.dashboards.runs_server import serving_runs
from tests.dashboards.stored_runs import StoredCurves, store_run
from tests.server_programs import find_program
from trainermon.agent.runs.run_list import RunList

NUM_DIFFERENT = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--loads", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _make_runs(Path(folder), options.runs)
        looks = [_looks(Path(folder)) for _ in range(options.loads)]
        loads = _loads(Path(folder), options.loads)
    print(f"{options.runs} runs, {options.loads} times: median (least to most)")
    for place, what in enumerate(("first look, CPU ms", "next look, CPU ms")):
        _say(what, [look[place] for look in looks])
    for what in loads[0]:
        _say(what, [load[what] for load in loads])


def _make_runs(folder: Path, count: int) -> None:
    """Write runs of 50 steps, two ranks and two segments; only ten of them differ."""
    for number in range(count):
        run = folder / f"run-{number:03d}"
        if number >= NUM_DIFFERENT:
            shutil.copytree(folder / f"run-{number % NUM_DIFFERENT:03d}", run)
            continue
        curves = StoredCurves.made(50, seed=number, started_s=1.79e9 - 3600 * number)
        store_run(run, curves, segments=2, tags=("sweep",))


def _looks(folder: Path) -> tuple[float, float]:
    runs = RunList([folder])
    return _cpu_ms(runs.scan), _cpu_ms(runs.scan)


def _cpu_ms(work: Callable[[], None]) -> float:
    begin = time.process_time()
    work()
    return (time.process_time() - begin) * 1000


def _loads(folder: Path, count: int) -> list[dict[str, float]]:
    with serving_runs(folder) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_program("chromium"), args=list(CHROMIUM_FLAGS))
        _load(browser, server.url)  # the first one also starts the browser's own processes, and reads the runs
        loads = [_load(browser, server.url) for _ in range(count)]
        browser.close()
    return loads


def _load(browser: Browser, url: str) -> dict[str, float]:
    page = browser.new_page()
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})  # CPU time
    page.goto(url)
    page.locator("html[data-ready]").wait_for(timeout=600_000)
    told = {metric["name"]: metric["value"] for metric in session.send("Performance.getMetrics")["metrics"]}
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    ready = float(page.locator("html").get_attribute("data-ready") or "nan")
    page.close()
    return {
        "page, main thread CPU ms": 1000 * told["TaskDuration"],
        "page, first paint ms": paint,
        "page, ready ms": ready,
    }


def _say(what: str, values: list[float]) -> None:
    print(f"{what:26} {statistics.median(values):8.1f} ({min(values):.1f} to {max(values):.1f})")


if __name__ == "__main__":
    main()
