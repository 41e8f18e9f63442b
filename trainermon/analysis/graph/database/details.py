"""The tensors of single calls of a `.vis.db` file, as the page shows them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from trainermon.analysis.graph.calls import GraphCall
from trainermon.analysis.graph.database.marks import first_message, relative_error
from trainermon.analysis.graph.database.reading import is_tensor, number, opened
from trainermon.analysis.graph.database.schema import GOLDEN, TARGET
from trainermon.analysis.graph.page.details import NodeDetails
from trainermon.analysis.graph.page.packing import as_number
from trainermon.analysis.graph.tree import GraphTree, NodeSide

_NODE = """
SELECT input_data, output_data, matched_node_link FROM tb_nodes
WHERE step = ? AND rank = ? AND data_source = ? AND node_name = ?
"""
_STACKS = """
SELECT node_name, parallel_merge_info, stack_info FROM tb_nodes LEFT JOIN tb_stack ON tb_stack.id = stack_id
WHERE step = ? AND rank = ? AND data_source = ?
"""


def details_of_database(tree: GraphTree, path: Path, step: int, rank: int) -> NodeDetails:
    """Return the details of one graph of the file `path`, each looked up when it is asked for.

    How the tensors of ranks were merged stands above the lines that made a call.
    """

    def rows(call: GraphCall, side: NodeSide) -> list[dict[str, Any]]:
        source = GOLDEN if side is NodeSide.GOLDEN else TARGET
        ours, link = _forms(path, step, rank, source, call.key)
        theirs = _forms(path, step, rank, GOLDEN, link[-1])[0] if source == TARGET and link else {}
        return [_row(place, form, theirs.get(place)) for place, form in ours.items()]

    return NodeDetails(tree, rows, cache(lambda: _stacks(path, step, rank)))


def _forms(path: Path, step: int, rank: int, source: str, key: str) -> tuple[dict[str, Any], Sequence[str]]:
    """Return what a node took and gave, by place; and the way to its counterpart."""
    with opened(path) as connection:
        found = connection.execute(_NODE, (step, rank, source, key)).fetchone() or ("", "", "")
        inputs, outputs, link = (json.loads(text) if text else {} for text in found)
        return {place[len(key) + 1 :]: form for place, form in {**inputs, **outputs}.items()}, link or ()


def _stacks(path: Path, step: int, rank: int) -> Mapping[str, Sequence[str]]:
    with opened(path) as connection:
        found = connection.execute(_STACKS, (step, rank, TARGET))
        return {key: [str(text) for part in parts if part for text in json.loads(part)] for key, *parts in found}


def _row(place: str, form: Mapping[str, Any], golden: Mapping[str, Any] | None) -> dict[str, Any]:
    error = relative_error(form)
    shown = form.get("shape", "") if is_tensor(form) else ""
    return {
        "place": place,
        "kind": f"{str(form.get('dtype', '')).rpartition('.')[2]}{shown}",
        "ours": _numbers(form),
        "golden": golden and _numbers(golden),
        "error": None if math.isnan(error) else as_number(error),
        "result": form.get("Result", ""),
        "message": first_message(form),
    }


def _numbers(form: Mapping[str, Any]) -> list[Any]:
    return [as_number(number(str(form.get(name)))) for name in ("Max", "Min", "Mean", "Norm")]
