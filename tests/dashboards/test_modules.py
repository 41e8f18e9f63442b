"""The page's modules by themselves: colour maps, pooling of cells, axes. They run in the browser, where they live."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page

from tests.dashboards.fake_agent import serving
from tests.dashboards.fake_run import Run
from trainermon.core.values import BIN_BOUNDS, NUM_BINS
from trainermon.exporters.store.curves import CurveQuery
from trainermon.exporters.store.histograms import StepHistograms, encode_histograms

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    with serving(Run(num_steps=5, num_blocks=1, world_size=1)) as agent:
        page = browser.new_page()
        page.goto(agent.url)
        yield page
        page.close()


def call(page: Page, module: str, expression: str, argument: Any = None) -> Any:
    """Evaluate `expression` with the module as `m` and `argument` as `a`."""
    script = f"async (a) => {{ const m = await import('/static/{module}.js'); return {expression}; }}"
    return page.evaluate(script, argument)


def oklab(pixels: list[int]) -> np.ndarray:
    """Convert packed RGBA pixels to OKLab; the matrices are those of the inverse direction in Ottosson's text."""
    packed = np.array(pixels, np.uint32)
    srgb = np.stack([packed & 255, packed >> 8 & 255, packed >> 16 & 255], axis=1) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    to_lms = [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
    to_lab = [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
    return np.cbrt(linear @ np.transpose(to_lms)) @ np.transpose(to_lab)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["sequential", "diverging"])
def test_equal_steps_of_the_value_look_equally_large(page: Page, name: str, dark: bool) -> None:
    colours = oklab(call(page, "colour", f"[...m.{name}(a)]", dark))
    # Sixteen entries apart, so that rounding to 8 bits does not count.
    distances = np.linalg.norm(colours[16::16] - colours[:-16:16], axis=1)

    assert len(colours) == 256
    assert distances.min() > 0.8 * distances.max()


def test_bright_is_large_whatever_the_theme(page: Page) -> None:
    lightness = oklab(call(page, "colour", "[...m.sequential()]"))[::8, 0]

    assert np.all(np.diff(lightness) > 0)


def test_one_bad_cell_among_millions_keeps_its_pixel(page: Page) -> None:
    script = """(() => {
        const [rows, columns, width, height] = [1500, 2000, 300, 100];
        const values = new Float32Array(rows * columns).fill(1);
        values[777 * columns + 1234] = Infinity;
        const encoded = m.encode({rows: new Array(rows).fill(''), columns, values}, 'log');
        const image = new ImageData(width, height);
        m.rasterise(image, encoded, {rows, columns, from: 0, to: columns, table: new Uint32Array(256).fill(7),
                                     none: 8, nonfinite: 9, nonfinite2: 9});
        const found = [];
        const place = (i) => [i % width, Math.floor(i / width)];
        new Uint32Array(image.data.buffer).forEach((pixel, i) => pixel === 9 && found.push(place(i)));
        return [found, m.onsets(encoded, rows, columns)];
    })()"""
    found, onsets = call(page, "heat/raster", script)

    assert found == [[math.floor(1234 / 2000 * 300), math.floor(777 / 1500 * 100)]]
    assert onsets == [{"row": 777, "column": 1234}]


def codes(page: Page, values: np.ndarray, mode: str) -> dict[str, Any]:
    rows, columns = values.shape
    cells = [
        None if math.isnan(value) else ("inf" if math.isinf(value) else value) for value in values.ravel().tolist()
    ]
    script = """(() => {
        const values = Float32Array.from(a.cells, (v) => v === null ? NaN : v === 'inf' ? Infinity : v);
        const {codes, ...rest} = m.encode({rows: new Array(a.rows).fill(''), columns: a.columns, values}, a.mode);
        return {codes: [...codes], ...rest};
    })()"""
    return call(page, "heat/raster", script, {"cells": cells, "rows": rows, "columns": columns, "mode": mode})


@pytest.mark.parametrize("mode", ["log", "linear", "change", "peers"])
def test_missing_and_nonfinite_cells_are_never_colours(page: Page, mode: str) -> None:
    values = np.random.default_rng(1).lognormal(size=(6, 50))
    values[2, 10], values[3, 11] = np.nan, np.inf

    found = np.array(codes(page, values, mode)["codes"]).reshape(values.shape)

    assert found[2, 10] == -1
    assert found[3, 11] == 256
    rest = np.delete(found.ravel(), [2 * 50 + 10, 3 * 50 + 11])
    assert rest.min() >= 0
    assert rest.max() <= 255


def test_zero_is_the_lowest_colour_of_a_logarithmic_scale(page: Page) -> None:
    values = np.geomspace(1e-6, 1, 200).reshape(2, 100)
    values[0, 0] = 0

    assert codes(page, values, "log")["codes"][0] == 0


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_peers_are_compared_with_their_median(page: Page, num_ranks: int) -> None:
    times = np.random.default_rng(2).uniform(0.9, 1.1, size=(num_ranks, 40)) * np.linspace(1, 10, 40)
    times[1, 20] *= 3
    expected = np.log2(times / np.median(times, axis=0))

    found = codes(page, times, "peers")
    middle = (np.array(found["codes"]).reshape(times.shape) / 255) * (found["hi"] - found["lo"]) + found["lo"]

    inside = np.abs(expected) < found["hi"]
    assert found["scale"] == "ratio"
    np.testing.assert_allclose(middle[inside], expected[inside], atol=(found["hi"] - found["lo"]) / 250)


@pytest.mark.parametrize(("lo", "hi", "count"), [(0, 1, 5), (-3.7, 12.2, 4), (1780, 2000, 9), (1e-9, 4e-9, 3)])
def test_ticks_are_round_and_inside(page: Page, lo: float, hi: float, count: int) -> None:
    ticks = call(page, "scales", "m.linearTicks(...a)", [lo, hi, count])

    steps = np.diff(ticks)
    mantissa = steps[0] / 10 ** math.floor(math.log10(steps[0]) + 1e-9)
    assert 2 <= len(ticks) <= count + 2
    assert min(ticks) >= lo - 1e-9 * (hi - lo)
    assert max(ticks) <= hi + 1e-9 * (hi - lo)
    np.testing.assert_allclose(steps, steps[0], rtol=1e-6)
    assert min(abs(mantissa - nice) for nice in (1, 2, 5, 10)) < 1e-6


@pytest.mark.parametrize(
    ("ticks", "texts"),
    [
        ([0, 0.0005, 0.001], ["0", "0.0005", "0.001"]),
        ([0, 9e-5, 1e-4], ["0", "9e-5", "1e-4"]),
        ([1e-4, 1e-3, 1e-2], ["1e-4", "1e-3", "1e-2"]),
        ([0.1, 1, 10], ["0.1", "1", "10"]),
        ([10, 1e3, 1e5], ["1e+1", "1e+3", "1e+5"]),
        ([-20000, 0, 20000], ["\N{MINUS SIGN}20,000", "0", "20,000"]),
        ([0, 500000], ["0", "500,000"]),
        ([0, 5e6], ["0", "5e+6"]),
    ],
)
def test_ticks_of_one_axis_are_written_alike(page: Page, ticks: list[float], texts: list[str]) -> None:
    assert call(page, "scales", "m.formatTicks(a)", ticks) == texts


def test_the_average_is_that_of_numpy_and_skips_what_is_no_number(page: Page) -> None:
    random = np.random.default_rng(3)
    values: list[float | None] = random.standard_normal(50).tolist()
    values[7] = values[30] = None
    expected: list[float | None] = []
    seen: list[float] = []
    for value in values:
        if value is None:
            expected.append(None)
            continue
        seen.append(value)
        weights = 0.9 ** np.arange(len(seen))[::-1]
        expected.append(float(np.average(seen, weights=weights)))

    found = call(page, "curves/smooth", "m.averaged(a, 0.9)", values)

    assert [value is None for value in found] == [value is None for value in expected]
    np.testing.assert_allclose([v for v in found if v is not None], [v for v in expected if v is not None], rtol=1e-9)


def test_an_axis_without_outliers_covers_nearly_all(page: Page) -> None:
    values = np.random.default_rng(4).standard_normal(1000)
    values[500] = 1e6
    low, high = call(page, "curves/smooth", "m.usual(a)", values.tolist())

    assert low <= np.quantile(values, 0.01) <= np.quantile(values, 0.99) <= high < 10


def test_search_finds_what_python_finds(page: Page) -> None:
    names = [f"model.layers.{k}.{part}" for k in range(5000) for part in ("attn.q", "attn.k", "mlp.up", "mlp.down")]
    query = "layers.12 MLP"
    expected = [place for place, name in enumerate(names) if all(word in name for word in query.lower().split())]

    found = call(page, "curves/search", "m.find(a.names, a.query)", {"names": names, "query": query})

    assert found == {"found": expected[:50], "count": len(expected)}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (12345, "12,345"),
        (-12345.67, "\N{MINUS SIGN}12,345.7"),
        (0.00012345, "1.23e-4"),
        (-2.5, "\N{MINUS SIGN}2.500"),
        (3.14159, "3.142"),
        (7e9, "7.00e+9"),
    ],
)
def test_values_are_written_short(page: Page, value: float, text: str) -> None:
    assert call(page, "scales", "m.formatValue(a)", value) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (680, "680 B"), (37_800, "37.8 kB"), (5_000_000, "5.00 MB")])
def test_bytes_are_written_in_one_way(page: Page, count: int, text: str) -> None:
    assert call(page, "scales", "m.formatBytes(a)", count) == text


def test_zeros_and_what_is_not_finite_do_not_set_the_scale_of_a_distribution(page: Page) -> None:
    counts = np.zeros((2, NUM_BINS), np.int64)
    zero, not_finite = BIN_BOUNDS.index((0.0, 0.0)), NUM_BINS - 1
    counts[0, [zero, 30, 100]] = 70, 10, 20
    counts[1, [not_finite, 0, NUM_BINS - 2]] = 60, 25, 15
    frame = encode_histograms(StepHistograms(np.arange(2), np.arange(2), counts), CurveQuery(heat_map="a", row="b"))
    page.route("**/made", lambda route: route.fulfill(body=frame))

    found = call(page, "api", "m.getHistograms('/made')")

    assert found["largest"] == 0.25


@pytest.mark.parametrize(
    ("name", "width", "text"),
    [
        ("h.0.attn.weight", 15, "h.0.attn.weight"),
        ("model.layers.11.self_attn.q_proj.weight", 38, "11.self_attn.q_proj.weight"),
        ("model.layers.11.self_attn.q_proj.weight", 20, "11.self_attn.q_proj"),
        ("model.layers.11.self_attn.q_proj.weight", 12, "11…q_proj"),
        ("model.layers.11.self_attn.q_proj.weight", 8, "11…_proj"),
        ("model.layers.11.self_attn.q_proj.bias", 12, "11…proj.bias"),
        ("model.layers.11", 8, "11"),
        ("embed_tokens.weight", 10, "…ns.weight"),
        ("embed_tokens", 8, "…_tokens"),
        ("model.layers.11.self_attn.q_proj.weight", 3, "…ht"),
    ],
)
def test_a_short_name_of_a_row_keeps_layer_and_end(page: Page, name: str, width: int, text: str) -> None:
    """A character is as wide as any other here."""
    canvas = "{measureText: (text) => ({width: text.length})}"

    assert call(page, "heat/labels", f"m.fitText({canvas}, a.name, a.width)", {"name": name, "width": width}) == text
