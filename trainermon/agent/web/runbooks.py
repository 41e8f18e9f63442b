"""The runbooks as pages of the agent and the controller, so that the links of alerts work without a web site.

`/runbook` lists the entries, `/runbook/NAME` is one of them. `/runbook/runbook.md` and `/runbook/prometheus_runbook.md`
are whole: that is where Prometheus's alerts point to, if their `runbook_url` is this address.

The Markdown of our own runbooks is all that is understood: headings, paragraphs, lists, code, strong words and links.
"""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Iterator
from typing import NamedTuple

from fastapi import FastAPI
from fastapi.responses import Response

from trainermon.alerts.prometheus.rules import BASE_RUNBOOK
from trainermon.alerts.rules import RUNBOOK

_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">
<title>{title}</title><link rel="stylesheet" href="{up}static/style.css">
<link rel="stylesheet" href="{up}runbook/runbook.css"></head>
<body><main><article class="panel runbook">{body}</article></main></body></html>
"""
_STYLE = """\
.runbook { max-width: 46rem; margin: 0 auto; padding-bottom: 24px; line-height: 1.55; overflow-wrap: anywhere; }
.runbook h1 { font-size: 20px; margin: 12px 0; }
.runbook h2 { font-size: 16px; margin: 28px 0 8px; padding-top: 12px; border-top: 1px solid var(--edge); }
.runbook p, .runbook ul { margin: 10px 0; }
.runbook code { background: var(--plot); border-radius: 4px; padding: 1px 4px; }
.runbook pre { background: var(--plot); border-radius: 6px; padding: 10px 12px; overflow-x: auto; }
.runbook dt { margin-top: 12px; font-weight: 600; }
.runbook dd { margin: 2px 0 0; color: var(--muted); }
"""
_UNKNOWN = (
    "<h1>{name}</h1><p>The runbooks of trainermon have no entry of this name. What a rule of your own means is written "
    "where you keep its runbook.</p>"
)
_HEADING = re.compile(r"^(#+) (.+)$")
_ITEM = re.compile(r"^[*-] ")
_MARKS = (
    (re.compile(r"`([^`]+)`"), r"<code>\1</code>"),
    (re.compile(r"\*\*([^*]+)\*\*"), r"<strong>\1</strong>"),
    (re.compile(r"(?<![\w*])\*(?=\S)([^*]+)(?<=\S)\*"), r"<em>\1</em>"),
)
_NAME = re.compile(r"<code>([\w-]+)</code>")
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_SAFE = re.compile(r"(?:(?:prometheus_)?runbook\.md)?(?:#[\w-]+)?|https://[^\s\"'<>]+")


class RunbookEntry(NamedTuple):
    """What is said of one alert.

    Attributes:
        name: Its heading.
        text: Markdown below it.
    """

    name: str
    text: str

    @property
    def meaning(self) -> str:
        """The first sentence of what it means, without marks."""
        first = re.split(r"(?<=\.)\s", " ".join(self.text.split()), maxsplit=1)[0]
        said = re.sub(r"[*`]", "", first).removeprefix("Means ").removeprefix("that ")
        return said[:1].upper() + said[1:]


def add_runbooks(app: FastAPI) -> None:
    """Answer for the runbooks, at `/runbook` and below it."""

    @app.get("/runbook")
    async def index() -> Response:
        return _answer("Runbook", _index(), up="")

    @app.get("/runbook/runbook.css")
    async def style() -> Response:
        return Response(_STYLE, media_type="text/css")

    @app.get("/runbook/{name}")
    async def entry(name: str) -> Response:
        whole = {page.name: page for page in (RUNBOOK, BASE_RUNBOOK)}.get(name)
        if whole is not None:
            return _answer("Runbook", _back() + as_html(whole.read_text(encoding="utf-8")), up="../")
        found = entries().get(name)
        if found is None:
            return _answer(name, _back() + _UNKNOWN.format(name=html.escape(name)), up="../", status=404)
        body = _NAME.sub(_link_to_entry, as_html(found.text))
        return _answer(name, f"{_back()}<h1>{html.escape(name)}</h1>{body}", up="../")


@functools.cache
def entries() -> dict[str, RunbookEntry]:
    """Return the entries of both runbooks, by name."""
    found = {}
    for page in (RUNBOOK, BASE_RUNBOOK):
        for part in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            name, _, text = part.partition("\n")
            found[name.strip()] = RunbookEntry(name.strip(), text.strip())
    return found


def as_html(text: str) -> str:
    r"""Return the Markdown of a runbook as HTML; whatever else is in it is shown as it stands.

    >>> as_html("## a-b\n\n**Do** `x < y`, see [c](#c).")
    '<h2 id="a-b">a-b</h2><p><strong>Do</strong> <code>x &lt; y</code>, see <a href="#c">c</a>.</p>'
    """
    return "".join(_blocks(text))


def _blocks(text: str) -> Iterator[str]:
    for number, part in enumerate(re.split(r"^```\w*\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)):
        if number % 2:
            yield f"<pre>{html.escape(part.rstrip())}</pre>"
            continue
        for block in re.split(r"\n\s*\n", part.strip()):
            yield from _block(block)


def _block(block: str) -> Iterator[str]:
    heading, _, rest = block.partition("\n")
    found = _HEADING.match(heading)
    if found:
        level, title = len(found[1]), found[2].strip()
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        yield f'<h{level} id="{html.escape(anchor)}">{_inline(title)}</h{level}>'
        block = rest
    if _ITEM.match(block):
        items = [_inline(item[2:]) for item in re.split(r"\n(?=[*-] )", block)]
        yield "<ul><li>" + "</li><li>".join(items) + "</li></ul>"
    elif block.strip():
        yield f"<p>{_inline(block)}</p>"


def _inline(text: str) -> str:
    shown = html.escape(" ".join(text.split()), quote=False)
    for pattern, replacement in _MARKS:
        shown = pattern.sub(replacement, shown)
    return _LINK.sub(_link, shown)


def _link(found: re.Match[str]) -> str:
    """Return a link within the runbooks or to the web; of one to other pages, which are not served, the words."""
    return f'<a href="{found[2]}">{found[1]}</a>' if _SAFE.fullmatch(html.unescape(found[2])) else found[1]


def _link_to_entry(found: re.Match[str]) -> str:
    return f'<a href="{found[1]}">{found[0]}</a>' if found[1] in entries() else found[0]


def _index() -> str:
    rows = "".join(
        f'<dt><a href="runbook/{html.escape(one.name)}">{html.escape(one.name)}</a></dt>'
        f"<dd>{html.escape(one.meaning)}</dd>"
        for one in entries().values()
    )
    return (
        '<p><a href="./">← Back to the run</a></p><h1>Runbook</h1><p>What each alert means, how to check it, and what '
        f"to do.</p><dl>{rows}</dl>"
    )


def _back() -> str:
    return '<p><a href="../">← Back to the run</a> · <a href="../runbook">all alerts</a></p>'


def _answer(title: str, body: str, *, up: str, status: int = 200) -> Response:
    page = _PAGE.format(title=html.escape(title), body=body, up=up)
    return Response(page, status_code=status, media_type="text/html; charset=utf-8")
