"""Writes graphs into a `.vis.db` file, which msprobe's TensorBoard plugin opens, with our verdicts."""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from trainermon.analysis.compare.comparison import Comparison, Mode
from trainermon.analysis.compare.items import DumpRow, DumpRows, read_rows
from trainermon.analysis.compare.merging.merge import read_sides
from trainermon.analysis.graph.calls import partner_key, read_calls
from trainermon.analysis.graph.database import schema
from trainermon.analysis.graph.database.tensors import Texts, compared_texts, plain_texts
from trainermon.analysis.graph.findings import NodeVerdict
from trainermon.analysis.graph.merged import calls_of_rows
from trainermon.analysis.graph.overflow import OverflowLevel, level_of
from trainermon.analysis.graph.reading import WHOLE_MODEL, DumpGraph
from trainermon.analysis.graph.tree import GraphKind, GraphNode, GraphTree, NodeSide, build_tree, number_nodes
from trainermon.core.errors import DumpError
from trainermon.dump.files.records import FORWARD, PARAMETERS_GRAD

_INDEXES = {
    NodeVerdict.PASS: schema.PASS,
    NodeVerdict.WARNING: schema.WARNING,
    NodeVerdict.ERROR: schema.ERROR,
    NodeVerdict.BLAMED: schema.ERROR,
}
_MODULES = (GraphKind.MODEL, GraphKind.MODULE, GraphKind.GRADIENTS)
_MODE = 0o640


class _Side(NamedTuple):
    """What is written of one dump.

    Attributes:
        source: `NPU` or `Bench`.
        step: Its step.
        rank: Its rank.
        tree: Its tree.
        precision: Precision index by the key of a call.
        links: Way to the counterpart by the key of a call.
        texts: Returns what a call took and gave.
        rows: What of it may be put together from several ranks, by the key of a call.
        stacks: Lines that made a call, by its key.
    """

    source: str
    step: int
    rank: int
    tree: GraphTree
    precision: Mapping[str, float]
    links: Mapping[str, list[str]]
    texts: Callable[[str], Texts]
    rows: Mapping[str, Sequence[DumpRow]]
    stacks: Mapping[str, Sequence[str]]


def write_database(path: Path, graphs: Iterable[DumpGraph], *, overflow: bool = False) -> None:
    """Write `graphs` into the new file `path` (0640), all of them compared or none; an old one is replaced at the end.

    `overflow` says whether the levels of overflow are in it. Costs one pass over the dumps. Each graph is taken when
    the one before is written.

    Raises:
        DumpError: It cannot be written, or a dump is damaged.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE))
        unfinished.chmod(_MODE)
        with closing(sqlite3.connect(unfinished)) as connection, connection:
            _fill(connection, graphs, overflow=overflow)
        unfinished.replace(path)
    except (OSError, sqlite3.Error) as error:
        unfinished.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) else error
        raise DumpError(f"cannot write {path} ({reason}): choose another file with -o") from error
    except BaseException:  # an interrupt too leaves no half file; it goes on
        unfinished.unlink(missing_ok=True)
        raise


def _fill(connection: sqlite3.Connection, graphs: Iterable[DumpGraph], *, overflow: bool) -> None:
    for table in schema.TABLES:
        connection.execute(schema.create_table(table))
    micro_steps, places = 1, []
    modes: list[Mode | None] = []
    for graph in graphs:
        for side in _sides(graph):
            stacks: dict[str, str] = {}
            rows = _rows(side, stacks, overflow=overflow)
            connection.executemany(schema.insert_row("tb_nodes"), rows)
            connection.executemany(schema.insert_row("tb_stack"), [(number, text) for text, number in stacks.items()])
        micro_steps = max(micro_steps, _num_micro_steps(graph.tree))
        places.append(_place(graph))
        modes.append(None if graph.comparison is None else graph.comparison.mode)
    kind, task = ("build", "") if modes[0] is None else ("compare", schema.TASKS[modes[0].value])
    tips, colours = ("", "null") if modes[0] is None else (json.dumps(schema.TIPS), json.dumps(schema.COLOURS))
    steps, ranks = (json.dumps(sorted(set(numbers))) for numbers in zip(*places, strict=True))
    row = ("1", kind, task, tips, micro_steps, int(overflow), colours, ranks, steps)
    connection.execute(schema.insert_row("tb_config"), row)
    for statement in schema.create_indexes():
        connection.execute(statement)


def _place(graph: DumpGraph) -> tuple[int, int]:
    """Return step and rank, which are numbers there."""
    return graph.step or 0, graph.rank or 0


def _sides(graph: DumpGraph) -> Iterator[_Side]:
    place, comparison = _place(graph), graph.comparison
    if comparison is None:
        rows = read_rows(graph.directory) if graph.whole is None else graph.whole
        items = {call.key: call.items for call in rows.calls}
        yield _Side(schema.TARGET, *place, graph.tree, {}, {}, partial(_of_key, plain_texts, items), {}, rows.stacks)
        return
    theirs_rows, golden = _golden(graph)
    pairs = [
        (ours, theirs)
        for one in comparison.calls
        if one.target and one.golden
        for ours, theirs in _members(comparison, one.target.key, one.golden.key)
    ]
    ways, golden_ways = _ways(graph.tree), _ways(golden)
    links = {ours: golden_ways[theirs] for ours, theirs in pairs}
    results = {
        key: call.rows
        for call in comparison.calls
        if call.target is not None
        for key in comparison.members_of(call.target.key)
    }
    precision, compared = _precision(graph, links), partial(_of_key, compared_texts, results)
    own = {key: [row.target for row in rows if row.target is not None] for key, rows in results.items()}
    yield _Side(schema.TARGET, *place, graph.tree, precision, links, compared, own, comparison.stacks)
    links = {theirs: ways[ours] for ours, theirs in pairs}
    items = {call.key: call.items for call in theirs_rows.calls}
    plain = partial(_of_key, plain_texts, items)
    yield _Side(schema.GOLDEN, *place, golden, {}, links, plain, items, theirs_rows.stacks)


def _golden(graph: DumpGraph) -> tuple[DumpRows, GraphTree]:
    """Return the rows and the tree of the golden side, put together as it was for the comparison."""
    assert graph.pair is not None
    if any(place.parts for place in graph.pair):
        _, rows, _ = read_sides(graph.pair.target, graph.pair.golden)
        return rows, number_nodes(build_tree(calls_of_rows(rows), WHOLE_MODEL))
    directory = graph.pair.golden.directory
    return read_rows(directory), number_nodes(build_tree(*read_calls(directory)))


def _members(comparison: Comparison, target: str, golden: str) -> Iterator[tuple[str, str]]:
    """Yield which calls are shown side by side where several were compared as one: the rest beside the last."""
    ours, theirs = comparison.members_of(target), comparison.members_of(golden)
    for at in range(max(len(ours), len(theirs))):
        yield ours[min(at, len(ours) - 1)], theirs[min(at, len(theirs) - 1)]


def _of_key(texts: Callable[[str, Sequence[Any]], Texts], known: Mapping[str, Sequence[Any]], key: str) -> Texts:
    return texts(key, known.get(key, ()))


def _precision(graph: DumpGraph, links: Mapping[str, object]) -> dict[str, float]:
    """Return the precision index of calls that have a counterpart; a parameter's verdict is its module's here."""
    found: dict[str, float] = {}
    for node, verdict in zip(graph.tree.nodes, graph.found.verdicts.tolist(), strict=True):
        if node.call is not None and node.call.key in links and verdict in _INDEXES:
            found[node.call.key] = max(found.get(node.call.key, schema.PASS), _INDEXES[NodeVerdict(verdict)])
    return found


def _ways(tree: GraphTree) -> dict[str, list[str]]:
    """Return the names from the root to each call, by its key."""
    found: dict[str, list[str]] = {}
    names: list[list[str]] = []
    for node, parent in zip(tree.nodes, tree.parents.tolist(), strict=True):
        way = names[parent] if parent >= 0 else [schema.ROOT]
        if _is_written(node):
            assert node.call is not None
            way = found[node.call.key] = [*way, node.call.key]
        names.append(way)
    return found


def _is_written(node: GraphNode) -> bool:
    return node.call is not None and not node.slot and node.side is not NodeSide.GOLDEN


def _rows(side: _Side, stacks: dict[str, str], *, overflow: bool) -> Iterator[tuple[object, ...]]:
    """Yield the rows of tb_nodes, a call behind those within it; add the stacks by their text."""
    ways, below = _ways(side.tree), _below(side.tree)
    graph = f"{side.source}_{side.step}_{side.rank}"
    for order, (node, micro_step) in enumerate(_ended(side.tree)):
        call = node.call
        name = schema.ROOT if call is None else call.key
        inputs, outputs = ({}, {}) if call is None else side.texts(name)
        stack = json.dumps(list(_stack(side, name)))
        level = level_of(call) if overflow and call and call.direction != PARAMETERS_GRAD else OverflowLevel.NONE
        link = [schema.ROOT] if call is None and side.links else side.links.get(name, [])
        yield (
            f"{graph}_{name}",
            graph,
            order,
            name,
            schema.MODULE if node.kind in _MODULES else schema.FUNCTION,
            "" if call is None else ways[name][-2],
            json.dumps(below[name]) if name in below else "",
            side.precision.get(name),
            level.name.lower() if level else None,
            micro_step,
            json.dumps(link),
            stacks.setdefault(stack, f"{graph}_{len(stacks)}"),
            _merge_info(side.rows.get(name, ())),
            "{}",
            0,
            json.dumps(inputs),
            json.dumps(outputs),
            side.source,
            "",
            side.step,
            side.rank,
            int(node.kind is GraphKind.COLLECTIVE),
        )


def _merge_info(rows: Sequence[DumpRow]) -> str:
    """Return from what ranks rows were put together, a line each; "" if they are one rank's."""
    merged = [f"{row.place} was put together from {row.merged}" for row in rows if row.merged]
    return json.dumps(merged) if merged else ""


def _below(tree: GraphTree) -> dict[str, list[str]]:
    """Return the keys of what runs directly within each call, and of the outermost calls."""
    found: dict[str, list[str]] = {}
    for key, way in _ways(tree).items():
        found.setdefault(way[-2], []).append(key)
    return found


def _ended(tree: GraphTree) -> Iterator[tuple[GraphNode, int]]:
    """Yield calls and the root as they ended, each with its micro step."""
    last = _num_micro_steps(tree) - 1
    sizes = tree.sizes.tolist()
    waiting: list[tuple[int, GraphNode, int]] = []
    micro_step = 0
    for place, node in enumerate(tree.nodes):
        while waiting and waiting[-1][0] <= place:
            yield waiting.pop()[1:]
        if node.kind is GraphKind.MICRO_STEP:
            number = _micro_step(node)
            micro_step = last if number is None else number
        if place == 0 or _is_written(node):
            waiting.append((place + sizes[place], node, micro_step if place else 0))
    while waiting:
        yield waiting.pop()[1:]


def _num_micro_steps(tree: GraphTree) -> int:
    numbers = [_micro_step(node) for node in tree.nodes if node.kind is GraphKind.MICRO_STEP]
    return 1 + max((number for number in numbers if number is not None), default=0)


def _micro_step(group: GraphNode) -> int | None:
    """Return which micro step a group of nodes is; None: what comes after the last."""
    number = group.name.rpartition(" ")[2]
    return int(number) if number.isdigit() else None


def _stack(side: _Side, key: str) -> Sequence[str]:
    """Return the lines that made a call; a backward's are its forward's."""
    return side.stacks.get(key) or side.stacks.get(partner_key(key, FORWARD), ())
