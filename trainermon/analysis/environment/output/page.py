"""A comparison as one HTML page that needs nothing else: what changes numbers first, and a filter."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator

import trainermon
from trainermon.analysis.diagnosis.page.markup import STYLE, section, text
from trainermon.analysis.environment.differences import DifferenceLevel, EnvironmentComparison, SettingDifference
from trainermon.analysis.environment.screen import shown_value
from trainermon.core.environment.pack import SECTIONS

MAX_ROWS = 5_000
_MAX_VALUE = 400
_NAMES = {
    DifferenceLevel.ERROR: "change numbers",
    DifferenceLevel.WARNING: "may",
    DifferenceLevel.INFO: "do not",
    DifferenceLevel.SAME: "equal",
}
_COLOURS = {
    DifferenceLevel.ERROR: "bad",
    DifferenceLevel.WARNING: "warn",
    DifferenceLevel.INFO: "dim",
    DifferenceLevel.SAME: "good",
}
_STYLE = """
.warn{color:var(--warn)}
.tile{cursor:pointer;position:relative}
.tile input{position:absolute;top:9px;right:10px;accent-color:var(--accent)}
.tile:focus-within{outline:2px solid var(--accent);outline-offset:1px}
#find{width:100%;max-width:420px;padding:7px 11px;margin:10px 0 0;font:inherit;color:inherit;background:var(--card);
border:1px solid var(--line);border-radius:8px}
tr.out,body:not(:has(#error:checked)) tr.error,body:not(:has(#warning:checked)) tr.warning,
body:not(:has(#info:checked)) tr.info,body:not(:has(#pass:checked)) tr.pass,section:has(tbody){display:none}
body:has(#error:checked) section:has(tr.error:not(.out)),body:has(#warning:checked) section:has(tr.warning:not(.out)),
body:has(#info:checked) section:has(tr.info:not(.out)),body:has(#pass:checked) section:has(tr.pass:not(.out))
{display:block}
table{table-layout:fixed}th:nth-child(1){width:76px}th:nth-child(2){width:28%}th:nth-child(5){width:19%}
td{overflow-wrap:anywhere}td.why{color:var(--dim)}
@media(max-width:640px){body{padding:18px 14px 40px}thead{display:none}table,tbody,tbody td{display:block}
tbody tr{padding:7px 0;border-bottom:1px solid var(--line)}
body:has(#error:checked) tr.error:not(.out),body:has(#warning:checked) tr.warning:not(.out),
body:has(#info:checked) tr.info:not(.out),body:has(#pass:checked) tr.pass:not(.out){display:block}
tbody td{border:0;padding:1px 0}td[data-of]::before{content:attr(data-of) " ";color:var(--dim)}}
"""
_SCRIPT = """
const find=document.getElementById("find"),rows=[...document.querySelectorAll("tbody tr")];
find.hidden=false;
find.addEventListener("input",()=>{const words=find.value.toLowerCase().split(/\\s+/);
for(const row of rows){const text=row.textContent.toLowerCase();
row.classList.toggle("out",!words.every((word)=>text.includes(word)))}});
"""
_HASH = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
# Nothing is loaded from anywhere, and no script runs except the one above, whatever a pack may hold.
_POLICY = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_HASH}'"


def render_page(comparison: EnvironmentComparison) -> str:
    """Return the page; of more than 5,000 rows the gravest of each section are shown."""
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{text(comparison.headline)}</title><style>{STYLE}{_STYLE}</style></head><body>"
    )
    sides = (
        f'<p class="dim">first <code>{text(comparison.sources[0])}</code><br>'
        f"second <code>{text(comparison.sources[1])}</code></p>"
    )
    most = MAX_ROWS // max(1, len(comparison.sections))
    body = (_section(comparison, name, most) for name in SECTIONS if name in comparison.sections)
    notes = section("Not known", "<ul>", *(f"<li>{text(note)}</li>" for note in comparison.notes), "</ul>")
    return "".join(
        [
            head,
            f"<h1>{text(comparison.headline)}</h1>{sides}",
            f'<div class="tiles">{"".join(_tiles(comparison))}</div>',
            '<input id="find" type="search" placeholder="Filter by name or value" aria-label="Filter" hidden>',
            *body,
            notes if comparison.notes else "",
            f'<p class="dim">trainermon {text(trainermon.__version__)}</p><script>{_SCRIPT}</script></body></html>\n',
        ]
    )


def _tiles(comparison: EnvironmentComparison) -> Iterator[str]:
    for level, name in _NAMES.items():
        number = len(comparison.of(level))
        checked = "" if level is DifferenceLevel.SAME else " checked"
        colour = _COLOURS[level] if number else "dim"
        yield (
            f'<label class="tile"><span>{name}</span><b class="{colour}">{number:,}</b>'
            f'<input type="checkbox" id="{level.value}"{checked} aria-label="show those that are {name}"></label>'
        )


def _section(comparison: EnvironmentComparison, name: str, most: int) -> str:
    rows = [row for row in comparison.rows if row.section == name]
    more = f'<p class="dim">and {len(rows) - most:,} more: see the csv file</p>' if len(rows) > most else ""
    body = "".join(map(_row, rows[:most]))
    head = "<tr><th></th><th>name</th><th>first</th><th>second</th><th></th></tr>"
    table = f'<div class="scroll"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'
    return section(name, table, more) if rows else ""


def _row(row: SettingDifference) -> str:
    names = " = ".join(name for name in dict.fromkeys(row.names) if name is not None)
    first, second = (text(shown_value(value, _MAX_VALUE)) for value in row.values)
    return (
        f'<tr class="{row.level.value}"><td class="word {_COLOURS[row.level]}">{row.level.value}</td>'
        f'<td class="mono">{text(names)}</td><td class="mono" data-of="first">{first}</td>'
        f'<td class="mono" data-of="second">{second}</td><td class="why">{text(row.reason)}</td></tr>'
    )
