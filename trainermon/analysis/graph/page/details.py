"""The tensors of single calls, as the page shows them when a node is selected."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from trainermon.analysis.compare.comparison import Comparison
from trainermon.analysis.compare.items import DumpRow, DumpRows, rows_of_entry
from trainermon.analysis.compare.verdicts import ResultRow
from trainermon.analysis.graph.calls import GraphCall
from trainermon.analysis.graph.entries import read_entry
from trainermon.analysis.graph.page.packing import as_number
from trainermon.analysis.graph.tree import GraphTree, NodeSide
from trainermon.dump.files.reader import read_stacks, stack_of
from trainermon.dump.files.records import DUMP_FILE, PARTIAL_FILE

_PYTHON_TYPE = re.compile(r"<class '(.+)'>")
Details = dict[str, Any]
Stacks = Mapping[str, Sequence[str]]


class NodeDetails(NamedTuple):
    """What is known of the tensors of each call of one graph; looked up when it is asked for.

    Attributes:
        tree: The graph's tree.
        rows: Returns the rows of a call; of one that only the golden dump has, those of that dump.
        stacks: Returns the lines that made each call, by its key.
    """

    tree: GraphTree
    rows: Callable[[GraphCall, NodeSide], list[Details]]
    stacks: Callable[[], Stacks]

    def of(self, place: int) -> Details | None:
        """Return the tensors and the stack of the node `place`; None if it is no call of its own.

        Raises:
            DumpError: The dump has changed since it was read.
        """
        node = self.tree.nodes[place]
        if node.call is None or node.slot:
            return None
        frames = () if node.side is NodeSide.GOLDEN else stack_of(self.stacks(), node.call.key)
        return {"rows": self.rows(node.call, node.side), "stack": [" ".join(frame.split()) for frame in frames]}

    def json_of(self, place: int) -> bytes | None:
        """Return what `of` returns as JSON."""
        found = self.of(place)
        return None if found is None else json.dumps(found, separators=(",", ":"), allow_nan=False).encode()

    def among(self, wanted: Iterable[int]) -> dict[str, Details]:
        """Return those of the nodes `wanted`, by the node's index as text."""
        found = ((str(place), self.of(place)) for place in wanted)
        return {place: detail for place, detail in found if detail is not None}


def details_alone(tree: GraphTree, directory: Path) -> NodeDetails:
    """Return the details of the dump in `directory`. Each is read from its place in the file."""
    whole = directory / DUMP_FILE
    path = whole if whole.is_file() else directory / PARTIAL_FILE

    def rows(call: GraphCall, side: NodeSide) -> list[Details]:
        del side  # there is one dump only
        entry = read_entry(path, call.start, call.length)
        return [_row(row, None) for row in rows_of_entry(entry, call.direction)]

    return NodeDetails(tree, rows, cache(lambda: read_stacks(directory)))


def details_of_rows(tree: GraphTree, whole: DumpRows) -> NodeDetails:
    """Return the details of ranks that were put together, whose rows are those of `whole`."""
    by_key = {call.key: call.items for call in whole.calls}

    def rows(call: GraphCall, side: NodeSide) -> list[Details]:
        del side  # there is one side only
        return [_row(row, None) for row in by_key.get(call.key, ())]

    return NodeDetails(tree, rows, lambda: whole.stacks)


def details_against(tree: GraphTree, comparison: Comparison) -> NodeDetails:
    """Return the details of both sides of `comparison`."""
    by_key = {(key, call.target is None): call for call in comparison.calls for key in comparison.members_of(call.key)}

    def rows(call: GraphCall, side: NodeSide) -> list[Details]:
        result = by_key.get((call.key, side is NodeSide.GOLDEN))
        return [] if result is None else [_compared(row) for row in result.rows]

    return NodeDetails(tree, rows, lambda: comparison.stacks)


def _compared(row: ResultRow) -> dict[str, Any]:
    shown = _row(row.target or row.golden, row.golden)
    if row.target is None:
        shown["ours"] = None
    relative = row.difference.relative
    message = row.messages[0].partition(": ")[2] if row.messages else ""
    return shown | {"error": as_number(relative), "result": row.result, "message": message}


def _row(row: DumpRow | None, golden: DumpRow | None) -> dict[str, Any]:
    assert row is not None
    python_type = _PYTHON_TYPE.fullmatch(row.dtype or "")
    shape = "" if row.shape is None or python_type else f"[{', '.join(map(str, row.shape))}]"
    kind = python_type[1] if python_type else f"{(row.dtype or '').rpartition('.')[2]}{shape}"
    blank = {"error": None, "result": "", "message": ""}
    files = {"file": row.data_name, "golden_file": golden.data_name if golden else None}
    numbers = {"ours": _numbers(row), "golden": golden and _numbers(golden)}
    more = files | {
        "merged": row.merged,
        "nonfinite": _nonfinite(row),
        "golden_nonfinite": golden and _nonfinite(golden),
    }
    return {"place": row.place, "kind": kind, **numbers, **blank} | {name: one for name, one in more.items() if one}


def _nonfinite(row: DumpRow) -> str:
    """Return in words how many elements are not finite, "" if all are or nobody counted."""
    counts = ((row.nans, "NaN"), (row.infs, "Inf"))
    return ", ".join(f"{count:,} {name}" for count, name in counts if count)


def _numbers(row: DumpRow) -> list[Any]:
    return [as_number(value) for value in (row.max, row.min, row.mean, row.norm)]
