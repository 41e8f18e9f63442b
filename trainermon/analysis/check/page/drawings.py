"""Drawings of a wrong result: a histogram of its errors, a map of them, and the numbers around the worst."""

from __future__ import annotations

import itertools
import math

from trainermon.analysis.check.page.views import EDGES, ResultView
from trainermon.analysis.diagnosis.page.markup import text
from trainermon.analysis.tensor.screen import number

_LEVELS = ((0.0, "equal"), (0.1, "up to a tenth"), (1.0, "up to 1"), (10.0, "up to 10"), (1000.0, "up to 1,000"))
_BAR, _HEIGHT, _BASE = 38, 110, 128
_MAP = 320

STYLE = """
.case{--under:var(--card);border:1px solid var(--line);border-radius:8px;margin:8px 0;background:var(--card)}
.case>summary{padding:7px 12px;color:var(--text);overflow-wrap:anywhere}
.case[open]>summary{border-bottom:1px solid var(--line)}
.case>div{padding:4px 14px 12px}
.warn{color:var(--warn)}
.pair{display:grid;grid-template-columns:minmax(0,1fr) minmax(0,330px);gap:26px;align-items:start;margin:8px 0}
@media(max-width:600px){.pair svg text{font-size:18px}}
@media(max-width:760px){.pair{grid-template-columns:minmax(0,1fr)}}
svg .bar{fill:var(--accent)}svg .over{fill:var(--bad)}svg .rim{fill:none;stroke:var(--line)}
.l0{fill:var(--soft);background:var(--soft)}.l1{fill:#b9d3ee;background:#b9d3ee}.l2{fill:#6f9fd0;background:#6f9fd0}
.l3{fill:#f2b27f;background:#f2b27f}.l4{fill:#e0722f;background:#e0722f}.l5{fill:#a32c06;background:#a32c06}
@media (prefers-color-scheme:dark){.l1{fill:#24425f;background:#24425f}.l2{fill:#3f76ad;background:#3f76ad}
.l3{fill:#8a5227;background:#8a5227}.l4{fill:#d0692b;background:#d0692b}.l5{fill:#ffb08c;background:#ffb08c}}
.legend{font-size:12px;color:var(--dim);margin:4px 0}.legend span{margin-right:14px;white-space:nowrap}
.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px;border:1px solid var(--line)}
.map{max-width:320px}.map svg{image-rendering:pixelated}
.matrix td small{display:block;color:var(--dim);font-weight:400}
.split{display:flex;height:9px;width:100%;min-width:160px;border-radius:5px;overflow:hidden;background:var(--soft);margin-top:6px}
.split i{display:block;height:100%}.split .pass{background:var(--good)}.split .warning{background:var(--warn)}
.split .error{background:var(--bad)}
"""


def histogram(view: ResultView) -> str:
    """Return a histogram of the errors in allowances: how many elements, on a logarithmic axis, by how far off."""
    tallest = max(math.log10(1 + count) for count in view.counts) or 1.0
    bars = []
    for place, count in enumerate(view.counts):
        height = max(2.0, _HEIGHT * math.log10(1 + count) / tallest) if count else 0.0
        kind = "over" if place > 1 + EDGES.index(1.0) else "bar"
        x = place * _BAR
        bars.append(
            f'<rect class="{kind}" x="{x + 3}" y="{_BASE - height:.1f}" width="{_BAR - 6}" height="{height:.1f}">'
            f"<title>{count:,} elements, {_bin(place)}</title></rect>"
        )
    width = len(view.counts) * _BAR
    limit = (2 + EDGES.index(1.0)) * _BAR
    ticks = [(0.5 * _BAR, "0")] + [
        ((2 + place) * _BAR, f"{edge:,g}") for place, edge in enumerate(EDGES) if place % 2 == 0
    ]
    labels = "".join(f'<text x="{x:.0f}" y="{_BASE + 14}" text-anchor="middle">{name}</text>' for x, name in ticks)
    labels += f'<text x="{width - _BAR / 2:.0f}" y="{_BASE + 14}" text-anchor="middle">∞</text>'
    return (
        f'<svg viewBox="0 0 {width} {_BASE + 20}" role="img" aria-label="errors in allowances">'
        f'<line class="grid" x1="0" x2="{width}" y1="{_BASE}" y2="{_BASE}"/>{"".join(bars)}'
        f'<line class="here" x1="{limit}" x2="{limit}" y1="4" y2="{_BASE}"/>'
        f'<text class="here" x="{limit + 5}" y="13">not allowed</text>{labels}</svg>'
    )


def _bin(place: int) -> str:
    if place == 0:
        return "equal"
    if place == len(EDGES) + 2:
        return "without a distance (NaN, infinite, or no rounding allowed)"
    if place == len(EDGES) + 1:
        return f"more than {EDGES[-1]:g} allowances off"
    return f"up to {EDGES[place - 1]:.3g} allowances off"


def heat_map(view: ResultView) -> str:
    """Return a map of the largest errors, of at most 64 by 64 cells; the last dimension runs to the right."""
    rows, columns = len(view.heat), len(view.heat[0])
    cells = []
    for y, row in enumerate(view.heat):
        x = 0
        for level, same in itertools.groupby(map(_level, row)):
            width = len(list(same))
            cells.append(f'<rect class="l{level}" x="{x}" y="{y}" width="{width}" height="1"/>')
            x += width
    height = max(8, min(_MAP, round(_MAP * rows / columns)))
    return (
        f'<div class="map"><svg viewBox="0 0 {columns} {rows}" preserveAspectRatio="none" style="height:{height}px"'
        f' shape-rendering="crispEdges" role="img" aria-label="map of errors">{"".join(cells)}</svg></div>'
    )


def legend() -> str:
    """Return what the colours of a map mean."""
    names = [*(name for _, name in _LEVELS), "more, or no distance"]
    parts = "".join(f'<span><i class="l{level}"></i>{name}</span>' for level, name in enumerate(names))
    return f'<div class="legend">{parts}</div>'


def _level(ratio: float) -> int:
    return next((level for level, (limit, _) in enumerate(_LEVELS) if ratio <= limit), len(_LEVELS))


def neighbourhood(view: ResultView) -> str:
    """Return a table of the numbers around the worst element: what was recorded, and below it what float64 gives."""
    head = "".join(f"<th>{column}</th>" for column in view.columns)
    rows = []
    for place, row in enumerate(view.rows):
        sides = zip(view.recorded[place], view.golden[place], view.ratios[place], strict=True)
        cells = "".join(
            f"<td{' class=bad' if ratio > 1 else ''}>{_number(given)}<small>{_number(exact)}</small></td>"
            for given, exact, ratio in sides
        )
        rows.append(f"<tr><th>{row}</th>{cells}</tr>")
    return f'<div class="scroll"><table class="matrix mono"><tr><th></th>{head}</tr>{"".join(rows)}</table></div>'


def _number(value: complex | float) -> str:
    return text(f"{value:.5g}" if isinstance(value, complex) else number(value))
