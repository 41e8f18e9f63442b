"""The graph of one dump as one HTML file: script, colours and data are in it, and it loads nothing."""

from __future__ import annotations

import base64
import hashlib
import html
from pathlib import Path

import trainermon
from trainermon.analysis.graph.page.joining import join_modules

_WEB = Path(trainermon.__file__).parent / "dashboards" / "web"


def render_page(title: str, packed: bytes, *, served: bool = False) -> str:
    """Return the page that shows the data `packed`, as `packing.pack` returns them.

    A content policy allows this one script, and no connection but, where it is `served`, to its server. Text of the
    dump is only ever in the data.
    """
    script = join_modules(_WEB / "graph" / "graph.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src blob: data:"
    if served:
        policy += "; connect-src 'self'"
    style = "".join((_WEB / name).read_text(encoding="utf-8") for name in ("style.css", "graph/graph.css"))
    data = base64.b64encode(packed).decode()
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{html.escape(title)}</title><style>{style}</style></head>{_BODY}"
        f'<script type="application/octet-stream" id="data">{data}</script>'
        f"<script>{script}</script></body></html>\n"
    )


_BODY = """<body class="graph">
<header class="top" id="top">
<span class="lamp"></span><h1 id="sentence">Reading…</h1><p class="dim" id="facts"></p>
<div class="tools">
<span id="steps"><button type="button" id="previous" aria-label="previous finding">&lsaquo;</button>
<span id="finding"></span>
<button type="button" id="next" aria-label="next finding">&rsaquo;</button></span>
<input id="search" type="search" placeholder="search  /" aria-label="search">
<button type="button" id="all">all</button><button type="button" id="show-help" aria-label="help">?</button>
</div></header>
<div class="bar"><nav id="levels" aria-label="where it is"></nav><span id="dials"></span></div>
<canvas id="map" role="img" aria-label="the step in execution order, with the worst verdict at each place"></canvas>
<main class="work"><div class="stage"><ul id="tree" class="visually-hidden" role="tree" tabindex="0"
aria-label="the calls; use the arrow keys"></ul><canvas id="graph" aria-hidden="true"></canvas>
<div id="legend" class="legend" hidden></div></div>
<aside id="panel" aria-live="polite"></aside></main>
<p id="status" class="visually-hidden" role="status"></p>
<dialog id="help"><h2>Keys</h2><dl id="keys"></dl>
<p class="dim">Click selects, with Shift one more; double click unfolds, right click says what can be done; drag or the
wheel moves, Ctrl and the wheel zooms. Search: a part of a name, <code>*</code> patterns, <code>verdict:error</code>,
<code>class:Linear</code>, <code>kind:parameter</code>, <code>dtype:bfloat16</code>, <code>norm&gt;1e3</code>,
<code>line:model.py:118</code>.</p>
<form method="dialog"><button>close</button></form></dialog>
"""
