"""What the page of a graph costs its reader: opening it, and how long each action takes to the next drawn frame.

`python -m benchmarks.bench_graph_page [--calls 80000]`, with the Chromium of the tests; `graph_dumps` makes the dump.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from playwright.sync_api import CDPSession, sync_playwright

from benchmarks.graph_dumps import record_step, repeat_step
from tests.dashboards.conftest import CHROMIUM_FLAGS
from tests.server_programs import find_program
from trainermon.cli import main as trainermon

REPEATS = 7
_ACTION = """async (key) => {
    const begin = performance.now();
    document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
    return performance.now() - begin;
}"""
_SEARCH = """async (text) => {
    const search = document.getElementById("search");
    const begin = performance.now();
    search.value = text;
    search.dispatchEvent(new Event("input"));
    return performance.now() - begin;
}"""
ACTIONS = {
    "unfold, fold": ["Enter", "Enter"],
    "select beside": ["ArrowDown", "ArrowUp"],
    "colour": ["3", "1"],
    "pan": ["s", "w"],
}


def main() -> None:
    """Write a page, open it, and print the median and the worst of each action in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=80_000, help="calls of the dump")
    calls = parser.parse_args().calls
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        dump, page_file = Path(folder) / "dump", Path(folder) / "page.html"
        repeat_step(record_step(Path(folder) / "step"), dump, calls)
        trainermon(["graph", str(dump), "-o", str(page_file), "--details", "found"])
        chromium = playwright.chromium.launch(executable_path=find_program("chromium"), args=list(CHROMIUM_FLAGS))
        page = chromium.new_page(viewport={"width": 1500, "height": 950})
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")
        page.goto(f"file://{page_file}")
        page.wait_for_selector("body[data-ready]")
        print(f"{page.text_content('#facts')}; file {page_file.stat().st_size / 1e6:.2f} MB")
        print(f"opening: {_task_ms(session):.0f} ms of the main thread")
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        for name, keys in ACTIONS.items():
            _report(name, [page.evaluate(_ACTION, key) for _ in range(REPEATS) for key in keys])
        _report("search, per key", [page.evaluate(_SEARCH, "linear"[:length]) for length in range(1, 7)])
        chromium.close()


def _task_ms(session: CDPSession) -> float:
    metrics = session.send("Performance.getMetrics")["metrics"]
    return 1000 * float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))


def _report(name: str, times_ms: list[float]) -> None:
    print(f"{name}: median {statistics.median(times_ms):.0f} ms, worst {max(times_ms):.0f} ms")


if __name__ == "__main__":
    main()
