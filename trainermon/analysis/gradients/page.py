"""A comparison of gradients as one HTML file: a heat map of parameters and steps, and the line of each parameter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import trainermon
from trainermon.analysis.diagnosis.page.markup import STYLE, section, table, text
from trainermon.analysis.gradients.pictures import curve
from trainermon.analysis.gradients.similarity import SignSimilarity
from trainermon.analysis.gradients.tables import GradientsComparison
from trainermon.analysis.gradients.verdict import LEAST_SHARE

MAX_FAULTS = 20
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
# Share of equal signs below which a cell has the next colour: half of them are equal by chance alone.
_LEVELS = (0.999, 0.99, LEAST_SHARE, 0.9, 0.75, 0.6)
_NAMES = ("99.9% or more", "99%", "97%", "90%", "75%", "60%", "less: near chance")
_STYLE = """
.heat{margin:10px 0;border:1px solid var(--line);border-radius:8px;overflow:hidden;background:var(--card)}
.heat a{display:grid;grid-template-columns:minmax(120px,34%) 1fr;gap:10px;align-items:center;padding:1px 10px;
color:var(--text);text-decoration:none;font-size:12px;line-height:17px}
.heat a:hover,.heat a:focus{background:var(--soft)}
.heat span{overflow:hidden;text-overflow:ellipsis;white-space:nowrap;direction:rtl;text-align:left}
.heat svg{height:15px}
.heat .axis{color:var(--dim);display:grid;grid-template-columns:minmax(120px,34%) 1fr;gap:10px;padding:5px 10px;
font-size:11.5px;border-bottom:1px solid var(--line)}
.heat .axis div{display:flex;justify-content:space-between}
.k0{fill:var(--soft);background:var(--soft)}.k1{fill:#cfe0f2;background:#cfe0f2}.k2{fill:#9fc0e2;background:#9fc0e2}
.k3{fill:#f6c9a0;background:#f6c9a0}.k4{fill:#ec9356;background:#ec9356}.k5{fill:#cf5a1c;background:#cf5a1c}
.k6{fill:#9a2600;background:#9a2600}.gap{fill:none}
@media (prefers-color-scheme:dark){.k1{fill:#22364c;background:#22364c}.k2{fill:#325a85;background:#325a85}
.k3{fill:#6d4423;background:#6d4423}.k4{fill:#a8622c;background:#a8622c}.k5{fill:#e2803c;background:#e2803c}
.k6{fill:#ffc09a;background:#ffc09a}}
.legend{font-size:12px;color:var(--dim);margin:6px 0}.legend span{margin-right:14px;white-space:nowrap}
.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px;border:1px solid var(--line)}
.heat .mark{fill:none;stroke:var(--text);stroke-width:2px;vector-effect:non-scaling-stroke}
td a{color:var(--accent)}
@media(max-width:600px){.heat a,.heat .axis{grid-template-columns:1fr;gap:0}.heat a{padding:3px 10px}
.heat .axis>div:first-child{display:none}
.faults tr{display:grid;grid-template-columns:1fr 2fr 2fr 2fr;border-bottom:1px solid var(--line);padding:4px 0}
.faults td,.faults th{border:0;padding:2px 4px 2px 0}.faults td:nth-child(2){grid-column:1/-1;order:-1}
.faults th:nth-child(2){display:none}.plot{overflow-x:auto}.plot svg{min-width:640px}}
.one{display:none}.one:target{display:block;margin:0 0 18px}
.one:first-child{display:block}.lines:has(.one:target) .one:not(:target){display:none}
"""


def render_page(comparison: GradientsComparison) -> str:
    """Return the page. It needs nothing else, and nothing in it runs."""
    rows, steps = comparison.rows, comparison.steps
    title = text(comparison.headline)
    return "".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{title}</title><style>{STYLE}{_STYLE}</style></head><body>",
            f'<div class="dim">gradients of <code>{text(comparison.run)}</code> against '
            f"<code>{text(comparison.other)}</code></div><h1>{title[:1].upper()}{title[1:]}</h1>",
            section("Faults", _faults(comparison)),
            section("Share of elements with the same sign", _legend(), _heat_map(comparison)),
            section("One parameter", f'<div class="lines">{"".join(_lines(rows, steps, _first(comparison)))}</div>'),
            section("Not compared", _unmatched(comparison)),
            f'<p class="dim">trainermon {text(trainermon.__version__)}</p></body></html>\n',
        ]
    )


def _faults(comparison: GradientsComparison) -> str:
    if not comparison.faults:
        return ""
    shown = [
        (
            f"{one.step}",
            f'<a href="#{_anchor(comparison, one)}"><code>{_breakable(one.name)}</code></a>{_of_rank(one.rank)}',
            f"{one.num_elements:,}",
            f"{one.share:.2%}",
            "" if fault.before is None else f"{fault.before:.2%}",
            one.nonfinite,
        )
        for fault in comparison.faults[:MAX_FAULTS]
        for one in (fault.similarity,)
    ]
    more = len(comparison.faults) - MAX_FAULTS
    rest = f'<p class="dim">and {more:,} more: see the csv file</p>' if more > 0 else ""
    found = table(("step", "parameter", "elements", "same sign", "before", "finite"), shown, numbers=3)
    return f'<div class="faults">{found}</div>{rest}'


def _breakable(name: str) -> str:
    """Return a name as HTML, which lines may break after its dots."""
    return text(name).replace(".", ".<wbr>")


def _anchor(comparison: GradientsComparison, one: SignSimilarity) -> str:
    return f"p{list(comparison.rows).index((one.name, one.rank))}"


def _first(comparison: GradientsComparison) -> tuple[str, int | None] | None:
    if not comparison.faults:
        return None
    one = comparison.faults[0].similarity
    return one.name, one.rank


def _legend() -> str:
    entries = "".join(f'<span><i class="k{level}"></i>{name}</span>' for level, name in enumerate(_NAMES))
    return f'<p class="legend">{entries}</p>'


def _level(one: SignSimilarity) -> str:
    return f"k{sum(one.share < limit for limit in _LEVELS)}"


def _heat_map(comparison: GradientsComparison) -> str:
    steps = comparison.steps
    faulty = {fault.similarity for fault in comparison.faults}
    lines = []
    for number, ((name, rank), by_step) in enumerate(comparison.rows.items()):
        levels = [_level(by_step[step]) if step in by_step else "gap" for step in steps]
        marks = [place for place, step in enumerate(steps) if by_step.get(step) in faulty]
        lowest = min(by_step.values(), key=lambda one: one.share)
        label = f"{name}{_of_rank(rank)}"
        title = f"{label}: lowest {lowest.share:.2%} at step {lowest.step}"
        lines.append(
            f'<a href="#p{number}" title="{text(title)}"><span>&lrm;{text(label)}</span>'
            f'<svg viewBox="0 0 {len(steps)} 1" preserveAspectRatio="none" role="img" aria-label="{text(title)}">'
            f"{''.join(_cells(levels, marks))}</svg></a>"
        )
    axis = f"<div><span>step {steps[0]}</span><span>{steps[-1]}</span></div>" if steps else ""
    return f'<div class="heat"><div class="axis"><div>parameter</div>{axis}</div>{"".join(lines)}</div>'


def _of_rank(rank: int | None) -> str:
    return f" (rank {rank})" if rank else ""


def _cells(levels: list[str], marks: list[int]) -> Iterator[str]:
    """Yield one rectangle for each run of equal cells, so that a healthy row is one; and a frame for a fault."""
    at = 0
    for level, same in itertools.groupby(levels):
        width = len(list(same))
        yield f'<rect class="{level}" x="{at}" width="{width}" height="1"/>'
        at += width
    for place in marks:
        yield f'<rect class="mark" x="{place}" width="1" height="1"/>'


def _lines(
    rows: Mapping[tuple[str, int | None], Mapping[int, SignSimilarity]],
    steps: list[int],
    first: tuple[str, int | None] | None,
) -> Iterator[str]:
    order = sorted(enumerate(rows.items()), key=lambda entry: entry[1][0] != first)
    for number, ((name, rank), by_step) in order:
        ones = list(by_step.values())
        yield (
            f'<div class="one plot" id="p{number}"><h3><code>{_breakable(name)}</code>{_of_rank(rank)}'
            f' <span class="dim">{ones[0].num_elements:,} elements</span></h3>'
            f"{curve([(one.step, one.share) for one in ones], steps)}</div>"
        )


def _unmatched(comparison: GradientsComparison) -> str:
    if not comparison.unmatched:
        return ""
    rows = [(f"{one.step}", f"<code>{_breakable(one.name)}</code>", text(one.reason)) for one in comparison.unmatched]
    more = len(rows) - MAX_FAULTS
    rest = f'<p class="dim">and {more:,} more: see the JSON file</p>' if more > 0 else ""
    return table(("step", "parameter", "why"), rows[:MAX_FAULTS]) + rest
