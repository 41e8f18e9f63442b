"""What the page of a graph costs its reader: opening it, and each action up to the next drawn frame.

Times are processor time of the browser's main thread, so other work on the machine does not count.

`python -m benchmarks.bench_graph_page [--calls 100000] [--ranks 1 8 64]`, with the Chromium of the tests; `graph_dumps`
makes the dump. Further ranks are made of it: the same calls, with verdicts, errors and norms of their own.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from playwright.sync_api import Browser, CDPSession, Page, sync_playwright

from benchmarks.graph_dumps import record_step, repeat_step
from tests.dashboards.conftest import CHROMIUM_FLAGS
from tests.server_programs import find_program
from trainermon.analysis.graph.page.details import details_alone
from trainermon.analysis.graph.page.output import FOUND, DrawnGraphs, draw_rank, open_server, write_page
from trainermon.analysis.graph.page.packing import PackedRank, pack_columns, strip_of
from trainermon.analysis.graph.reading import DumpGraph, read_graphs

REPEATS = 7
_ACTION = """async (key) => {
    document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
}"""
_SEARCH = """async (text) => {
    const search = document.getElementById("search");
    search.value = text;
    search.dispatchEvent(new Event("input"));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
}"""
_HEAP = ("usedSize", "embedderHeapUsedSize", "backingStorageSize")
ACTIONS = {
    "unfold, fold": ["Enter", "Enter"],
    "select beside": ["ArrowDown", "ArrowUp"],
    "colour": ["3", "1"],
    "pan": ["s", "w"],
    "another rank": [".", ","],
    "another micro step": ["]", "["],
}
WRONG = 4
"""In how many of the ranks something began, each at a place of its own, of which all that follows is a warning."""


def main() -> None:
    """Open pages of so many ranks, from a file and from a server, and print what opening and each action cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000, help="calls of the dump")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64], help="ranks of the pages")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        dump = Path(folder) / "dump"
        repeat_step(record_step(Path(folder) / "step"), dump, args.calls)
        [graph] = read_graphs(dump, None)
        packed = draw_rank(graph, FOUND, 2, served=False)
        chromium = playwright.chromium.launch(executable_path=find_program("chromium"), args=list(CHROMIUM_FLAGS))
        for count in args.ranks:
            ranks = [_rank(packed, rank, count) for rank in range(count)]
            first = next((place for place, one in enumerate(ranks) if one.member["findings"]), 0)
            graphs = DrawnGraphs("", ranks, (), first)
            page_file = Path(folder) / "page.html"
            write_page(graphs, page_file)
            print(f"\n{count} ranks of {packed.num_nodes:,} nodes; file {page_file.stat().st_size / 1e6:.2f} MB")
            with _opened(chromium, f"file://{page_file}") as (page, session):
                _act(page, session)
            with _serving(graphs, graph) as address, _opened(chromium, address, "served, ") as (page, _):
                sizes = page.evaluate("performance.getEntriesByType('resource').map((one) => one.encodedBodySize)")
                print(f"served, pieces asked for: {len(sizes)}, {sum(sizes) / 1e6:.2f} MB")
        chromium.close()


def _rank(packed: PackedRank, rank: int, count: int) -> PackedRank:
    rng = np.random.default_rng(rank)
    verdicts = np.ones(packed.num_nodes, np.uint8)
    findings = []
    if rank % max(1, count // WRONG) == min(1, count - 1):
        at = int(rng.integers(len(verdicts) // 2, len(verdicts)))
        verdicts[at:] = np.where(rng.random(len(verdicts) - at) < 0.5, 3, 1)
        verdicts[at] = 5
        findings = [{"node": at, "message": "its results differ"}]
    errors, norms = (rng.lognormal(mean, 2, len(verdicts)).astype(np.float32) for mean in (-16, 0))
    own = {"label": f"step0 rank{rank}", "step": 0, "rank": rank, "axes": f"dp {rank}", "findings": findings}
    judged = {"worst_verdict": int(verdicts.max()), "worst_error": float(errors.max()), "strip": strip_of(verdicts)}
    return packed._replace(
        member={**packed.member, **own, **judged},
        verdicts={**packed.verdicts, **pack_columns({"verdicts": verdicts})},
        columns={**packed.columns, **pack_columns({"errors": errors, "norms": norms})},
    )


@contextmanager
def _opened(chromium: Browser, address: str, how: str = "") -> Iterator[tuple[Page, CDPSession]]:
    """Open a page and print what that cost until it is ready, and until it knows how all ranks are judged."""
    page = chromium.new_page(viewport={"width": 1500, "height": 950})
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(address, wait_until="commit")
    page.wait_for_selector("body[data-ready]", timeout=120_000)
    ready = _metric(session, "TaskDuration")
    page.wait_for_selector("body[data-complete]", timeout=120_000)
    page.wait_for_load_state("load")
    everything = _metric(session, "TaskDuration")
    print(f"{how}opening: {ready * 1000:.0f} ms of the main thread, with all other ranks {everything * 1000:.0f} ms")
    yield page, session
    session.send("HeapProfiler.collectGarbage")
    used = session.send("Runtime.getHeapUsage")
    print(f"{how}heap: {sum(used.get(part, 0) for part in _HEAP) / 1e6:.0f} MB")
    page.close()


@contextmanager
def _serving(graphs: DrawnGraphs, graph: DumpGraph) -> Iterator[str]:
    details = details_alone(graph.tree, graph.directory)
    server = open_server(graphs, lambda _: details, "", in_browser=False)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.url
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _act(page: Page, session: CDPSession) -> None:
    def cost_ms(script: str, argument: str) -> float:
        before = _metric(session, "TaskDuration")
        page.evaluate(script, argument)
        return (_metric(session, "TaskDuration") - before) * 1000

    page.keyboard.press("0")
    page.locator("#levels .crumb").first.click()
    for _ in range(2):
        page.keyboard.press("ArrowRight")  # the forward of the first micro step
    for name, keys in ACTIONS.items():
        _report(name, [cost_ms(_ACTION, key) for _ in range(REPEATS) for key in keys])
    _report("search, per key", [cost_ms(_SEARCH, "linear"[:length]) for length in range(1, 7)])


def _metric(session: CDPSession, name: str) -> float:
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float(next(one["value"] for one in metrics if one["name"] == name))


def _report(name: str, times_ms: Sequence[float]) -> None:
    print(f"{name}: median {statistics.median(times_ms):.0f} ms, worst {max(times_ms):.0f} ms")


if __name__ == "__main__":
    main()
