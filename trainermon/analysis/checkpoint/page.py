"""A comparison of checkpoints as one HTML file that needs nothing else: what differs, and how far, by layer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import trainermon
from trainermon.analysis.checkpoint.screen import describe_side, said_of
from trainermon.analysis.checkpoint.verdicts import (
    SAME,
    WEIGHTS,
    CheckpointComparison,
    WeightComparison,
    WeightVerdict,
)
from trainermon.analysis.diagnosis.page.markup import STYLE, section, table, text
from trainermon.analysis.tensor.screen import number, position
from trainermon.core.terminal.results import write_text

MAX_ROWS = 1_000
_MAX_VALUES = 200
_MAX_LAYERS = 256
# Nothing is loaded from anywhere, and nothing runs, whatever names a checkpoint may hold.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_LAYER = re.compile(r"(?:^|\.)([0-9]{1,9})(?=\.)")
_LAST = re.compile(
    r"lm_head|output_layer|final|\bln_f\b|\bnorm\b"
)  # what comes after the layers, wherever a file has it
_MAX_OUTSIDE = 50
_LEVELS = ((0.0, "equal"), (1e-5, "≤ 1e-5"), (1e-3, "≤ 0.1 %"), (1e-2, "≤ 1 %"), (1e-1, "≤ 10 %"))
_OTHER = len(_LEVELS) + 1
_COLOURS = {WeightVerdict.IDENTICAL: "good", WeightVerdict.ROUNDING: "good", WeightVerdict.CLOSE: "warn"}
_STYLE = """
.warn{color:var(--warn)}
.heat{border-collapse:separate;border-spacing:2px;width:auto}
.heat th{font-weight:500;padding:2px 8px 2px 0;border:0;text-align:left;font-size:12px}
.heat th.n{padding:0;text-align:center;min-width:22px}
.heat td{border:0;padding:0;min-width:22px;height:20px;border-radius:3px}
.heat th:first-child{position:sticky;left:0;background:var(--back)}
.l0{background:var(--soft)}.l1{background:#d6e4f3}.l2{background:#a9c8e8}.l3{background:#6f9fd0}.l4{background:#f0a35f}
.l5{background:#c94f1c}.l6{background:repeating-linear-gradient(45deg,var(--bad) 0 3px,var(--badsoft) 3px 6px)}
@media (prefers-color-scheme:dark){.l1{background:#1e3146}.l2{background:#2b4c70}.l3{background:#4a80b8}
.l4{background:#a8632a}.l5{background:#ff9a66}}
.legend{font-size:12px;color:var(--dim);margin:8px 0}.legend span{margin-right:14px;white-space:nowrap}
.legend i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:5px;border:1px solid var(--line);
vertical-align:-2px}
td small{display:block;color:var(--dim);overflow-wrap:anywhere}td code{overflow-wrap:anywhere}
td:first-child{min-width:200px}@media(min-width:900px){td:first-child{min-width:340px}}
.heat td:first-child{min-width:22px}
@media(max-width:760px){.heat th:first-child{min-width:132px;white-space:normal;line-height:1.25;vertical-align:middle}
.heat th:first-child code{font-size:10.5px;line-height:inherit}
.tensors table,.tensors tbody{display:block}
.tensors tr{display:grid;grid-template-columns:repeat(4,1fr);gap:2px 10px;padding:8px 0;
border-bottom:1px solid var(--line)}
.tensors tr:first-child{display:none}.tensors td{border:0;padding:0;grid-column:1/-1;min-width:0}
.tensors td:empty{display:none}.tensors td.n{grid-column:auto;text-align:left}
.tensors td.n::before,.tensors td:nth-child(3)::before{font-size:11px;color:var(--dim)}
.tensors td.n::before{display:block}.tensors td:nth-child(3)::before{content:"first difference "}
.tensors td:nth-child(4)::before{content:"ΔW/W"}.tensors td:nth-child(5)::before{content:"cosine"}
.tensors td:nth-child(6)::before{content:"largest"}.tensors td:nth-child(7)::before{content:"unequal"}}
"""


def write_html(found: CheckpointComparison, path: Path) -> None:
    """Write one HTML file at `path`."""
    write_text(path, "".join(_page(found)))


def _page(found: CheckpointComparison) -> Iterator[str]:
    title = text(found.headline)
    odd = found.ranked()
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width,initial-scale=1">'
    yield f"<title>{title}</title><style>{STYLE}{_STYLE}</style></head><body>"
    yield '<div class="dim">comparison of two checkpoints</div>'
    yield f"<h1>{title}</h1>"
    for label, side in (("first", found.ours), ("second", found.theirs)):
        yield f'<div class="dim">{label} <code>{text(describe_side(side))}</code></div>'
    yield f'<div class="tiles">{"".join(_tiles(found))}</div>'
    for note in found.all_notes():
        yield f"<p>{text(note)}</p>"
    kinds = dict.fromkeys(tensor.kind for tensor in found.tensors)
    for kind in kinds:
        of_kind = [tensor for tensor in found.tensors if tensor.kind == kind]
        yield section(f"How far {kind} are apart, by layer: ΔW/W", _heat(of_kind))
    more = f", the first {MAX_ROWS:,}" if len(odd) > MAX_ROWS else ""
    yield section(f"Tensors that are not identical ({len(odd):,}{more})", _tensors(odd[:MAX_ROWS]))
    yield section(f"Other values that differ ({len(found.values):,})", _values(found))
    yield f'<p class="dim">trainermon {text(trainermon.__version__)}</p></body></html>\n'


def _tiles(found: CheckpointComparison) -> Iterator[str]:
    for group, counts in found.counts_by_group().items():
        for verdict in reversed(WeightVerdict):
            if counts[verdict]:
                label, colour = f"{group}: {verdict.value}", _COLOURS.get(verdict, "bad")
                yield f'<div class="tile"><span>{label}</span><b class="{colour}">{counts[verdict]:,}</b></div>'


def _heat(tensors: list[WeightComparison]) -> str:
    """Return a map: a row for each kind of tensor, a column for each layer; other tensors above and below."""
    rows: dict[str, dict[int, WeightComparison]] = {}
    before: list[WeightComparison] = []
    after: list[WeightComparison] = []
    for tensor in tensors:
        match = _LAYER.search(tensor.name)
        if match is None:
            (after if rows or _LAST.search(tensor.name) else before).append(tensor)
            continue
        kind = f"{tensor.name[: match.start(1)]}*{tensor.name[match.end(1) :]}"
        cells = rows.setdefault(kind, {})
        known = cells.get(int(match[1]))
        if known is None or _level(tensor) > _level(known):
            cells[int(match[1])] = tensor
    layers = sorted({layer for cells in rows.values() for layer in cells})
    shown, num_more = layers[:_MAX_LAYERS], len(layers) - _MAX_LAYERS
    lines = _outside(before, len(shown))
    if layers:
        lines.append(f"<tr><th></th>{''.join(f'<th class=n>{layer}</th>' for layer in shown)}</tr>")
    stacks = {kind.partition("*")[0] for kind in rows}
    for kind, cells in rows.items():
        drawn = "".join(_cell(cells.get(layer)) for layer in shown)
        said = kind.partition("*.")[2] if len(stacks) == 1 else kind
        lines.append(f'<tr><th title="{text(kind)}"><code>{_breakable(_short(said))}</code></th>{drawn}</tr>')
    lines += _outside(after, len(shown))
    more = f'<p class="dim">and {num_more:,} more layers</p>' if num_more > 0 else ""
    return f'<div class="scroll"><table class="heat">{"".join(lines)}</table></div>{more}{_legend()}' if lines else ""


def _outside(tensors: list[WeightComparison], num_layers: int) -> list[str]:
    """Return a row for each tensor that is in no layer, as wide as all layers; of many, for those that differ most."""
    chosen = sorted(range(len(tensors)), key=lambda number: -_level(tensors[number]))[:_MAX_OUTSIDE]
    lines = [
        f'<tr><th title="{text(tensors[number].name)}"><code>{_breakable(_short(tensors[number].name))}</code></th>'
        f"{_cell(tensors[number], max(1, num_layers))}</tr>"
        for number in sorted(chosen)
    ]
    num_more = len(tensors) - len(chosen)
    return [*lines, f"<tr><th>and {num_more:,} more</th></tr>"] if num_more else lines


def _breakable(name: str) -> str:
    """Return a name as HTML that is broken between its parts where there is no room for it."""
    return text(name).replace(".", ".<wbr>").replace("_", "_<wbr>")


def _short(name: str) -> str:
    return name if len(name) <= 46 else f"…{name[-45:]}"


def _cell(tensor: WeightComparison | None, width: int = 1) -> str:
    if tensor is None:
        return "<td></td>"
    span = f' colspan="{width}"' if width > 1 else ""
    said = f"{tensor.name}: {said_of(tensor)}"
    apart = f", ΔW/W {number(tensor.relative)}" if tensor.relative is not None else ""
    return f'<td class="l{_level(tensor)}"{span} title="{text(said + apart)}"></td>'


def _level(tensor: WeightComparison) -> int:
    if tensor.verdict in (*SAME, WeightVerdict.DIFFERENT) and tensor.relative is not None:
        return next((level for level, (limit, _) in enumerate(_LEVELS) if tensor.relative <= limit), len(_LEVELS))
    return _OTHER


def _legend() -> str:
    names = [*(name for _, name in _LEVELS), "more", "not comparable, or NaN"]
    parts = "".join(f'<span><i class="l{level}"></i>{name}</span>' for level, name in enumerate(names))
    return f'<div class="legend">{parts}</div>'


def _tensors(tensors: list[WeightComparison]) -> str:
    head = ("tensor", "verdict", "first difference", "ΔW/W", "cosine", "largest", "unequal")
    rows = [
        (
            _name(tensor),
            f'<b class="{_COLOURS.get(tensor.verdict, "bad")}">{text(said_of(tensor))}</b>{_said(tensor)}',
            _first(tensor),
            *(number(value) if value is not None else "" for value in (tensor.relative, tensor.cosine, tensor.largest)),
            f"{tensor.unequal:,}" if tensor.unequal is not None else "",
        )
        for tensor in tensors
    ]
    return f'<div class="tensors">{table(head, rows, numbers=4)}</div>' if rows else ""


def _name(tensor: WeightComparison) -> str:
    kind = f"<small>{text(tensor.kind)}</small>" if tensor.kind != WEIGHTS else ""
    other = tensor.other_name
    there = f"<small>there {text(other)}</small>" if other is not None and other != tensor.name else ""
    shape = tensor.shapes[0] or tensor.shapes[1] or ()
    dtypes = " and ".join(dict.fromkeys(dtype for dtype in tensor.dtypes if dtype))
    return f"<code>{_breakable(tensor.name)}</code>{kind}{there}<small>{text(dtypes)} {text(list(shape))}</small>"


def _said(tensor: WeightComparison) -> str:
    return "".join(f"<small>{text(said)}</small>" for said in (*tensor.hints, *tensor.notes))


def _first(tensor: WeightComparison) -> str:
    if tensor.first_at is None or tensor.first_values is None:
        return ""
    values = " and ".join(number(value) for value in tensor.first_values)
    return f"{text(position(tensor.first_at))}<small>{text(values)}</small>"


def _values(found: CheckpointComparison) -> str:
    rows = [
        (f"<code>{text(value.label)}</code>", text(value.ours or "–"), text(value.theirs or "–"))
        for value in found.values[:_MAX_VALUES]
    ]
    return table(("value", "first", "second"), rows) if rows else ""
