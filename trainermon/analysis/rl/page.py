"""The reports of a watch as one HTML file, without scripts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import trainermon
from trainermon.analysis.diagnosis.page.markup import STYLE, section, table, text
from trainermon.analysis.rl.token_text import Decode, text_at
from trainermon.rl.values import HISTOGRAM_EDGES, WITHIN_ROWS, Report

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 900, 140, 92, 14, 26
_STYLE = """
svg{width:100%;height:auto;display:block;background:var(--card);border:1px solid var(--line);border-radius:8px}
svg text{fill:var(--dim);font-size:12px}.bar{fill:var(--accent)}
.line{fill:none;stroke:var(--accent);stroke-width:1.5}
.dot{fill:var(--accent)}.bad{fill:var(--bad,#c0392b)}
.grid{stroke:var(--line)}.floor{stroke:var(--dim);stroke-dasharray:4 4}
h3{font-size:13px;margin:14px 0 4px;font-weight:600}dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 14px}
dt{color:var(--dim)}dd{margin:0}
@media(max-width:600px){svg text{font-size:24px}.many text:not(:nth-of-type(4n+2)){display:none}}
"""


def render_page(
    folder: Path,
    ranks: Mapping[int, Sequence[Report]],
    rank: int,
    report: Report,
    decode: Decode | None = None,
) -> str:
    """Return the page on the reports of all ranks, with one of them in full. It needs nothing else.

    `decode` gives the text of token ids; None: ids are shown.
    """
    title = text(f"Step {report.step}: {report.sentence}")
    return "".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{title}</title><style>{STYLE}{_STYLE}</style></head><body>",
            f'<div class="dim">rollout and trainer in <code>{text(folder)}</code>, rank {rank} of {len(ranks)}</div>',
            f"<h1>{title}</h1>",
            section("What to do", _causes(report)),
            section("Over the steps", *_curves(ranks[rank])),
            section("This step", _numbers(report)),
            section("Weights", _weights(report)),
            section("Engines", _engines(report)),
            section("Where tokens differ", _histogram(report), _positions(report)),
            section("The worst sequences", _sequences(report)),
            section("The worst tokens", _worst(report, decode)),
            section("Notes", "".join(f"<p>{text(note)}</p>" for note in report.notes)),
            f'<p class="dim">trainermon {text(trainermon.__version__)}</p></body></html>\n',
        ]
    )


def _causes(report: Report) -> str:
    lines = []
    for number, each in enumerate(report.causes):
        evidence = f"<b>{text(each.cause)}</b>: {text(each.evidence)}.<br>" if number else ""  # the title has the first
        lines.append(f"<p>{evidence}{text(each.advice[:1].upper() + each.advice[1:])}.</p>")
    return "".join(lines)


def _curves(reports: Sequence[Report]) -> Iterator[str]:
    if len(reports) < 2:
        return
    for title, name, usual in (("Mean |Δ|, nats", "mean_abs", None), ("Mean ratio", "ratio", 1.0)):
        points = [
            (each.step, getattr(each.measures, name), bool(each.causes), f"step {each.step}: {each.sentence}")
            for each in reports
            if each.measures is not None and math.isfinite(getattr(each.measures, name))
        ]
        floors = [each.floor.mean_abs for each in reports if each.floor is not None]
        if points and floors:
            yield f"<h3>{title}</h3>{_curve(points, floors[-1] if usual is None else usual)}"


def _curve(points: Sequence[tuple[int, float, bool, str]], reference: float) -> str:
    """Return the line over the steps; dashed: the value that is to be expected, which is always in view."""
    values = [value for _, value, _, _ in points]
    low, high = min(*values, reference * 0.98), max(*values, reference * 1.02)
    first, last = points[0][0], points[-1][0]

    def place(step: float, value: float) -> tuple[float, float]:
        x = _LEFT + (_WIDTH - _LEFT - 12) * (step - first) / max(1, last - first)
        return x, _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - (value - low) / (high - low))

    marks = [
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 12}" y1="{place(0, y)[1]:.1f}" y2="{place(0, y)[1]:.1f}"/>'
        f'<text x="{_LEFT - 8}" y="{place(0, y)[1] + 5:.1f}" text-anchor="end">{y:.3g}</text>'
        for y in (low, high)
    ]
    y = place(0, reference)[1]
    marks.append(f'<line class="floor" x1="{_LEFT}" x2="{_WIDTH - 12}" y1="{y:.1f}" y2="{y:.1f}"/>')
    path = " L".join("{:.1f} {:.1f}".format(*place(step, value)) for step, value, _, _ in points)
    marks.append(f'<path class="line" d="M{path}"/>')
    for step, value, wrong, label in points:
        x, y = place(step, value)
        marks.append(
            f'<circle class="{"bad" if wrong else "dot"}" cx="{x:.1f}" cy="{y:.1f}" r="{4 if wrong else 2.5}">'
            f"<title>{text(label)}</title></circle>"
        )
    marks.append(f'<text x="{_LEFT}" y="{_HEIGHT - 6}">step {first:,}</text>')
    marks.append(f'<text x="{_WIDTH - 12}" y="{_HEIGHT - 6}" text-anchor="end">step {last:,}</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}">{"".join(marks)}</svg>'


def _numbers(report: Report) -> str:
    m = report.measures
    if m is None:
        return ""
    floor = "" if report.floor is None else f", {m.mean_abs / report.floor.mean_abs:.1f} × what rounding gives"
    rows = {
        "tokens": f"{m.tokens:,} in {m.sequences:,} sequences",
        "|Δ|": f"mean {m.mean_abs:.3g}{floor}; median {m.median_abs:.3g}, "
        f"99 % {m.p99_abs:.3g}, largest {m.max_abs:.3g}",
        "mean ratio": f"{m.ratio:.4f}, {m.ratio_z:+.1f} standard errors from 1",
        "effective sample size": f"{m.ess:.1%}; {m.ess_truncated:.1%} with ratios cut at 2",
        "divergence": f"k1 {m.k1:.3g}, k3 {m.k3:.3g}, χ² {m.chi2_token:.3g}, of sequences {m.chi2_sequence:.3g}",
        "ratios outside": f"0.9 … 1.1: {m.outside_tenth:.1%}, 0.5 … 2: {m.outside_half:.2%}",
        "fit": f"correlation {m.correlation:.4f}, slope {m.slope:.3f}; at lag {m.lag:+d} {m.lag_correlation:.3f}",
        "perplexity": f"{m.perplexity_rollout:.3g} rollout, {m.perplexity_train:.3g} trainer",
    }
    return "<dl>" + "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in rows.items()) + "</dl>"


def _weights(report: Report) -> str:
    check = report.weights
    if check is None:
        return ""
    engines = text(", ".join(check.engines))
    held = f"{check.equal} of {check.num_tensors} tensors as they were sent"
    head = f"<p>Version {check.version} in {engines}: {held} ({WITHIN_ROWS}).</p>"
    rows = [(f"<code>{text(each.name)}</code>", text(each.engine), text(each.found)) for each in check.differing]
    rows += [(f"<code>{text(name)}</code>", "", "missing") for name in check.missing]
    return head + (table(("tensor", "engine", "found"), rows[:200]) if rows else "")


def _engines(report: Report) -> str:
    if len(report.engines) < 2:
        return ""
    rows = [
        (
            text(each.engine), "" if each.version is None else str(each.version), f"{each.tokens:,}",
            f"{each.mean_abs:.3g}", f"{each.ratio:.4f}", f"{each.ratio_z:+.1f}",
        )
        for each in report.engines
    ]  # fmt: skip
    return table(("engine", "version", "tokens", "mean |Δ|", "mean ratio", "z"), rows, numbers=5)


def _histogram(report: Report) -> str:
    if not report.histogram:
        return ""
    edges = [f"below {HISTOGRAM_EDGES[0]:g}", *(f"{edge:.2g} and more" for edge in HISTOGRAM_EDGES)]
    return "<h3>Tokens by |Δ|</h3>" + _bars(
        [(label, count) for label, count in zip(edges, report.histogram, strict=True)]
    )


def _positions(report: Report) -> str:
    parts = [(f"{part.first}–{part.last}", part.mean_abs) for part in report.positions]
    return "<h3>Mean |Δ| by position in the response</h3>" + _bars(parts) if parts else ""


def _bars(parts: Sequence[tuple[str, float]]) -> str:
    top = max((value for _, value in parts), default=0.0) or 1.0
    width = (_WIDTH - 24) / len(parts)
    marks = []
    for number, (label, value) in enumerate(parts):
        height = (_HEIGHT - 40) * value / top
        x = 12 + number * width
        y = _HEIGHT - _BOTTOM - height
        shown = f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
        marks.append(
            f'<rect class="bar" x="{x + 2:.1f}" y="{y:.1f}" width="{width - 4:.1f}" height="{height:.1f}">'
            f"<title>{text(label)}: {shown}</title></rect>"
        )
        below = label.split()[0] if label[0].isdigit() else "<"
        marks.append(f'<text x="{x + width / 2:.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{text(below)}</text>')
    density = ' class="many"' if len(parts) > 8 else ""
    return f'<svg{density} viewBox="0 0 {_WIDTH} {_HEIGHT}">{"".join(marks)}</svg>'


def _sequences(report: Report) -> str:
    rows = [
        (
            str(part.sequence), text(part.engine), f"{part.tokens:,}", f"{part.mean_abs:.3g}", f"{part.log_ratio:+.3f}",
            "–" if part.first_diverging is None else str(part.first_diverging),
        )
        for part in report.sequences
    ]  # fmt: skip
    head = ("sequence", "engine", "tokens", "mean |Δ|", "log ratio", "diverges at")
    return table(head, rows, numbers=4) if rows else ""


def _worst(report: Report, decode: Decode | None) -> str:
    rows = [
        (
            str(each.sequence), str(each.position),
            text(" ".join(map(str, each.before)) if decode is None else text_at(each, decode)),
            "" if each.id is None else str(each.id), f"{each.rollout:.3f}", f"{each.train:.3f}",
            f"{each.train - each.rollout:+.3f}",
        )
        for each in report.worst
    ]  # fmt: skip
    head = (
        "sequence",
        "position",
        "tokens before" if decode is None else "text up to [the token]",
        "token",
        "rollout",
        "trainer",
        "Δ",
    )
    return table(head, rows, numbers=4) if rows else ""
