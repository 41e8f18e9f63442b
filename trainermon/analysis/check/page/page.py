"""The verdicts on a dump for people: one HTML file that needs nothing else, and Markdown for an issue."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import trainermon
from trainermon.accuracy.judge import Status
from trainermon.analysis.check.checking import CallsCheck, CheckedCall
from trainermon.analysis.check.page.drawings import STYLE as DRAWINGS
from trainermon.analysis.check.page.drawings import heat_map, histogram, legend, neighbourhood
from trainermon.analysis.check.page.views import CallView, ResultView, views_of
from trainermon.analysis.check.screen import described, headline
from trainermon.analysis.diagnosis.page.markup import STYLE, section, table, text
from trainermon.core.terminal.results import write_text

MAX_FOLDS = 500
MAX_ROWS = 50
_LEAST_SHARE = 1e-4
# Nothing is loaded from anywhere, and nothing runs, whatever a dump may hold.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_COLOURS = {Status.ERROR: "bad", Status.WARNING: "warn", Status.PASS: "good", Status.SKIP: "dim"}
_TILES = ((Status.ERROR, "wrong"), (Status.WARNING, "warnings"), (Status.PASS, "right"), (Status.SKIP, "not judged"))
_NO_CALL = CallView((), ())


def write_html(check: CallsCheck, path: Path) -> None:
    """Write one HTML file at `path`. Cost: up to six runs in float64 of each of the first wrong calls."""
    write_text(path, render_page(check, views_of(check)))


def render_page(check: CallsCheck, views: dict[str, CallView]) -> str:
    """Return the page of a check; `views` are what is shown of wrong calls, by key."""
    wrong, warned = check.of(Status.ERROR), check.of(Status.WARNING)
    return "".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{text(headline(check))}</title><style>{STYLE}{DRAWINGS}</style></head><body>",
            f'<div class="dim">check of <code>{text(check.source)}</code></div><h1>{text(headline(check))}</h1>',
            f'<div class="tiles">{"".join(_tiles(check))}</div>',
            section("Wrong calls, in the order in which they ran", *_folds(check, wrong, views)),
            section("Warnings", *_folds(check, warned, views)),
            section("By family of operations", _families(check)),
            section("Not judged", _skipped(check)),
            f'<p class="dim">trainermon {text(trainermon.__version__)}</p></body></html>\n',
        ]
    )


def _tiles(check: CallsCheck) -> Iterator[str]:
    for status, name in _TILES:
        number = len(check.of(status))
        colour = _COLOURS[status] if number else "dim"
        yield f'<div class="tile"><span>{name}</span><b class="{colour}">{number:,}</b></div>'


def _folds(check: CallsCheck, calls: list[CheckedCall], views: dict[str, CallView]) -> Iterator[str]:
    for number, call in enumerate(calls[:MAX_FOLDS]):
        is_open = number == 0 and call.status is Status.ERROR
        yield _fold(check, call, views.get(call.key, _NO_CALL), is_open=is_open)
    if len(calls) > MAX_FOLDS:
        yield f"<p>and {len(calls) - MAX_FOLDS:,} more: see the csv file</p>"


def _fold(check: CallsCheck, call: CheckedCall, view: CallView, *, is_open: bool) -> str:
    line = f' <span class="dim">{text(call.line)}</span>' if call.line else ""
    colour = _COLOURS[call.status]
    parts = [
        f'<details class="case"{" open" if is_open else ""}><summary><b class="{colour}">{call.status.value}</b> ',
        f"<code>{text(call.key)}</code>{line} · {text(call.reason)}</summary><div>",
        f"<p>{text(described(call))}.</p>",
        *(_result(result) for result in view.results),
        _stack(view),
        _script(check, call),
        "</div></details>",
    ]
    return "".join(parts)


def _result(view: ResultView) -> str:
    judgement = view.judgement
    place = f": {judgement.place.text()}" if judgement.place is not None else ""
    share = f"{judgement.share_above:.2%}" if judgement.share_above > _LEAST_SHARE else "less than 0.01%"
    above = f"{share} beyond what is allowed{place}"
    return (
        f"<h3>Result {view.number}, {text(judgement.dtype)} {text(list(judgement.shape))}: {text(above)}</h3>"
        '<div class="pair"><div><p class="dim">Elements by their error, in units of what each is allowed</p>'
        f'{histogram(view)}<p class="dim">Around the worst: what was recorded, and below it float64; rows count all'
        f" dimensions but the last</p>{neighbourhood(view)}</div>"
        f'<div><p class="dim">Where: the largest error of each cell</p>{heat_map(view)}{legend()}</div></div>'
    )


def _stack(view: CallView) -> str:
    frames = "".join(f"<li><code>{text(' '.join(frame.split()))}</code></li>" for frame in view.stack)
    return f"<details><summary>Call stack, innermost first</summary><ul>{frames}</ul></details>" if frames else ""


def _script(check: CallsCheck, call: CheckedCall) -> str:
    if call.is_backward or not Path(check.source).is_dir():
        return ""
    command = shlex.join(["trainermon", "script", check.source, call.stem])
    return f'<p class="dim">As a script that needs torch alone:</p><pre class="box">{text(command)}</pre>'


def _families(check: CallsCheck) -> str:
    counts: dict[str, Counter[Status]] = {}
    for call in check.calls:
        found = call.worst
        if found is not None and found.standard:
            counts.setdefault(found.standard, Counter())[call.status] += 1
    most = max((count.total() for count in counts.values()), default=1)
    rows = [
        (text(name), _split(found, most), *(f"{found[status]:,}" if found[status] else "" for status, _ in _TILES))
        for name, found in sorted(counts.items(), key=lambda item: -item[1].total())
    ]
    return table(("family", "", *(name for _, name in _TILES)), rows, numbers=len(_TILES)) if rows else ""


def _split(counts: Counter[Status], most: int) -> str:
    parts = "".join(
        f'<i class="{status.value}" style="width:{max(0.6, 100 * counts[status] / most):.2f}%"></i>'
        for status in (Status.ERROR, Status.WARNING, Status.PASS)
        if counts[status]
    )
    return f'<span class="split">{parts}</span>'


def _skipped(check: CallsCheck) -> str:
    rows = [(text(reason), f"{number:,}") for reason, number in check.skipped.most_common(MAX_ROWS)]
    return table(("reason", "calls"), rows, numbers=1) if rows else ""


def write_markdown(check: CallsCheck, path: Path) -> None:
    """Write a Markdown file at `path`: the headline, counts, and the first calls that do not pass."""
    write_text(path, "\n".join(_markdown(check)) + "\n")


def _markdown(check: CallsCheck) -> Iterator[str]:
    yield f"# {_cell(headline(check))}"
    yield f"\nCheck of `{_cell(check.source)}`.\n"
    yield "| " + " | ".join(name for _, name in _TILES) + " |"
    yield "|" + "---:|" * len(_TILES)
    yield "| " + " | ".join(f"{len(check.of(status)):,}" for status, _ in _TILES) + " |"
    calls = check.of(Status.ERROR) + check.of(Status.WARNING)
    if calls:
        yield "\n| verdict | call | line | why |"
        yield "|---|---|---|---|"
    for call in itertools.islice(calls, MAX_ROWS):
        yield f"| {call.status.value} | `{_cell(call.key)}` | {_cell(call.line)} | {_cell(described(call))} |"
    if len(calls) > MAX_ROWS:
        yield f"| | and {len(calls) - MAX_ROWS:,} more | | |"
    if check.skipped:
        yield "\nNot judged:\n"
        yield from (f"* {number:,}: {_cell(reason)}" for reason, number in check.skipped.most_common(MAX_ROWS))


def _cell(value: str) -> str:
    """Return text that neither ends a cell of a table nor is markup."""
    return text(value).replace("|", "\\|").replace("`", "'")
