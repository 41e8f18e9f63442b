"""What the page of a graph costs its reader: opening it, and how long each action takes to the next drawn frame.

`python -m benchmarks.bench_graph_page [--calls 80000] [--ranks 64]`, with the Chromium of the tests; `graph_dumps`
makes the dump. Further ranks are made of its page: the same calls, verdicts and measures of their own.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import re
import statistics
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
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
    "another rank": [".", ","],
    "another micro step": ["]", "["],
}
WRONG = 4
"""In how many of the ranks something began, each at a place of its own, of which all that follows is a warning."""


def main() -> None:
    """Write a page, open it, and print the median and the worst of each action in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=80_000, help="calls of the dump")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of the page")
    args = parser.parse_args()
    calls = args.calls
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        dump, page_file = Path(folder) / "dump", Path(folder) / "page.html"
        repeat_step(record_step(Path(folder) / "step"), dump, calls)
        trainermon(["graph", str(dump), "-o", str(page_file), "--details", "found"])
        if args.ranks > 1:
            page_file.write_text(with_ranks(page_file.read_text(), args.ranks))
        chromium = playwright.chromium.launch(executable_path=find_program("chromium"), args=list(CHROMIUM_FLAGS))
        page = chromium.new_page(viewport={"width": 1500, "height": 950})
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")
        page.goto(f"file://{page_file}")
        page.wait_for_selector("body[data-ready]")
        print(f"{page.text_content('#facts')}; file {page_file.stat().st_size / 1e6:.2f} MB")
        print(f"opening: {_metric(session, 'TaskDuration') * 1000:.0f} ms of the main thread")
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        for name, keys in ACTIONS.items():
            _report(name, [page.evaluate(_ACTION, key) for _ in range(REPEATS) for key in keys])
        _report("search, per key", [page.evaluate(_SEARCH, "linear"[:length]) for length in range(1, 7)])
        session.send("HeapProfiler.collectGarbage")
        print(f"heap: {_metric(session, 'JSHeapUsedSize') / 1e6:.0f} MB")
        chromium.close()


def with_ranks(page: str, ranks: int) -> str:
    """Return a page with so many ranks instead of its one: every fourth of them has verdicts of its own."""
    found = re.search('(?<=id="data">)[^<]*', page)
    assert found
    packed = gzip.decompress(base64.b64decode(found[0]))
    length = struct.unpack_from("<I", packed)[0]
    head = json.loads(packed[4 : 4 + length])
    body = bytearray(packed[4 + length + (-(4 + length) % 8) :])
    [first] = head["members"]
    rng = np.random.default_rng(0)
    head["members"] = [
        {**first, "label": f"step0 rank{rank}", "rank": rank, "axes": f"dp {rank}", **_verdicts(first, body, rank, rng)}
        for rank in range(ranks)
    ]
    text = json.dumps(head).encode()
    packed = struct.pack("<I", len(text)) + text + bytes(-(4 + len(text)) % 8) + bytes(body)
    return page[: found.start()] + base64.b64encode(gzip.compress(packed)).decode() + page[found.end() :]


def _verdicts(first: dict[str, Any], body: bytearray, rank: int, rng: np.random.Generator) -> dict[str, Any]:
    columns = first["columns"]
    count = columns["verdicts"]["count"]
    verdicts = np.ones(count, np.uint8)
    findings = []
    if rank % max(1, 64 // WRONG) == 1:
        at = int(rng.integers(count // 2, count))
        verdicts[at:] = np.where(rng.random(count - at) < 0.5, 3, 1)
        verdicts[at] = 5
        findings = [{"node": at, "message": "its results differ"}]
    own = {"verdicts": verdicts, "errors": rng.lognormal(-16, 2, count).astype(np.float32)}
    placed = {}
    for name, column in own.items():
        placed[name] = {**columns[name], "offset": len(body)}
        body += column.tobytes() + bytes(-column.nbytes % 8)
    return {"findings": findings, "columns": {**columns, **placed}}


def _metric(session: CDPSession, name: str) -> float:
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float(next(one["value"] for one in metrics if one["name"] == name))


def _report(name: str, times_ms: list[float]) -> None:
    print(f"{name}: median {statistics.median(times_ms):.0f} ms, worst {max(times_ms):.0f} ms")


if __name__ == "__main__":
    main()
