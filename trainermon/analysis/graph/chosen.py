"""One node of a graph, told in full: its verdict, its tensors, where its values come from and go to, who called it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trainermon.analysis.graph.findings import GraphFindings, NodeVerdict
from trainermon.analysis.graph.flow import FlowSummary
from trainermon.analysis.graph.page.details import NodeDetails
from trainermon.analysis.graph.page.packing import as_number
from trainermon.analysis.graph.screen import path_of
from trainermon.analysis.graph.tree import GraphTree
from trainermon.analysis.tensor.screen import number, table
from trainermon.core.terminal.escapes import printable
from trainermon.dump.files.sources import is_library, parse_frame

MAX_NAMED = 8
"""So many rows, places where values come from, and lines of a stack are told on the screen."""
MAX_NEAR = 3
_MAX_LIKE = 10_000
"""Among so many keys the most alike are found in half a second."""
_LIKE = 0.3


def find_node(tree: GraphTree, name: str) -> int | None:
    """Return the node with the key `name`, of a parameter with its slot behind it, or with that path; None: none has.

    Names are such as `Module.fc.Linear.forward.0`, that with `.parameters.weight`, and `micro step 0 > forward > fc`.
    """
    for place, node in enumerate(tree.nodes):
        if node.call is not None and (f"{node.call.key}.{node.slot}" if node.slot else node.call.key) == name:
            return place
    last = name.rpartition(" > ")[2]
    places = (place for place, node in enumerate(tree.nodes) if node.name == last and path_of(tree, place) == name)
    return next(places, None)


def names_like(tree: GraphTree, name: str) -> list[str]:
    """Return keys of calls that have the text `name` in them; else those that begin as it does, else the most alike.

    At most `MAX_NEAR`; of the last kind maybe none, found among the first `_MAX_LIKE` keys.
    """
    keys = [node.call.key for node in tree.nodes if node.call is not None and not node.slot]
    part = name.lower()
    for text in (part, part.rpartition(".")[0], ".".join(part.split(".")[:3])):
        if text and (near := [key for key in keys if text in key.lower()]):
            return near[:MAX_NEAR]
    last = {key.lower(): key for key in keys[:_MAX_LIKE]}
    return [last[near] for near in difflib.get_close_matches(part, last, n=MAX_NEAR, cutoff=_LIKE)]


def describe_node(
    tree: GraphTree, found: GraphFindings, flow: FlowSummary, details: NodeDetails, place: int
) -> dict[str, Any]:
    """Return what `--json` says of the node `place`.

    Raises:
        DumpError: The dump has changed since it was read.
    """
    node = tree.nodes[place]
    known = details.of(int(tree.parents[place]) if node.slot else place) or {"rows": [], "stack": []}
    producers, consumers = _neighbours(tree, flow, place)
    return {
        "key": "" if node.call is None else node.call.key,
        "path": path_of(tree, place),
        "kind": node.kind.name.lower(),
        "class": node.class_name,
        "verdict": NodeVerdict(int(found.verdicts[place])).name.lower(),
        "error": as_number(float(found.errors[place])) if not math.isnan(found.errors[place]) else None,
        "message": next((one.message for one in found.findings if one.node == place), ""),
        "tensors": [row for row in known["rows"] if not node.slot or row["place"] == node.slot],
        "takes_from": [path_of(tree, one) for one in producers],
        "gives_to": [path_of(tree, one) for one in consumers],
        "stack": known["stack"],
    }


def node_screen(known: Mapping[str, Any]) -> str:
    """Return what the screen says of a node, of which `describe_node` gave what is `known`."""
    return "\n".join(map(str.rstrip, map(printable, _lines(known))))


def _lines(known: Mapping[str, Any]) -> Iterator[str]:
    yield f"{known['path']}: {known['kind']}{' ' if known['class'] else ''}{known['class']}"
    if known["key"]:
        yield f"key         {known['key']}"
    error = known["error"]
    if known["verdict"] != "none":
        yield f"verdict     {known['verdict']}{'' if error is None else f', differs by {_size(error)}'}"
    if known["message"]:
        yield f"began here  {known['message']}"
    for title, names in (("takes from", known["takes_from"]), ("gives to", known["gives_to"])):
        yield from _listed(title, names)
    frames = [(parse_frame(text), text) for text in known["stack"]]
    own = [text for frame, text in frames if frame is not None and not is_library(frame.file)]
    yield from _listed("called in", own or known["stack"])
    yield from _tensors(known["tensors"])


def _tensors(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if rows:
        is_compared = any(row["golden"] is not None or row["result"] for row in rows)
        heads = ("tensor", "", "max, min, mean, norm", *(("golden", "relative", "") if is_compared else ()))
        cells = [
            (row["place"], row["kind"], _numbers(row["ours"], row.get("nonfinite")))
            + (
                (_numbers(row["golden"], row.get("golden_nonfinite")), _size(row["error"]), row["result"])
                if is_compared
                else ()
            )
            for row in rows
        ]
        yield ""
        yield from table(heads, cells, left=len(heads))


def _listed(title: str, names: Sequence[str]) -> Iterator[str]:
    for at, name in enumerate(names[:MAX_NAMED]):
        yield f"{title if at == 0 else '':<12}{name}"
    if len(names) > MAX_NAMED:
        yield f"{'':<12}and {len(names) - MAX_NAMED} more"


def _numbers(values: Sequence[Any] | None, nonfinite: str | None) -> str:
    if values is None:
        return ""
    shown = ", ".join(one if isinstance(one, str) else number(one) for one in values)
    return f"{shown} ({nonfinite})" if nonfinite else shown


def _size(value: float | str | None) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.2g}"


def _neighbours(tree: GraphTree, flow: FlowSummary, place: int) -> tuple[list[int], list[int]]:
    """Return the nodes outside of `place` that make what is taken within it, and those that take what is made there."""
    ends = np.array([(edge.producer, edge.consumer) for edge in flow.edges], np.int32).reshape(-1, 2)
    within = (ends >= place) & (ends < place + int(tree.sizes[place]))
    producers = ends[within[:, 1] & ~within[:, 0], 0]
    consumers = ends[within[:, 0] & ~within[:, 1], 1]
    return np.unique(producers).tolist(), np.unique(consumers).tolist()
