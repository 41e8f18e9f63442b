"""The tensors of single calls, as the page shows them when a node is selected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainermon.analysis.compare.comparison import Comparison
from trainermon.analysis.compare.items import DumpRow, read_rows
from trainermon.analysis.compare.verdicts import ResultRow
from trainermon.analysis.graph.page.packing import as_number
from trainermon.analysis.graph.tree import GraphTree, NodeSide

Details = dict[str, dict[str, Any]]


def details_alone(tree: GraphTree, directory: Path, wanted: Iterable[int]) -> Details:
    """Return the tensors of the calls of the nodes `wanted`, by the node's index, from the dump in `directory`."""
    rows = read_rows(directory)
    by_key = {call.key: call.items for call in rows.calls}
    shown = {(key, False): [_row(row, None) for row in found] for key, found in by_key.items()}
    return _details(tree, wanted, rows.stacks, shown)


def details_against(tree: GraphTree, comparison: Comparison, wanted: Iterable[int]) -> Details:
    """Return the tensors of the nodes `wanted` on both sides of `comparison`, by the node's index."""
    rows: dict[tuple[str, bool], list[dict[str, Any]]] = {
        (call.key, call.target is None): [_compared(row) for row in call.rows] for call in comparison.calls
    }
    return _details(tree, wanted, comparison.stacks, rows)


def _details(
    tree: GraphTree,
    wanted: Iterable[int],
    stacks: Mapping[str, Sequence[str]],
    rows: Mapping[tuple[str, bool], list[dict[str, Any]]],
) -> Details:
    found = {}
    for place in wanted:
        node = tree.nodes[place]
        if node.call is not None and not node.slot:
            is_golden = node.side is NodeSide.GOLDEN
            stack = [] if is_golden else [" ".join(frame.split()) for frame in stacks.get(node.call.key, ())]
            found[str(place)] = {"rows": rows.get((node.call.key, is_golden), []), "stack": stack}
    return found


def _compared(row: ResultRow) -> dict[str, Any]:
    shown = _row(row.target or row.golden, row.golden)
    if row.target is None:
        shown["ours"] = None
    relative = row.difference.relative
    message = row.messages[0].partition(": ")[2] if row.messages else ""
    return shown | {"error": as_number(relative), "result": row.result, "message": message}


def _row(row: DumpRow | None, golden: DumpRow | None) -> dict[str, Any]:
    assert row is not None
    shape = "" if row.shape is None else f"[{', '.join(map(str, row.shape))}]"
    kind = f"{(row.dtype or '').rpartition('.')[2]}{shape}"
    blank = {"error": None, "result": "", "message": ""}
    return {"place": row.place, "kind": kind, "ours": _numbers(row), "golden": golden and _numbers(golden)} | blank


def _numbers(row: DumpRow) -> list[Any]:
    return [as_number(value) for value in (row.max, row.min, row.mean, row.norm)]
