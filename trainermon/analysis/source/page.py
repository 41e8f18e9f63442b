"""Lines of code and what is wrong with them, as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import trainermon
from trainermon.analysis.diagnosis.page.markup import STYLE, section, table, text
from trainermon.analysis.graph.findings import NodeVerdict
from trainermon.analysis.source.lines import LineCalls, by_gravity
from trainermon.analysis.source.report import SourceReport
from trainermon.analysis.source.screen import MARKS, counts, measure

_MAX_WRONG = 100
# Nothing is loaded from anywhere, and nothing runs, whatever the code may be.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
a{color:var(--accent)}.line{white-space:nowrap}.line b{display:inline-block;width:2ch}
.code pre div{display:flex;padding:0 12px 0 0}
.code pre i{flex:none;margin-right:0}
.code pre b{flex:none;font-weight:400;text-align:right;color:var(--dim);width:9ch;user-select:none}
.code pre b.e{width:11ch}.code pre b.m{width:3ch;text-align:center;color:var(--bad)}
.code pre span{white-space:pre;padding-left:16px}
.code pre .v3{background:color-mix(in srgb,var(--warn) 12%,transparent)}
.code pre .v4,.code pre .v5{background:var(--badsoft)}.code pre .v5{box-shadow:inset 3px 0 var(--bad)}
.code pre .v4 .e,.code pre .v5 .e{color:var(--bad)}
.code pre .gap{color:var(--dim);padding-left:7ch}
.code pre .plus{color:var(--good)}.code pre .minus{color:var(--bad)}
.code pre .said{padding-left:42ch;color:var(--bad);white-space:normal;overflow-wrap:anywhere}
@media(max-width:700px){table,tbody,tr,td{display:block}tr:first-child{display:none}
tr{padding:8px 0;border-bottom:1px solid var(--line)}td,td.n{border:0;padding:1px 0;text-align:left}
td.n{display:inline-block;margin-right:18px}td.n::before{color:var(--dim);content:"calls "}
td.n:last-child::before{content:"not finite "}.golden td.n:last-child::before{content:"error "}
.code pre .said{padding-left:3ch}.code pre b{width:6ch}.code pre b.e{width:8ch}}
"""


def render_page(report: SourceReport) -> str:
    """Return the page."""
    return "".join(_page(report))


def _page(report: SourceReport) -> Iterator[str]:
    wrong = by_gravity(report.lines)
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width,initial-scale=1">'
    yield f"<title>{text(report.sentence)}</title><style>{STYLE}{_STYLE}</style></head>"
    yield '<body class="golden">' if report.has_golden else "<body>"
    yield '<div class="dim">the code behind a dump</div>'
    yield f"<h1>{text(report.sentence)}</h1>"
    for one in report.differences:
        diff = "".join(_diff_line(line) for line in one.lines)
        yield section(
            "The code differs, too",
            f'<div class="code"><header><code>{text(one.file)}</code>, from the golden side to this one</header>'
            f"<pre>{diff}</pre></div>",
        )
    began = [line for line in wrong if line.verdict is NodeVerdict.BLAMED]
    others = [line for line in wrong if line.verdict is not NodeVerdict.BLAMED]
    more = f", the worst {_MAX_WRONG:,}" if len(others) > _MAX_WRONG else ""
    yield section("Where it began", _lines(report, began))
    yield section(f"Other lines {_kind(report)} ({len(others):,}{more})", _lines(report, others[:_MAX_WRONG]))
    files = sorted({line.file: line.is_library for line in report.lines}.items(), key=lambda file: (file[1], file[0]))
    yield section("The code", *(_file(report, file, is_open=not library) for file, library in files))
    yield f'<p class="dim">trainermon {text(trainermon.__version__)}</p></body></html>\n'


def _kind(report: SourceReport) -> str:
    return "whose calls differ" if report.has_golden else "whose calls gave what is not finite"


def _lines(report: SourceReport, lines: list[LineCalls]) -> str:
    rows = [
        (
            f'<span class="line"><b class="bad">{MARKS.get(line.verdict, "")}</b> <a href="#{_anchor(line)}">'
            f"{text(_name(line))}:{line.line}</a></span>",
            f"<code>{text(line.code)}</code>{''.join(_said(line))}",
            counts(line),
            measure(line, has_golden=report.has_golden),
        )
        for line in lines
    ]
    measured = "error" if report.has_golden else "not finite"
    return table(("line", "code", "calls", measured), rows, numbers=2) if rows else ""


def _said(line: LineCalls) -> Iterator[str]:
    for one in line.messages[:3]:
        yield f'<br><span class="dim">{text(one.name)}: {text(one.text)}</span>'


def _file(report: SourceReport, file: str, *, is_open: bool) -> str:
    calls = {line.line: line for line in report.lines if line.file == file}
    rows = "".join(_rows(report, file, calls))
    return (
        f"<details{' open' if is_open else ''}><summary><code>{text(file)}</code>, {len(calls):,} lines with calls"
        f'</summary><div class="code"><header>line · calls (forward + backward) · '
        f"{'largest relative error' if report.has_golden else 'calls that gave what is not finite'}</header>"
        f"<pre>{rows}</pre></div></details>"
    )


def _rows(report: SourceReport, file: str, calls: dict[int, LineCalls]) -> Iterator[str]:
    before = 0
    for number, code in report.texts[file].items():
        if before and number > before + 1:
            yield '<div class="gap">…</div>'
        before = number
        line = calls.get(number)
        shown = f"<span>{text(code.expandtabs(4)) or ' '}</span>"
        if line is None:
            yield f'<div><b class="m"></b><i>{number}</i><b></b><b class="e"></b>{shown}</div>'
            continue
        yield (
            f'<div class="v{line.verdict:d}" id="{_anchor(line)}"><b class="m">{MARKS.get(line.verdict, "")}</b>'
            f"<i>{number}</i><b>{counts(line)}</b>"
            f'<b class="e">{measure(line, has_golden=report.has_golden)}</b>{shown}</div>'
        )
        yield from (f'<div class="said">{text(one.name)}: {text(one.text)}</div>' for one in line.messages[:3])


def _diff_line(line: str) -> str:
    kind = {"+": "plus", "-": "minus"}.get(line[:1], "gap" if line.startswith("@@") else "")
    return f'<div class="{kind}"><span>{text(line.expandtabs(4))}</span></div>'


def _name(line: LineCalls) -> str:
    return line.file.rpartition("/")[2]


def _anchor(line: LineCalls) -> str:
    return text(f"{line.file}:{line.line}".replace(" ", "-"))
