"""Text that is safe in HTML, wherever it came from, and the page's look."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from trainermon.core.terminal.escapes import printable

STYLE = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")


def text(value: object) -> str:
    """Return `value` as text that no browser takes for markup, not even in an attribute; control characters escaped.

    >>> text('<b title="x">')
    '&lt;b title=&quot;x&quot;&gt;'
    """
    return html.escape(printable(str(value)))


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, numbers: int = 0) -> str:
    """Return an HTML table.

    `head` and the cells in `rows` are HTML already, the last `numbers` columns are right-aligned.
    """
    plain = len(head) - numbers

    def cells(tag: str, row: tuple[str, ...]) -> str:
        return "".join(f"<{tag}{' class=n' if index >= plain else ''}>{cell}</{tag}>" for index, cell in enumerate(row))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{cells("th", head)}</tr>{body}</table></div>'


def section(title: str, *parts: str) -> str:
    """Return an HTML section with the heading `title` around the HTML in `parts`; "" if they are all empty."""
    inside = "".join(parts)
    return f"<section><h2>{text(title)}</h2>{inside}</section>" if inside else ""
