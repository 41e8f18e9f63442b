"""The data of a graph's page: a JSON header, and columns over the nodes as little-endian arrays, of all its ranks."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainermon.analysis.graph.findings import GraphFindings, worst_within
from trainermon.analysis.graph.flow import FlowSummary
from trainermon.analysis.graph.meetings import NO_MEETINGS, RankMeetings
from trainermon.analysis.graph.page.code import PageCode
from trainermon.analysis.graph.page.measures import measure
from trainermon.analysis.graph.tree import GraphTree
from trainermon.dump.files.records import BACKWARD, FORWARD

VERSION = 1
_ALIGNMENT = 8
_TYPES = {"uint8": "u8", "int32": "i32", "float32": "f32"}
_DIRECTIONS = {"": 0, FORWARD: 1, BACKWARD: 2}


class PackedRank(NamedTuple):
    """The graph of one dump, as the page has it beside those of other ranks and steps.

    Attributes:
        label: Step and rank, `step3 rank1`.
        dump: The folder.
        tree: The tree.
        found: What is wrong with it.
        flow: The edges.
        details: The tensors of nodes, by their index as text.
        lines: int32 [n]: numbers of the lines of code that made the nodes' calls; -1: not known.
        step: None: not known.
        rank: Likewise.
        axes: Where the rank stands in the job, as `tp 1, pp 0`; "": not known.
        golden: The folder of the dump that it was held against; "": none.
        level: How far ranks were put together, see `levels.py`.
        notes: What a reader should know of how it was compared.
        meetings: Its collectives that other ranks took part in.
    """

    label: str
    dump: str
    tree: GraphTree
    found: GraphFindings
    flow: FlowSummary
    details: Mapping[str, Any]
    lines: NDArray[np.int32]
    step: int | None = None
    rank: int | None = None
    axes: str = ""
    golden: str = ""
    level: str = "each"
    notes: Sequence[str] = ()
    meetings: RankMeetings = NO_MEETINGS


class ColumnBody:
    """Columns one after the other; equal ones are there once."""

    def __init__(self) -> None:
        self.content = bytearray()
        self._offsets: dict[bytes, int] = {}

    def add(self, columns: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        """Add columns; return where each stands."""
        return {
            name: {"type": _TYPES[column.dtype.name], "offset": self._place(_raw(column)), "count": len(column)}
            for name, column in columns.items()
        }

    def _place(self, raw: bytes) -> int:
        digest = hashlib.blake2b(raw).digest()
        if digest not in self._offsets:
            self._offsets[digest] = len(self.content)
            self.content += raw + bytes(-len(raw) % _ALIGNMENT)
        return self._offsets[digest]


def pack(
    ranks: Sequence[PackedRank], code: PageCode, golden: str = "", *, served: bool = False, first: int = 0
) -> bytes:
    """Return the bytes that `skeleton.js` unpacks: uint32 length, JSON header, padding to 8, columns aligned to 8.

    `code` is that of all ranks. What ranks have in common, tree and edges, is there once for all that have the same; so
    is any column, so that equal offsets mean equal columns. `golden` is the folder that they were held against. Where
    the page is `served`, it asks for details that it has not by their number: that of the node, counted through all
    ranks. `first` is the place of the rank that is shown first.
    """
    body = ColumnBody()
    skeletons: dict[bytes, int] = {}
    known: list[dict[str, Any]] = []
    members: list[dict[str, Any]] = []
    num_details = 0
    for rank in ranks:
        columns, texts = _skeleton(rank)
        digest = hashlib.blake2b(b"".join(map(_raw, columns.values())) + json.dumps(texts).encode()).digest()
        if digest not in skeletons:
            skeletons[digest] = len(known)
            known.append({**texts, "columns": body.add(columns)})
        members.append({**_member(rank, skeletons[digest], body), "first_detail": num_details})
        num_details += len(rank.tree.nodes)
    head = {
        "version": VERSION,
        "golden": golden,
        "first": first,
        "served": served,
        "line_texts": list(code.lines),
        "code": code.excerpts,
        "skeletons": known,
        "members": members,
    }
    text = json.dumps(head, separators=(",", ":"), allow_nan=False).encode()
    return struct.pack("<I", len(text)) + text + bytes(-(4 + len(text)) % _ALIGNMENT) + bytes(body.content)


def as_number(value: Any) -> float | int | str | None:
    """Return a statistic as JSON knows it: what is not finite becomes text."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return None if value is None else str(value)
    return value if math.isfinite(value) else "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"


def _member(rank: PackedRank, skeleton: int, body: ColumnBody) -> dict[str, Any]:
    found, measures = rank.found, measure(rank.tree.nodes)
    columns: dict[str, NDArray[Any]] = {
        "verdicts": found.verdicts,
        "worst": worst_within(rank.tree, found.verdicts),
        "nonfinite": found.nonfinite.astype(np.uint8),
        "errors": found.errors.astype(np.float32),
        "norms": measures.norms,
        "growths": measures.growths,
        "num_bytes": measures.num_bytes,
        "dtypes": measures.dtypes,
        "lines": rank.lines,
        "meeting_nodes": rank.meetings.nodes,
        "meeting_numbers": rank.meetings.numbers,
    }
    return {
        "label": rank.label,
        "step": rank.step,
        "rank": rank.rank,
        "axes": rank.axes,
        "level": rank.level,
        "notes": list(rank.notes),
        "golden_dump": rank.golden,
        "dtype_names": measures.names,
        "dump": rank.dump,
        "skeleton": skeleton,
        "sentence": found.sentence,
        "findings": [{"node": one.node, "message": one.message} for one in found.findings],
        "details": rank.details,
        "columns": body.add(columns),
    }


def _skeleton(rank: PackedRank) -> tuple[dict[str, NDArray[Any]], dict[str, list[str]]]:
    """Return what says how a tree is built, as columns and as texts: names and classes once each, keys by node."""
    tree, flow = rank.tree, rank.flow
    known: dict[str, int] = {}
    columns: dict[str, NDArray[Any]] = {
        "sizes": tree.sizes,
        "parents": tree.parents,
        "structures": tree.structures,
        "names": np.array([known.setdefault(node.name, len(known)) for node in tree.nodes], np.int32),
        "classes": np.array([known.setdefault(node.class_name, len(known)) for node in tree.nodes], np.int32),
        "kinds": _bytes(node.kind for node in tree.nodes),
        "directions": _bytes(_DIRECTIONS[node.direction] for node in tree.nodes),
        "sides": _bytes(node.side for node in tree.nodes),
        "producers": np.array([edge.producer for edge in flow.edges], np.int32),
        "consumers": np.array([edge.consumer for edge in flow.edges], np.int32),
        "exact": _bytes(edge.is_exact for edge in flow.edges),
    }
    keys = ["" if node.call is None else node.call.key for node in tree.nodes]
    return columns, {"texts": list(known), "keys": keys}


def _bytes(values: Iterable[int]) -> NDArray[np.uint8]:
    return np.fromiter(values, np.uint8)


def _raw(column: NDArray[Any]) -> bytes:
    return column.astype(column.dtype.newbyteorder("<"), copy=False).tobytes()
