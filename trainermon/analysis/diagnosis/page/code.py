"""The lines of code around a frame, as a box of the page."""

from __future__ import annotations

from collections.abc import Iterator

from trainermon.analysis.diagnosis.page.markup import text
from trainermon.analysis.source.excerpts import CodeExcerpt


def render_excerpt(found: CodeExcerpt, title: str) -> str:
    """Return the HTML of a box, titled `title`, with a line of the user's code and the lines around it."""
    place = f"<code>{text(found.file)}</code>, line {found.line}, in <code>{text(found.function)}</code>"
    missing = f' <span class="dim">({text(found.missing)})</span>' if found.missing else ""
    return f'<div class="code"><header>{text(title)} {place}{missing}</header><pre>{"".join(_rows(found))}</pre></div>'


def _rows(found: CodeExcerpt) -> Iterator[str]:
    for number, line in found.context or ((found.line, found.code),):
        mark = ' class="hit"' if number == found.line else ""
        yield f"<div{mark}><i>{number}</i>{text(line.expandtabs(4)) or ' '}</div>"
