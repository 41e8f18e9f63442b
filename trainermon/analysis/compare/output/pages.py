"""A comparison for people: Markdown for an issue, and one HTML file that needs nothing else."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path

from trainermon.analysis.compare.answer.recomputation import BlamedPlace
from trainermon.analysis.compare.answer.summary import (
    RESULTS,
    SIZES,
    called_in,
    causes_of,
    headline,
    odd_within,
    unmatched_sides,
)
from trainermon.analysis.compare.comparison import Comparison
from trainermon.analysis.compare.items import DumpRow
from trainermon.analysis.compare.verdicts import PASS, UNMATCHED, CallResult, ResultRow
from trainermon.core.terminal.results import write_text

CallKey = tuple[str, bool]
"""The key of a call, and whether the golden dump alone has it."""

MAX_BLAMED = 10
MAX_CALLS = 2_000
_MAX_STEPS = 600
_PLOT = 1000
_LEGEND = (
    ("error", "where differences arose"),
    ("warning", "differs, but is not to blame"),
    ("pass", "rounding"),
)
_STYLE = """
:root{color-scheme:light dark;--line:#d9dde3;--soft:#f5f6f8;--text:#1c2430;--dim:#667085;--error:#c4320a;
--warning:#9a6700;--pass:#2f7d53;--unmatched:#667085;--back:#fff;--shade:#1c243047}
@media (prefers-color-scheme:dark){:root{--line:#333b47;--soft:#1c222b;--text:#e4e8ee;--dim:#98a2b3;--back:#12161c;
--error:#ff8a5c;--warning:#e0b050;--pass:#6cc492;--unmatched:#98a2b3;--shade:#e4e8ee47}}
body{font:14px/1.45 system-ui,sans-serif;color:var(--text);background:var(--back);margin:24px auto;max-width:1200px;
padding:0 20px}
h1{font-size:20px;margin:0 0 4px}h2{font-size:15px;margin:24px 0 8px}.dim{color:var(--dim)}code{font-size:12.5px}
h1{overflow-wrap:anywhere}@media(max-width:800px){code{overflow-wrap:anywhere}td code{display:block;min-width:24ch}}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:12px;margin:16px 0}
.tile{border:1px solid var(--line);border-radius:6px;padding:8px 14px}
.tile b{display:block;font-size:22px}table{border-collapse:collapse;width:100%;font-size:13px}
td,th{text-align:left;padding:4px 10px 4px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--dim);font-weight:500}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
td.n{white-space:nowrap}
.scroll{overflow-x:auto;background:linear-gradient(to right,var(--back) 35%,transparent) local left/32px 100%,
linear-gradient(to left,var(--back) 35%,transparent) local right/32px 100%,
linear-gradient(to right,var(--shade),transparent) scroll left/12px 100%,
linear-gradient(to left,var(--shade),transparent) scroll right/12px 100%;background-repeat:no-repeat}
.error{color:var(--error)}.warning{color:var(--warning)}.pass{color:var(--pass)}.unmatched{color:var(--unmatched)}
svg{display:block;width:100%;height:150px;background:var(--soft)}
.plot{position:relative;padding-left:44px;margin-bottom:6px;border:1px solid var(--line);border-radius:6px;
background:var(--soft)}
.plot span{position:absolute;left:6px;transform:translateY(-50%);font-size:11px;color:var(--dim)}
details{border-bottom:1px solid var(--line);padding:3px 0}summary{cursor:pointer}
details table{margin:4px 0 10px 18px;width:calc(100% - 18px)}
.legend span{margin-right:18px}.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px}
b.error{border:1px solid;border-radius:4px;padding:0 5px;font-size:12px;font-weight:500}
"""


def write_markdown(comparison: Comparison, path: Path) -> None:
    """Write a Markdown file at `path`: the summary, the blamed calls, and the first calls that differ."""
    write_text(path, "\n".join(_markdown(comparison)) + "\n")


def write_html(comparison: Comparison, path: Path) -> None:
    """Write one HTML file at `path`: a summary of one screen, and below it the calls that do not pass, to be unfolded.

    At most `MAX_CALLS` calls, the first ones.
    """
    write_text(path, "".join(_html(comparison)))


def _markdown(comparison: Comparison) -> Iterator[str]:
    counts = comparison.row_counts()
    yield f"# {headline(comparison)}"
    yield ""
    yield f"Target `{comparison.target}`, golden `{comparison.golden}`, compared by {comparison.mode.value}."
    if comparison.mode in SIZES:
        yield f"What differs, does so by {SIZES[comparison.mode]}."
    yield ""
    yield "| " + " | ".join(RESULTS) + " |"
    yield "|" + "---:|" * len(RESULTS)
    yield "| " + " | ".join(f"{counts[result]:,}" for result in RESULTS) + " |"
    for note in comparison.notes:
        yield f"\n{note}"
    for title, calls in _sections(comparison):
        yield ""
        yield f"## {title}"
        yield ""
        yield "| call | inputs differ by | results differ by | explained | result |"
        yield "|---|---:|---:|---:|---|"
        for call in calls[:MAX_BLAMED]:
            is_lonely = call.result == UNMATCHED
            numbers = (None,) * 3 if is_lonely else _errors(call)
            yield f"| `{call.key}` | {' | '.join(_size(value) for value in numbers)} | {call.result} |"
        if len(calls) > MAX_BLAMED:
            yield f"| and {len(calls) - MAX_BLAMED:,} more | | | | |"


def _sections(comparison: Comparison) -> list[tuple[str, list[CallResult]]]:
    causes = [one.call for one in causes_of(comparison)]
    named = _keys(causes)
    differing = [call for call in comparison.calls if call.result not in (PASS, UNMATCHED) and _key(call) not in named]
    lonely = [call for call in comparison.calls if call.result == UNMATCHED]
    sections = (
        ("Where differences arose", causes),
        ("What followed", differing),
        ("On one side only", lonely),
    )
    return [(title, calls) for title, calls in sections if calls]


def _html(comparison: Comparison) -> Iterator[str]:
    title = headline(comparison)
    yield '<!doctype html><html lang="en"><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width">'
    yield f"<title>{_text(title)}</title><style>{_STYLE}</style>"
    yield f"<h1>{_text(title)}</h1>"
    yield f'<div class="dim">target <code>{_text(str(comparison.target))}</code><br>'
    yield f"golden <code>{_text(str(comparison.golden))}</code><br>"
    yield f"compared by {', '.join(filter(None, (comparison.mode.value, _text(comparison.label))))}"
    yield f"<br>what differs, does so by {SIZES[comparison.mode]}</div>" if comparison.mode in SIZES else "</div>"
    counts = comparison.row_counts()
    tiles = (f'<div class="tile {name}"><b>{counts[name]:,}</b>rows: {name}</div>' for name in RESULTS)
    yield f'<div class="tiles">{"".join(tiles)}</div>'
    yield "".join(f"<p>{_text(note)}</p>" for note in comparison.notes)
    causes = causes_of(comparison)
    named = _keys(one.call for one in causes)
    yield from _growth_plot(comparison, named)
    if causes:
        yield "<h2>Where differences arose</h2>"
        yield from _blamed_table(comparison, causes)
    target_only, golden_only = unmatched_sides(comparison)
    differing = [call for call in comparison.calls if call.result != PASS]
    more = f", the first {MAX_CALLS:,}" if len(differing) > MAX_CALLS else ""
    yield f"<h2>Calls that do not pass ({len(differing):,}{more})</h2>"
    yield f'<div class="dim">only in the target: {target_only:,}, only in the golden dump: {golden_only:,}.'
    yield " Beside each call: by how much its inputs differ → its results.</div>"
    for call in differing[:MAX_CALLS]:
        yield from _details(call, is_blamed=_key(call) in named)


def _blamed_table(comparison: Comparison, causes: Sequence[BlamedPlace]) -> Iterator[str]:
    yield '<div class="scroll"><table><tr><th>call<th>what<th class="n">inputs differ by<th class="n">results differ by'
    yield '<th class="n">explained<th>called in</tr>'
    for call, _, words in causes[:MAX_BLAMED]:
        cells = "".join(f'<td class="n">{_size(value)}' for value in _errors(call))
        yield f'<tr><td><code>{_text(call.key)}</code><td class="error">{_text(words)}{cells}'
        yield f"<td><code>{_text(called_in(comparison, call))}</code></tr>"
    if len(causes) > MAX_BLAMED:
        yield f"<tr><td>and {len(causes) - MAX_BLAMED:,} more</tr>"
    yield "</table></div>"
    within = odd_within(comparison, causes[0].call)
    if within:
        yield f"<p>Within the first of them: <code>{_text(', '.join(within[:3]))}</code></p>"


def _growth_plot(comparison: Comparison, named: Set[CallKey]) -> Iterator[str]:
    """Draw how far results are apart over the order of calls, on a logarithmic axis from 1e-8 to 1; NaN at its top."""
    calls = [call for call in comparison.calls if call.result != UNMATCHED]
    if not calls:
        return
    stride = max(1, math.ceil(len(calls) / _MAX_STEPS))
    groups = [calls[index : index + stride] for index in range(0, len(calls), stride)]
    width = _PLOT / len(groups)
    yield "<h2>How far results are apart, in the order of calls</h2>"
    heights = {f"1e{exponent}" if exponent else "1": _height(10.0**exponent) for exponent in (0, -2, -4, -6)}
    # Beside the drawing, which is stretched: its text would be, too.
    ticks = "".join(f'<span style="top:{max(8.0, y):.0f}px">{name}</span>' for name, y in heights.items())
    yield f'<div class="plot">{ticks}<svg viewBox="0 0 {_PLOT} 150" preserveAspectRatio="none">'
    for y in heights.values():
        yield f'<line x1="0" x2="{_PLOT}" y1="{y:.0f}" y2="{y:.0f}" stroke="var(--line)"/>'
    for index, group in enumerate(groups):
        worst = max(group, key=lambda call: (_key(call) in named, -_height(call.output_error)))
        top = _height(worst.output_error)
        colour = "error" if _key(worst) in named else "warning" if worst.result != PASS else "pass"
        yield f'<rect x="{index * width:.2f}" y="{top:.1f}" width="{max(1.0, width * 0.8):.2f}"'
        yield f' height="{145 - top:.1f}"'
        yield f' fill="var(--{colour})"><title>{_text(worst.key)}: {_size(worst.output_error)}</title></rect>'
    yield "</svg></div>"
    yield '<div class="legend dim">'
    for colour, meaning in _LEGEND:
        yield f'<span><i style="background:var(--{colour})"></i>{meaning}</span>'
    yield "</div>"


def _keys(calls: Iterable[CallResult]) -> frozenset[CallKey]:
    return frozenset(map(_key, calls))


def _key(call: CallResult) -> CallKey:
    """Return what tells a call from all others: a call of one side may have the name of another one's on the other."""
    return call.key, call.target is None


def _height(size: float) -> float:
    if math.isnan(size) or size > 1:
        return 5.0
    return 145.0 if size <= 1e-8 else 5 + 140 * -math.log10(size) / 8


def _details(call: CallResult, *, is_blamed: bool) -> Iterator[str]:
    sizes = f"{_size(call.input_error)} → {_size(call.output_error)}" if call.result != UNMATCHED else ""
    side = " (golden dump only)" if call.target is None else " (target only)" if call.golden is None else ""
    yield f'<details><summary><span class="{call.result}">{call.result}</span> <code>{_text(call.key)}</code> '
    blamed = ' <b class="error">to blame</b>' if is_blamed else ""
    yield f'<span class="dim">{sizes}{side}</span>{blamed}</summary><div class="scroll"><table>'
    yield '<tr><th>place<th>result<th class="n">differs by<th>target max, min, mean, norm'
    yield "<th>golden max, min, mean, norm<th></tr>"
    for row in call.rows:
        yield from _row(row)
    yield "</table></div></details>"


def _row(row: ResultRow) -> Iterator[str]:
    item = row.target or row.golden
    yield f"<tr><td>{_text(item.place if item else '')}<td class={row.result}>{row.result}"
    yield f'<td class="n">{_size(row.difference.relative)}'
    for side in (row.target, row.golden):
        yield f"<td>{_text(_statistics(side)) if side else ''}"
    yield f"<td>{_text(' '.join(row.messages))}</tr>"


def _statistics(item: DumpRow) -> str:
    values = [_short(value) for value in (item.max, item.min, item.mean, item.norm) if value is not None]
    counted = [f"{count:,} {name}" for count, name in ((item.nans, "NaN"), (item.infs, "Inf")) if count]
    return ", ".join(values + counted)


def _short(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _errors(call: CallResult) -> tuple[float | None, ...]:
    """Return the errors of inputs and results, and what is explained of it: that is not known of what a call gave."""
    return call.input_error, call.output_error, None if call.given_to else call.expected


def _size(value: float | None) -> str:
    if value is None:
        return "–"
    return "NaN" if math.isnan(value) else f"{value:.2g}" if value else "0"


def _text(value: str) -> str:
    return html.escape(value)
