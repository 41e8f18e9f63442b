"""What is wrong with a graph as Markdown, for an issue: the sentence, where it began, how it went on, the tensors."""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from trainermon.analysis.graph.findings import GraphFindings, NodeVerdict
from trainermon.analysis.graph.flow import FlowSummary, find_flow
from trainermon.analysis.graph.page.details import NodeDetails
from trainermon.analysis.graph.reading import DumpGraph
from trainermon.analysis.graph.screen import path_of
from trainermon.analysis.graph.tree import GraphTree
from trainermon.analysis.tensor.screen import number
from trainermon.core.terminal.escapes import printable

MAX_ROWS = 20
"""How many findings, calls of the chain and tensors are shown at most."""
_FRAMES = 8
_BAR, _QUOTE = r"\|", "'"


def as_markdown(graph: DumpGraph, details: NodeDetails, screen: str, *, golden: str) -> str:
    """Return the Markdown of one graph; `screen` is its tree as text, `golden` what it was held against or ""."""
    return "".join(f"{line}\n" for line in _lines(graph, details, screen, golden))


def passed_on(tree: GraphTree, found: GraphFindings, flow: FlowSummary, start: int) -> Iterator[int]:
    """Yield the nodes that a difference went through: each takes a value of the one before, and does not pass."""
    takers: defaultdict[int, list[int]] = defaultdict(list)
    for edge in flow.edges:
        if found.verdicts[edge.consumer] >= NodeVerdict.WARNING:
            takers[edge.producer].append(edge.consumer)
    place: int | None = start
    while place is not None:
        yield place
        end = place + int(tree.sizes[place])
        following = [taker for maker in range(place, end) for taker in takers.get(maker, ())]
        place = min(following, default=None)


def _lines(graph: DumpGraph, details: NodeDetails, screen: str, golden: str) -> Iterator[str]:
    against = f" against {_code(golden)}" if golden else ""
    yield f"**{_text(graph.found.sentence)}**"
    yield ""
    yield f"{_code(str(graph.directory))}{against}: {_text(graph.tree.nodes[0].name)}, {_text(graph.label)}."
    if graph.found.findings:
        yield from _table("Where it began", ("place", "what", "relative difference"), _began(graph))
        yield from _table("How it went on", ("call", "relative difference"), _went_on(graph))
        yield from _tensors(graph.tree, details, graph.found.findings[0].node, is_compared=bool(golden))
    yield from (
        "",
        "<details><summary>The model</summary>",
        "",
        *_fenced(screen.rstrip().split("\n")),
        "",
        "</details>",
    )


def _began(graph: DumpGraph) -> list[tuple[str, ...]]:
    found = graph.found
    return [
        (_code(path_of(graph.tree, one.node)), _text(one.message), _size(found.errors[one.node]))
        for one in found.findings
    ]


def _went_on(graph: DumpGraph) -> list[tuple[str, ...]]:
    found, start = graph.found, graph.found.findings[0].node
    chain = islice(passed_on(graph.tree, found, find_flow(graph.tree), start), 1, MAX_ROWS + 2)
    return [(_code(path_of(graph.tree, node)), _size(found.errors[node])) for node in chain]


def _tensors(tree: GraphTree, details: NodeDetails, place: int, *, is_compared: bool) -> Iterator[str]:
    """Yield the tensors of a call, or of the call that has a parameter; and the lines that made it."""
    known = details.of(int(tree.parents[place]) if tree.nodes[place].slot else place)
    if known is None:
        return
    heads = ("tensor", "", "max, min, mean, norm", *(("golden", "relative difference") if is_compared else ()))
    rows = [
        (_code(row["place"]), _text(row["kind"]), _numbers(row["ours"], row.get("nonfinite")))
        + ((_numbers(row["golden"], row.get("golden_nonfinite")), _size(row["error"])) if is_compared else ())
        for row in known["rows"]
    ]
    yield from _table("Its tensors", heads, rows)
    if known["stack"]:
        yield from ("", *_fenced(known["stack"][:_FRAMES]))


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if rows:
        yield from ("", f"### {title}", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|")
        yield from (f"| {' | '.join(cell.replace('|', _BAR) for cell in row)} |" for row in rows[:MAX_ROWS])
        if len(rows) > MAX_ROWS:
            yield from ("", f"and {len(rows) - MAX_ROWS:,} more")


def _numbers(values: Sequence[Any] | None, nonfinite: str | None) -> str:
    if values is None:
        return ""
    shown = ", ".join(_text(one) if isinstance(one, str) else number(one) for one in values)
    return f"{shown} ({nonfinite})" if nonfinite else shown


def _size(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return "" if math.isnan(value) else f"{value:.2g}"


def _text(text: str) -> str:
    """Return a text of a dump as Markdown shows it: no line breaks and no tags."""
    return html.escape(printable(text), quote=False)


def _code(text: str) -> str:
    return f"`{printable(text).replace('`', _QUOTE)}`"


def _fenced(lines: Sequence[str]) -> list[str]:
    return ["```", *(printable(line).replace("`", _QUOTE) for line in lines), "```"]
