"""What the page of a job with 10,240 ranks costs in headless Chromium: to open, to keep up to date, to use.

    python -m benchmarks.bench_job_page                 # 1,280 simulated agents of 8 ranks behind a real controller
    python -m benchmarks.bench_job_page --agents 128

Times are CPU time of the page's main thread, which other work on the machine does not stretch; of an interaction from
the input until the frame after it is drawn. The last figure is what the controller spends on one answer to the page.
"""

from __future__ import annotations

import argparse
import gzip
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Browser, CDPSession, Page, sync_playwright

from benchmarks.bench_controller import cpu_s, simulated_agents, started_controller
from tests.dashboards.conftest import CHROMIUM_FLAGS
from tests.server_programs import find_program

PERIOD_S = 2.0
"""So often the page asks."""
NEXT_FRAME = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1280)
    parser.add_argument("--ranks", type=int, default=8, help="of each agent")
    parser.add_argument("--loads", type=int, default=5)
    parser.add_argument("--picture", type=Path, help="write a picture of the page there")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as name,
        simulated_agents(Path(name), options.agents, options.ranks, troubled=True) as (_, addresses),
        started_controller(Path(name), addresses) as (_, url),
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=find_program("chromium"), args=list(CHROMIUM_FLAGS))
        _load(browser, url)  # the first one also starts the browser's own processes
        loads = [_load(browser, url) for _ in range(options.loads)]
        if options.picture:
            _picture(browser, url, options.picture)
        browser.close()
        quiet = Path(name) / "quiet"
        quiet.mkdir()
        with started_controller(quiet, addresses, poll_s=1000.0) as (pid, url):
            costs_ms, size = _answer(pid, url)
    print(f"{options.agents} agents of {options.ranks} ranks, {options.loads} loads: median (least to most)")
    for what in loads[0]:
        values = [load[what] for load in loads]
        print(f"{what:34} {statistics.median(values):7.1f} ({min(values):.1f} to {max(values):.1f}) ms")
    print(f"controller, CPU of one answer      {costs_ms:7.1f} ms, {size / 1e3:.0f} kB in gzip")
    return 0


def _load(browser: Browser, url: str) -> dict[str, float]:
    page = browser.new_page(viewport={"width": 1320, "height": 1060})
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(url)
    page.locator("#nodes tbody tr").first.wait_for()
    page.evaluate(NEXT_FRAME)
    found = {"open": _busy_ms(session)}
    found["keep up to date, per second"] = _idle_ms(page, session)
    search = page.get_by_role("searchbox", name="Node or rank")
    interactions: dict[str, Callable[[], object]] = {
        "all ranks": page.get_by_role("button", name="all", exact=True).click,
        "next page of ranks": page.get_by_role("button", name="Next ranks").click,
        "next page of nodes": page.get_by_role("button", name="Next nodes").click,
        "search, a key": lambda: search.press("7"),
        "search, another key": lambda: search.press("1"),
        "over the map": lambda: page.locator("#map canvas").hover(position={"x": 100, "y": 50}),
        "click in the map": lambda: page.locator("#map canvas").click(position={"x": 300, "y": 20}),
    }
    for name, act in interactions.items():
        found[name] = _interaction_ms(page, session, act)
    page.close()
    return found


def _busy_ms(session: CDPSession) -> float:
    metrics = {entry["name"]: entry["value"] for entry in session.send("Performance.getMetrics")["metrics"]}
    return 1e3 * float(metrics["TaskDuration"])


def _idle_ms(page: Page, session: CDPSession) -> float:
    before_ms, began_s = _busy_ms(session), time.monotonic()
    page.wait_for_timeout(3e3 * PERIOD_S)
    return (_busy_ms(session) - before_ms) / (time.monotonic() - began_s)


def _interaction_ms(page: Page, session: CDPSession, act: Callable[[], object]) -> float:
    """Return what an interaction takes; the least of a few, since an answer of the controller may come between."""
    costs = []
    for _ in range(3):
        before_ms = _busy_ms(session)
        act()
        page.evaluate(NEXT_FRAME)
        costs.append(_busy_ms(session) - before_ms)
    return min(costs)


def _picture(browser: Browser, url: str, path: Path) -> None:
    for suffix, width, scheme in (("", 1320, "light"), ("-dark", 1320, "dark"), ("-390", 390, "light")):
        page = browser.new_page(viewport={"width": width, "height": 1300}, color_scheme=scheme)  # type: ignore[arg-type]
        page.goto(url)
        page.locator("#nodes tbody tr").first.wait_for()
        page.screenshot(path=path.with_stem(path.stem + suffix))
        page.close()


def _answer(pid: int, url: str) -> tuple[float, int]:
    """Return the CPU time of one answer to the page, in milliseconds, and its size."""
    request = urllib.request.Request(f"{url}api/v1/job", headers={"Accept-Encoding": "gzip"})
    number, before_s = 20, cpu_s(pid)
    for _ in range(number):
        with urllib.request.urlopen(request, timeout=30) as answer:
            content = answer.read()
    assert gzip.decompress(content).startswith(b"{")
    return 1e3 * (cpu_s(pid) - before_s) / number, len(content)


if __name__ == "__main__":
    sys.exit(main())
