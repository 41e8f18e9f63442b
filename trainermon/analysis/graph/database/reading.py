"""Reads the graphs in a `.vis.db` file: build, compare and merged ones become the tree that their dumps would."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from trainermon.analysis.graph.calls import GraphCall, settle_calls
from trainermon.analysis.graph.database.marks import CallMarks, find_marked, find_nonfinite, marks_of
from trainermon.analysis.graph.database.schema import COLLECTION, GOLDEN, TARGET
from trainermon.analysis.graph.findings import GraphFindings
from trainermon.analysis.graph.tree import GraphTree, build_tree, number_nodes
from trainermon.analysis.graph.union import join_trees
from trainermon.analysis.graph.values import GraphValue, ValueUse, value_of
from trainermon.core.errors import DumpError
from trainermon.dump.files.reader import split_key, well_formed
from trainermon.dump.files.records import PARAMETERS_GRAD

_NODES = """
SELECT node_name, node_type, up_node, precision_index, micro_step_id, matched_node_link, input_data, output_data
FROM tb_nodes WHERE step = ? AND rank = ? AND data_source = ? ORDER BY node_order
"""
_HELD = "parameters."


class DatabaseGraph(NamedTuple):
    """One graph of a `.vis.db` file.

    Attributes:
        step: Its step.
        rank: Its rank; of a merged graph the first one.
        tree: The calls of the target, and of the golden dump where that was compared.
        found: What the file says of them.
    """

    step: int
    rank: int
    tree: GraphTree
    found: GraphFindings

    @property
    def label(self) -> str:
        """Step and rank, as dumps have them."""
        return f"step{self.step} rank{self.rank}"


class DatabaseNode(NamedTuple):
    """A row of tb_nodes, as far as it is read."""

    name: str
    kind: str
    parent: str
    precision: float | None
    micro_step: int
    link: str
    inputs: str
    outputs: str


def database_places(path: Path, *, step: int | None = None, rank: int | None = None) -> list[tuple[int, int]]:
    """Return step and rank of the graphs of the file `path`; only those of `step` and `rank`, where they are given.

    Raises:
        DumpError: It is no such file, or has no such graph.
    """
    with opened(path) as connection:
        places = connection.execute("SELECT DISTINCT step, rank FROM tb_nodes ORDER BY step, rank").fetchall()
    wanted = [place for place in places if step in (None, place[0]) and rank in (None, place[1])]
    if not wanted:
        names = ", ".join(f"step{one} rank{other}" for one, other in places)
        raise DumpError(f"{path} has no graph of that step and rank: expected one of {names}")
    return wanted


def read_database(path: Path, *, step: int, rank: int) -> DatabaseGraph:
    """Return the graph of `step` and `rank` of the file `path`.

    Raises:
        DumpError: It is no such file, or damaged.
    """
    with opened(path) as connection:
        graph_type, micro_steps = connection.execute("SELECT graph_type, micro_steps FROM tb_config").fetchone()
        nodes = _nodes(connection, (step, rank), TARGET)
        golden = _nodes(connection, (step, rank), GOLDEN) if graph_type == "compare" else None
        return _graph((step, rank), nodes, golden, is_numbered=micro_steps > 1)


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Return a context with the file `path`, which is only read.

    Raises:
        DumpError: It is no `.vis.db` file, or its rows are damaged; also what goes wrong with it within the block.
    """
    if not path.is_file():
        raise DumpError(f"{path} is no file")
    journal = path.with_name(f"{path.name}-wal")
    # Where nobody writes, nothing but the file itself is needed: its folder may be one that cannot be written to.
    mode = "mode=ro" if journal.exists() and journal.stat().st_size else "mode=ro&immutable=1"
    try:
        with (
            well_formed(path),
            closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?{mode}", uri=True)) as connection,
        ):
            yield connection
    except sqlite3.Error as error:
        raise DumpError(
            f"{path} is no graph of msprobe's ({error}): expected a .vis.db file with the tables of msprobe 26.2"
        ) from error


def _nodes(connection: sqlite3.Connection, place: tuple[int, int], source: str) -> dict[str, DatabaseNode]:
    rows = connection.execute(_NODES, (*place, source))
    return {row[0]: DatabaseNode(*row) for row in rows}


def _graph(
    place: tuple[int, int],
    nodes: Mapping[str, DatabaseNode],
    golden: Mapping[str, DatabaseNode] | None,
    *,
    is_numbered: bool,
) -> DatabaseGraph:
    calls, root_class = _calls(nodes, is_numbered=is_numbered)
    root = build_tree(calls, root_class)
    if golden is not None:
        partners = {link[-1]: (name,) for name, node in nodes.items() if name in calls and (link := _json(node.link))}
        join_trees(root, build_tree(*_calls(golden, is_numbered=is_numbered)), partners)
    tree = number_nodes(root)
    marks: dict[str, CallMarks] = {
        name: marks_of(node.precision, _json(node.inputs), _json(node.outputs)) for name, node in nodes.items()
    }
    found = find_nonfinite(tree) if golden is None else find_marked(tree, marks)
    return DatabaseGraph(*place, tree, found)


def _calls(nodes: Mapping[str, DatabaseNode], *, is_numbered: bool) -> tuple[dict[str, GraphCall], str]:
    """Return the calls by key, without rows of functions between modules, as a node of the graph; and the root."""
    root = next((name for name, node in nodes.items() if not node.parent), "model")
    groups = {root, *(name for name, node in nodes.items() if node.kind == COLLECTION)}
    calls = {}
    for position, (name, node) in enumerate(nodes.items()):
        if name in groups:
            continue
        module, class_name, direction, number = split_key(name)
        known = number if direction == PARAMETERS_GRAD else node.micro_step if is_numbered else None
        calls[name] = GraphCall(
            key=name,
            module=module,
            class_name=class_name,
            direction=direction,
            number=number,
            began=(0, position),
            micro_step=known,
            parent=None if node.parent in groups else node.parent,
            values=list(_values(node, direction)),
            start=0,
            length=0,
        )
    settle_calls(calls)
    return calls, root


def _values(node: DatabaseNode, direction: str) -> Iterator[GraphValue]:
    for text, use in ((node.inputs, ValueUse.TAKEN), (node.outputs, ValueUse.GIVEN)):
        for place, form in _json(text).items():
            slot = place[len(node.name) + 1 :]
            if is_tensor(form):
                held = slot.startswith(_HELD)
                of = ValueUse.GIVEN if direction == PARAMETERS_GRAD else ValueUse.HELD if held else use
                yield value_of(of, slot, {name: _plain(name, value) for name, value in form.items()})


def is_tensor(form: Any) -> bool:
    """Whether what a node took or gave is a tensor, not a plain argument."""
    return isinstance(form, dict) and str(form.get("type")).endswith("Tensor") and "shape" in form


def _plain(name: str, value: str) -> Any:
    """Return what is written as text."""
    if name == "shape":
        return json.loads(value)
    return number(value) if name in ("Max", "Min", "Mean", "Norm") else value


def number(text: str) -> float | int | None:
    """Return a statistic, which is written as text; None where there is none.

    >>> number("5"), number("0.5"), number("null"), number("-inf")
    (5, 0.5, None, -inf)
    """
    try:
        value = float(text)
    except ValueError:
        return None
    return int(text) if math.isfinite(value) and text.lstrip("-").isdigit() else value


def _json(text: str | None) -> Any:
    return json.loads(text) if text else {}
