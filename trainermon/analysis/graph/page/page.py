"""The graph of one dump as one HTML file: script, colours and data are in it, and it loads nothing."""

from __future__ import annotations

import base64
import hashlib
import html
from pathlib import Path

import trainermon
from trainermon.analysis.graph.page.joining import join_modules
from trainermon.analysis.graph.page.packing import PackedPage

_WEB = Path(trainermon.__file__).parent / "dashboards" / "web"


def render_page(title: str, packed: PackedPage, *, served: bool = False) -> str:
    """Return the page that shows the data `packed`.

    A content policy allows this one script, and no connection but, where it is `served`, to its server, which it then
    asks for the pieces. In a file they stand in the page: those of the rank that is shown first before the script, so
    that it can begin while the browser reads the others. Text of the dump is only ever in the data.
    """
    script = join_modules(_WEB / "graph" / "graph.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src blob: data:"
    if served:
        policy += "; connect-src 'self'"
    style = "".join((_WEB / name).read_text(encoding="utf-8") for name in ("style.css", "graph/graph.css"))
    pieces = [] if served else [_data(f"piece{number}", piece) for number, piece in enumerate(packed.pieces)]
    return "".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{html.escape(title)}</title><style>{style}</style></head>{_BODY}",
            _data("head", packed.head),
            *pieces[: packed.num_first],
            f"<script>{script}</script>",
            *pieces[packed.num_first :],
            "</body></html>\n",
        )
    )


def _data(name: str, content: bytes) -> str:
    text = base64.b64encode(content).decode()
    return f'<script type="application/octet-stream" id="{name}">{text}</script>'


_BODY = """<body class="graph">
<header class="top" id="top">
<span class="lamp"></span><h1 id="sentence">Reading…</h1><p class="dim" id="facts"></p>
<div class="tools">
<span id="steps"><button type="button" id="previous" aria-label="previous finding">&lsaquo;</button>
<button type="button" id="finding" title="list them"></button>
<button type="button" id="next" aria-label="next finding">&rsaquo;</button></span>
<input id="search" type="search" placeholder="search  /" aria-label="search">
<button type="button" id="all">all</button><button type="button" id="show-help" aria-label="help">?</button>
</div></header>
<div class="bar"><nav id="levels" aria-label="where it is"></nav><span id="dials"></span></div>
<canvas id="map" role="img" aria-label="the step in execution order, with the worst verdict at each place"></canvas>
<main class="work"><div class="stage" id="stage"><ul id="tree" class="visually-hidden" role="tree" tabindex="0"
aria-label="the calls; use the arrow keys"></ul><canvas id="graph" aria-hidden="true"></canvas>
<canvas id="golden" aria-hidden="true"></canvas><p class="side">target</p><p class="side">golden</p>
<div id="legend" class="legend" hidden></div></div>
<aside id="panel" aria-live="polite"></aside></main>
<p id="status" class="visually-hidden" role="status"></p>
<dialog id="help"><h2>Keys</h2><dl id="keys"></dl>
<p class="dim">Click selects, with Shift one more; double click unfolds, right click says what can be done; drag or the
wheel moves, Ctrl and the wheel zooms. On the map a click goes there, a drag looks closer, a double click shows all.
Search: a part of a name, <code>*</code> patterns, <code>verdict:error</code>, <code>class:Linear</code>,
<code>kind:parameter</code>, <code>dtype:bfloat16</code>, <code>norm&gt;1e3</code>, <code>line:model.py:118</code>;
<kbd>&darr;</kbd> in the field, or a click on the number found, lists them.
<code>rank:3</code>, <code>rank:0-7</code>, <code>rank:*</code> search other ranks, alone they find where it began.</p>
<form method="dialog"><button>close</button></form></dialog>
"""
