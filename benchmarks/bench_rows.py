"""Rows as lines on the page: what a key of the search costs, what drawing a long row costs, and reading it.

    python -m benchmarks.bench_rows [--rows 20000] [--steps 100000]

Searching and drawing are timed in the page's main thread (script and layout, without the compositor) in headless
Chromium; reading is CPU time of this process, from segments as an agent writes them, with one more series in them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, sync_playwright

from tests.dashboards.conftest import CHROMIUM_FLAGS
from tests.dashboards.fake_agent import serving
from tests.dashboards.fake_run import Run
from tests.exporters.runs import block_of, header_of
from tests.server_programs import find_program
from trainermon.core.values import Kind, SeriesKey
from trainermon.exporters.store.curves import CurveQuery, encode_curve, read_curve
from trainermon.exporters.store.store import SegmentWriter

ROUNDS = 9
KEYS = "layers.1234 mlp"
SEARCH = """async ([count, text]) => {
    const { RowSearch } = await import("/static/curves/search.js");
    const search = new RowSearch({ onPick: () => {} });
    document.body.append(search.root);
    const parts = ["attn.q_proj", "attn.o_proj", "mlp.up_proj", "mlp.down_proj"];
    search.offer(Array.from({ length: count }, (_, k) => `model.layers.${k >> 2}.${parts[k & 3]}.weight`));
    const times = [];
    for (let end = 1; end <= text.length; end++) {
        search.input.value = text.slice(0, end);
        const begin = performance.now();
        search.input.dispatchEvent(new Event("input"));
        search.list.getBoundingClientRect();
        times.push(performance.now() - begin);
    }
    for (let k = 0; k < 20; k++) {
        const begin = performance.now();
        search.input.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowDown", cancelable: true }));
        search.list.getBoundingClientRect();
        times.push(performance.now() - begin);
    }
    search.root.remove();
    return times;
}"""
DRAW = """async ([size, steps]) => {
    const { CurveChart } = await import("/static/curves/chart.js");
    const { StepView } = await import("/static/view.js");
    const view = new StepView();
    view.extend(0, steps);
    const chart = new CurveChart({ parent: document.body, view, title: "", height: 220, label: "" });
    const stride = steps / size;
    const wave = Float64Array.from({ length: size }, (_, k) => 1 + 0.5 * Math.sin(k / 9) + ((k * 7919) % 101) / 500);
    const line = { rank: null, name: "row", colour: 0, stride, numLines: 1, steps: wave.map((_, k) => k * stride),
        low: wave, high: wave.map((value) => value * 1.1), mean: wave, nonfinite: new Float64Array(size) };
    chart.lines = [line];
    const context = chart.base.getContext("2d");
    const begin = performance.now();
    chart.paint(context, chart.box);
    context.getImageData(0, 0, 1, 1);
    const took = performance.now() - begin;
    chart.root.remove();
    return took;
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=100_000)
    options = parser.parse_args()
    with serving(Run(num_steps=5, num_blocks=1, world_size=1)) as agent, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_program("chromium"), args=list(CHROMIUM_FLAGS))
        page = browser.new_page(viewport={"width": 1320, "height": 1060})
        page.goto(agent.url)
        page.locator("html[data-ready]").wait_for()
        show(f"a key of the search, {options.rows} rows", in_page(page, SEARCH, [options.rows, KEYS]))
        for size in (1000, options.steps):
            drawn = [page.evaluate(DRAW, [size, options.steps]) for _ in range(ROUNDS)]
            show(f"drawing {options.steps} steps as {size} points", drawn)
        browser.close()
    with tempfile.TemporaryDirectory() as folder:
        show(f"reading {options.steps} steps of one rank", reading(Path(folder), options.steps))


def in_page(page: Page, script: str, argument: list[object]) -> list[float]:
    return [took for _ in range(3) for took in page.evaluate(script, argument)]


def reading(run_dir: Path, num_steps: int) -> list[float]:
    """Return the CPU times of answers for one row, in ms."""
    keys = [SeriesKey(Kind.GRAD_REDUCED, f"h.{number}.weight") for number in range(2)]
    segments = run_dir / "nodes" / "host" / "segments"
    segments.mkdir(parents=True)
    writer = SegmentWriter(segments)
    values = np.random.default_rng(0).standard_normal((2, 4))
    header = header_of(0)
    for step in range(num_steps):
        writer.add(header, keys, block_of(dict(zip(keys, values * (1 + step % 17), strict=True)), keys, step=step))
        if step % 20_000 == 20_000 - 1:
            writer.seal({}).write()
    query = CurveQuery(heat_map="grad_reduced", row="h.1.weight", points=1000)
    took = []
    for _ in range(ROUNDS):
        begin_s = time.process_time()
        encode_curve(read_curve(run_dir, query), query)
        took.append(1e3 * (time.process_time() - begin_s))
    return took


def show(what: str, times_ms: list[float]) -> None:
    middle = statistics.median(times_ms)
    print(f"{what:45} {middle:7.1f} ({min(times_ms):.1f} to {max(times_ms):.1f}) ms")


if __name__ == "__main__":
    main()
