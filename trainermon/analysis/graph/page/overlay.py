"""Numbers of one's own, laid over the nodes of a graph: any measure by call, module or parameter, from a file."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainermon.analysis.graph.screen import path_of
from trainermon.analysis.graph.tree import GraphKind, GraphNode, GraphTree, NodeSide
from trainermon.core.errors import ConfigError
from trainermon.dump.files.records import FORWARD

MAX_BYTES = 64 << 20
_ENDINGS = (".json", ".csv")


@dataclass(frozen=True, slots=True)
class GraphOverlay:
    """Numbers by the names of what they belong to.

    Attributes:
        name: What they are.
        digest: Equal for equal files.
        values: A number by the key of a call, the path of a module (all its forwards), or the name of a parameter.
    """

    name: str
    digest: str
    values: Mapping[str, float] = field(repr=False)


def read_overlay(text: str) -> GraphOverlay:
    """Return the overlay that `NAME=FILE` names: a JSON object of numbers, or csv with two columns, name and number.

    The first line of a csv file may be a head.

    Raises:
        ConfigError: It is not of that form, or the file cannot be read.
    """
    name, _, file = text.partition("=")
    path = Path(file)
    if not name or path.suffix not in _ENDINGS:
        raise ConfigError(f"found the overlay {text!r}, expected NAME=FILE, a file that ends in .json or .csv")
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_BYTES >> 20} MiB, expected numbers by name")
        values = dict(_numbers(path, content.decode("utf-8-sig")))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): name another file with --overlay") from error
    return GraphOverlay(name, hashlib.blake2b(content, digest_size=8).hexdigest(), values)


def lay_over(tree: GraphTree, overlay: GraphOverlay) -> NDArray[np.float32]:
    """Return float32 [n]: the number of each node, infinite beyond float32; NaN: it has none.

    A key goes before a module's path.
    """
    found = np.full(len(tree.nodes), np.nan, np.float64)
    for place, node in enumerate(tree.nodes):
        if node.call is not None and node.side is not NodeSide.GOLDEN:
            found[place] = next((overlay.values[name] for name in _names(node) if name in overlay.values), math.nan)
    with np.errstate(over="ignore"):
        return found.astype(np.float32)


def describe_overlay(tree: GraphTree, overlay: GraphOverlay, values: NDArray[np.float32]) -> dict[str, Any]:
    """Return what `--json` says of the numbers `values` of the nodes: how many, those without a node, the largest."""
    places = np.flatnonzero(~np.isnan(values))
    names = {name for place in places for name in _names(tree.nodes[place])}
    found: dict[str, Any] = {"nodes": len(places), "unknown": len(overlay.values.keys() - names)}
    if len(places):
        largest = int(places[values[places].argmax()])
        value = float(values[largest])
        found["largest"] = {"path": path_of(tree, largest), "value": value if math.isfinite(value) else str(value)}
    return found


def overlay_line(name: str, known: Mapping[str, Any]) -> str:
    """Return what the screen says of an overlay, of which `describe_overlay` gave what is `known`."""
    if "largest" not in known:
        return f"{name}: none of its {known['unknown']:,} names is one of a call, a module or a parameter here"
    largest, unknown = known["largest"], known["unknown"]
    value = largest["value"] if isinstance(largest["value"], str) else f"{largest['value']:.3g}"
    more = f"; {unknown:,} names are none of this graph" if unknown else ""
    return f"{name}: {known['nodes']:,} nodes, the largest {value} at {largest['path']}{more}"


def _names(node: GraphNode) -> tuple[str, ...]:
    """Return what a node may be called in an overlay."""
    assert node.call is not None
    if node.kind is GraphKind.PARAMETER:
        return f"{node.call.key}.{node.slot}", f"{node.call.module}.{node.name}"
    if node.kind is GraphKind.MODULE and node.direction == FORWARD:
        return node.call.key, node.call.module
    return (node.call.key,)


def _numbers(path: Path, text: str) -> Iterator[tuple[str, float]]:
    if path.suffix == ".json":
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not JSON ({error}): expected an object of numbers by name") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{path} holds a {type(found).__name__}, expected an object of numbers by name")
        for name, value in found.items():
            yield name, _number(path, name, value)
        return
    for line, row in _rows(path, text):
        if len(row) != 2 and row:
            raise ConfigError(f"{path}, line {line}: found {len(row)} columns, expected a name and a number")
        if row and not (line == 1 and not _is_number(row[1])):
            yield row[0], _number(path, row[0], row[1])


def _rows(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the line where each row ends, and the row."""
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: {error}, expected a name and a number") from error


def _number(path: Path, name: str, value: Any) -> float:
    if value is None or isinstance(value, bool) or not _is_number(value):
        raise ConfigError(f"{path}: {name} is {value!r}, expected a number")
    return float(value)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True
