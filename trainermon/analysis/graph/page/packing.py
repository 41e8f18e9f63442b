"""The data of a graph's page: a JSON header, and columns over the nodes as little-endian arrays, of all its ranks.

What a rank brings is deflated once, by who has read its dump, and is only copied from then on: into the index, from one
process to another, into the page.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainermon.analysis.graph.findings import GraphFindings, worst_within
from trainermon.analysis.graph.flow import FlowSummary
from trainermon.analysis.graph.meetings import NO_MEETINGS, RankMeetings
from trainermon.analysis.graph.page.code import PageCode
from trainermon.analysis.graph.page.measures import measure
from trainermon.analysis.graph.tree import GraphTree
from trainermon.dashboards.graph_notes import NO_NOTES, GraphNotes
from trainermon.dump.files.records import BACKWARD, FORWARD

VERSION = 2
_ALIGNMENT = 8
_TYPES = {"uint8": "u8", "int32": "i32", "float32": "f32"}
_JSON = "json"
_DIRECTIONS = {"": 0, FORWARD: 1, BACKWARD: 2}
_RAW = -zlib.MAX_WBITS  # without a header and a checksum, so that pieces can stand one after the other
_LEVEL = 6
_MAX_KNOWN = 32


class DrawnRank(NamedTuple):
    """The graph of one dump, as the page has it beside those of other ranks and steps.

    Attributes:
        label: Step and rank, `step3 rank1`.
        dump: The folder.
        tree: The tree.
        found: What is wrong with it.
        flow: The edges.
        details: The tensors of nodes, by their index as text.
        lines: int32 [n]: numbers of the lines of code that made the nodes' calls; -1: not known.
        code: What those lines are.
        step: None: not known.
        rank: Likewise.
        axes: Where the rank stands in the job, as `tp 1, pp 0`; "": not known.
        golden: The folder of the dump that it was held against; "": none.
        level: How far ranks were put together, see `levels.py`.
        notes: What a reader should know of how it was compared.
        overlays: float32 [n] each: numbers of the nodes by their name; NaN: a node has none.
    """

    label: str
    dump: str
    tree: GraphTree
    found: GraphFindings
    flow: FlowSummary
    details: Mapping[str, Any]
    lines: NDArray[np.int32]
    code: PageCode
    step: int | None = None
    rank: int | None = None
    axes: str = ""
    golden: str = ""
    level: str = "each"
    notes: Sequence[str] = ()
    overlays: Mapping[str, NDArray[np.float32]] = MappingProxyType({})


class PackedColumn(NamedTuple):
    """A column of the page: numbers of its nodes, or JSON.

    Attributes:
        type: `u8`, `i32`, `f32` or `json`.
        num_items: How many numbers; bytes of JSON.
        size: Bytes before it was deflated, a multiple of 8.
        digest: Equal for equal columns.
        content: Its bytes, deflated so that what stands before or behind it does not matter.
    """

    type: str
    num_items: int
    size: int
    digest: str
    content: bytes


class PackedRank(NamedTuple):
    """The graph of one dump, ready to be copied into a page.

    Attributes:
        num_nodes: How many nodes it has.
        member: What the page's header says of it.
        skeleton: What it has in common with ranks whose model is built alike: tree and edges.
        columns: What is its own.
        excerpts: The code around its lines, by a frame's text.
    """

    num_nodes: int
    member: Mapping[str, Any]
    skeleton: Mapping[str, PackedColumn]
    columns: Mapping[str, PackedColumn]
    excerpts: Mapping[str, Any]


class _Body:
    """Columns one after the other; equal ones are there once."""

    def __init__(self) -> None:
        self.contents: list[bytes] = []
        self._size = 0
        self._offsets: dict[str, int] = {}

    def add(self, columns: Mapping[str, PackedColumn]) -> dict[str, Any]:
        """Add columns; return where each stands."""
        return {
            name: {"type": column.type, "offset": self._place(column), "count": column.num_items}
            for name, column in columns.items()
        }

    def _place(self, column: PackedColumn) -> int:
        if column.digest not in self._offsets:
            self._offsets[column.digest] = self._size
            self._size += column.size
            self.contents.append(column.content)
        return self._offsets[column.digest]


def pack_rank(rank: DrawnRank) -> PackedRank:
    """Return what the page has of a rank. Costs a few passes over its nodes, and to deflate some 50 bytes for each."""
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
        "overlay_values": np.concatenate([*rank.overlays.values(), np.zeros(0, np.float32)]),
    }
    member = {
        "label": rank.label,
        "step": rank.step,
        "rank": rank.rank,
        "axes": rank.axes,
        "level": rank.level,
        "remarks": list(rank.notes),
        "golden_dump": rank.golden,
        "dtype_names": measures.names,
        "overlays": list(rank.overlays),
        "dump": rank.dump,
        "sentence": found.sentence,
        "findings": [{"node": one.node, "message": one.message} for one in found.findings],
    }
    texts = {"details": rank.details, "line_texts": list(rank.code.lines)}
    return PackedRank(
        num_nodes=len(rank.tree.nodes),
        member=member,
        skeleton=_skeleton(rank),
        columns=_numbers(columns) | {name: _json(value) for name, value in texts.items()},
        excerpts=rank.code.excerpts,
    )


def pack(  # noqa: PLR0913  # what the page shows, and what it may do
    ranks: Sequence[PackedRank],
    meetings: Sequence[RankMeetings] = (),
    golden: str = "",
    *,
    served: bool = False,
    first: int = 0,
    notes: GraphNotes = NO_NOTES,
    keeps_notes: bool = False,
) -> bytes:
    """Return, deflated, what `skeleton.js` unpacks: uint32 length, JSON header, padding to 8, columns aligned to 8.

    What ranks have in common, tree and edges, is there once for all that have the same; so is any column, so that equal
    offsets mean equal columns. `golden` is the folder that they were held against. Where the page is `served`, it asks
    for details that it has not by their number: that of the node, counted through all ranks. `meetings` are the
    collectives of each rank that others took part in; `first` is the place of the rank that is shown first. A
    page that `keeps_notes` sends what is written at nodes to its server.
    """
    body = _Body()
    skeletons: dict[tuple[str, ...], int] = {}
    known: list[dict[str, Any]] = []
    members: list[dict[str, Any]] = []
    excerpts: dict[str, Any] = {}
    num_details = 0
    for rank, met in zip(ranks, meetings or [NO_MEETINGS] * len(ranks), strict=True):
        built_as = tuple(column.digest for column in rank.skeleton.values())
        if built_as not in skeletons:
            skeletons[built_as] = len(known)
            known.append({"columns": body.add(rank.skeleton)})
        columns = _numbers({"meeting_nodes": met.nodes, "meeting_numbers": met.numbers})
        place = {
            "skeleton": skeletons[built_as],
            "first_detail": num_details,
            "columns": body.add({**rank.columns, **columns}),
        }
        members.append({**rank.member, **place})
        excerpts = {**rank.excerpts, **excerpts}
        num_details += rank.num_nodes
    head = {
        "version": VERSION,
        "golden": golden,
        "first": first,
        "served": served,
        "notes": notes.as_json(),
        "keeps_notes": keeps_notes,
        "code": excerpts,
        "skeletons": known,
        "members": members,
    }
    text = _as_json(head)
    end = zlib.compressobj(wbits=_RAW).flush()
    return b"".join((_deflated(struct.pack("<I", len(text)) + text), *body.contents, end))


def as_number(value: Any) -> float | int | str | None:
    """Return a statistic as JSON knows it: what is not finite becomes text."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return None if value is None else str(value)
    return value if math.isfinite(value) else "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"


def _skeleton(rank: DrawnRank) -> dict[str, PackedColumn]:
    """Return what says how a tree is built: names and classes are once each in `texts`; keys by node."""
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
    return _numbers(columns) | {"texts": _json(list(known)), "keys": _json(keys)}


def _bytes(values: Iterable[int]) -> NDArray[np.uint8]:
    return np.fromiter(values, np.uint8)


def _numbers(columns: Mapping[str, NDArray[Any]]) -> dict[str, PackedColumn]:
    return {name: _packed(_TYPES[one.dtype.name], len(one), _raw(one)) for name, one in columns.items()}


def _json(value: Any) -> PackedColumn:
    raw = _as_json(value)
    return _packed(_JSON, len(raw), raw)


def _packed(kind: str, count: int, raw: bytes) -> PackedColumn:
    digest = hashlib.blake2b(raw, digest_size=16).hexdigest()
    return PackedColumn(kind, count, len(raw) + -len(raw) % _ALIGNMENT, digest, _deflated(raw))


@lru_cache(maxsize=_MAX_KNOWN)
def _deflated(raw: bytes) -> bytes:
    """Return `raw`, padded, as a part of a deflate stream that neither needs what is before it nor ends the stream.

    Ranks that are built alike have most of it in common: what was deflated last stays.
    """
    packer = zlib.compressobj(_LEVEL, wbits=_RAW)
    return packer.compress(raw + bytes(-len(raw) % _ALIGNMENT)) + packer.flush(zlib.Z_FULL_FLUSH)


def _as_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _raw(column: NDArray[Any]) -> bytes:
    return column.astype(column.dtype.newbyteorder("<"), copy=False).tobytes()
