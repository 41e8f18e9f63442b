"""The data of a graph's page: a JSON header, and columns over the nodes as little-endian arrays, of all its ranks.

Each column is a piece of its own, which the page unpacks when it needs it. It is packed once, by who has read its dump,
and is only copied from then on: into the index, from one process to another, into the page.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainermon.analysis.graph.findings import GraphFindings
from trainermon.analysis.graph.flow import FlowSummary
from trainermon.analysis.graph.meetings import NO_MEETINGS, RankMeetings
from trainermon.analysis.graph.overflow import overflow_levels
from trainermon.analysis.graph.page.code import PageCode
from trainermon.analysis.graph.page.measures import measure
from trainermon.analysis.graph.tree import GraphTree
from trainermon.dashboards.graph_notes import NO_NOTES, GraphNotes
from trainermon.dump.files.records import BACKWARD, FORWARD

VERSION = 3
STRIP_CELLS = 2048
"""The line of a rank in the map of the step has at most so many cells."""
_TYPES = {"uint8": "u8", "int32": "i32", "float32": "f32"}
_JSON = "json"
_DIRECTIONS = {"": 0, FORWARD: 1, BACKWARD: 2}
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
        digest: Equal for equal columns.
        content: Its bytes, packed by gzip.
    """

    type: str
    num_items: int
    digest: str
    content: bytes


class PackedRank(NamedTuple):
    """The graph of one dump, ready to be copied into a page.

    Attributes:
        num_nodes: How many nodes it has.
        member: What the page's header says of it.
        skeleton: What it has in common with ranks whose model is built alike: tree and edges.
        verdicts: How its nodes are judged, which the page needs of all ranks.
        columns: What else is its own, which the page needs while it is shown.
        excerpts: The code around its lines, by a frame's text.
    """

    num_nodes: int
    member: Mapping[str, Any]
    skeleton: Mapping[str, PackedColumn]
    verdicts: Mapping[str, PackedColumn]
    columns: Mapping[str, PackedColumn]
    excerpts: Mapping[str, Any]


COLUMNS = ("skeleton", "verdicts", "columns")
"""The attributes of a `PackedRank` that are columns by name."""


class PackedPage(NamedTuple):
    """The data of a page.

    Attributes:
        head: The header, packed by gzip.
        pieces: The columns, each packed by gzip, by the numbers that the header names; those of the rank that is shown
            first before the others.
        num_first: How many of them that rank needs.
    """

    head: bytes
    pieces: Sequence[bytes]
    num_first: int


class _Pieces:
    """Columns with their numbers; equal ones have the same."""

    def __init__(self) -> None:
        self.contents: list[bytes] = []
        self._numbers: dict[str, int] = {}

    def add(self, columns: Mapping[str, PackedColumn]) -> dict[str, Any]:
        """Add columns; return what the header says of each."""
        return {
            name: {"type": column.type, "count": column.num_items, "piece": self._number(column)}
            for name, column in columns.items()
        }

    def _number(self, column: PackedColumn) -> int:
        if column.digest not in self._numbers:
            self._numbers[column.digest] = len(self.contents)
            self.contents.append(column.content)
        return self._numbers[column.digest]


def pack_rank(rank: DrawnRank) -> PackedRank:
    """Return what the page has of a rank. Costs a few passes over its nodes, and to deflate some 30 bytes for each."""
    found, measures = rank.found, measure(rank.tree)
    columns: dict[str, NDArray[Any]] = {
        "errors": found.errors.astype(np.float32),
        "norms": measures.norms,
        "growths": measures.growths,
        "num_bytes": measures.num_bytes,
        "dtypes": measures.dtypes,
        "lines": rank.lines,
        "overflow": overflow_levels(rank.tree),
        "overlay_values": np.concatenate([*rank.overlays.values(), np.zeros(0, np.float32)]),
    }
    known = found.errors[~np.isnan(found.errors)]
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
        "worst_verdict": int(found.verdicts.max()),
        "worst_error": as_number(float(known.max())) if known.size else None,
        "strip": strip_of(found.verdicts),
    }
    texts = {"details": rank.details, "line_texts": list(rank.code.lines)}
    return PackedRank(
        num_nodes=len(rank.tree.nodes),
        member=member,
        skeleton=rank.tree.worked_out("skeleton", lambda: _skeleton(rank)),
        verdicts=pack_columns({"verdicts": found.verdicts, "nonfinite": found.nonfinite.astype(np.uint8)}),
        columns=pack_columns(columns) | {name: _json(value) for name, value in texts.items()},
        excerpts=rank.code.excerpts,
    )


def strip_of(verdicts: NDArray[np.uint8]) -> str:
    """Return the worst verdict of each of up to `STRIP_CELLS` equal stretches of the step, a digit each.

    >>> strip_of(np.array([1, 1, 5, 1], np.uint8))
    '1151'
    """
    count = min(len(verdicts), STRIP_CELLS)
    starts = np.arange(count) * len(verdicts) // count
    return (np.maximum.reduceat(verdicts, starts) + ord("0")).astype(np.uint8).tobytes().decode()


def pack(  # noqa: PLR0913  # what the page shows, and what it may do
    ranks: Sequence[PackedRank],
    meetings: Sequence[RankMeetings] = (),
    golden: str = "",
    *,
    served: bool = False,
    first: int = 0,
    notes: GraphNotes = NO_NOTES,
    keeps_notes: bool = False,
) -> PackedPage:
    """Return what `store.js` reads.

    What ranks have in common, tree and edges, is there once for all that have the same; so is any column, so that equal
    numbers of pieces mean equal columns. `golden` is the folder that they were held against. Where the page is
    `served`, it asks for pieces and details that it has not by their number: that of a detail is the node's, counted
    through all ranks. `meetings` are the collectives of each rank that others took part in; `first` is the place of the
    rank that is shown first. A page that `keeps_notes` sends what is written at nodes to its server.
    """
    pieces = _Pieces()
    code = _json({frame: part for rank in reversed(ranks) for frame, part in rank.excerpts.items()})
    placed: dict[int, dict[str, Any]] = {}
    skeletons: dict[tuple[str, ...], int] = {}
    known: list[dict[str, Any]] = []
    met = meetings or [NO_MEETINGS] * len(ranks)
    ends = list(accumulate(rank.num_nodes for rank in ranks))
    num_first = 0
    for place in (first, *range(first), *range(first + 1, len(ranks))):
        rank = ranks[place]
        built_as = tuple(column.digest for column in rank.skeleton.values())
        if built_as not in skeletons:
            skeletons[built_as] = len(known)
            known.append({"count": rank.num_nodes, "columns": pieces.add(rank.skeleton)})
        met_by = pack_columns({"meeting_nodes": met[place].nodes, "meeting_numbers": met[place].numbers})
        placed[place] = {
            "skeleton": skeletons[built_as],
            "first_detail": ends[place] - rank.num_nodes,
            "verdicts": pieces.add({**rank.verdicts, **met_by}),
            "columns": pieces.add(rank.columns),
        }
        if place == first:
            code_at = pieces.add({"code": code})["code"]
            num_first = len(pieces.contents)
    head = {
        "version": VERSION,
        "golden": golden,
        "first": first,
        "served": served,
        "notes": notes.as_json(),
        "keeps_notes": keeps_notes,
        "code": code_at,
        "skeletons": known,
        "members": [{**rank.member, **placed[place]} for place, rank in enumerate(ranks)],
    }
    return PackedPage(_packed(_as_json(head)), pieces.contents, num_first)


def as_number(value: Any) -> float | int | str | None:
    """Return a statistic as JSON knows it: what is not finite becomes text."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return None if value is None else str(value)
    return value if math.isfinite(value) else "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"


def _skeleton(rank: DrawnRank) -> dict[str, PackedColumn]:
    """Return what says how a tree is built: names and classes are once each in `texts`; keys by node.

    Edges are in order of their consumers: how far each is behind the one before, and how far back its producer is.
    """
    tree, flow = rank.tree, rank.flow
    known: dict[str, int] = {}
    consumers = np.array([edge.consumer for edge in flow.edges], np.int32)
    producers = np.array([edge.producer for edge in flow.edges], np.int32)
    keys = [b"" if node.call is None else node.call.key.encode(errors="replace") for node in tree.nodes]
    columns: dict[str, NDArray[Any]] = {
        "sizes": tree.sizes,
        "structures": tree.structures,
        "names": np.array([known.setdefault(node.name, len(known)) for node in tree.nodes], np.int32),
        "classes": np.array([known.setdefault(node.class_name, len(known)) for node in tree.nodes], np.int32),
        "kinds": _bytes(node.kind for node in tree.nodes),
        "directions": _bytes(_DIRECTIONS[node.direction] for node in tree.nodes),
        "sides": _bytes(node.side for node in tree.nodes),
        "edge_gaps": np.diff(consumers, prepend=np.int32(0)),
        "edge_lengths": consumers - producers,
        "exact": _bytes(edge.is_exact for edge in flow.edges),
        "key_lengths": np.array([len(key) for key in keys], np.int32),
        "keys": np.frombuffer(b"".join(keys), np.uint8),
    }
    return pack_columns(columns) | {"texts": _json(list(known))}


def pack_columns(columns: Mapping[str, NDArray[Any]]) -> dict[str, PackedColumn]:
    """Return columns of uint8, int32 or float32, packed, by their names."""
    return {name: _column(_TYPES[one.dtype.name], len(one), _raw(one)) for name, one in columns.items()}


def _bytes(values: Iterable[int]) -> NDArray[np.uint8]:
    return np.fromiter(values, np.uint8)


def _json(value: Any) -> PackedColumn:
    raw = _as_json(value)
    return _column(_JSON, len(raw), raw)


def _column(kind: str, count: int, raw: bytes) -> PackedColumn:
    digest = hashlib.blake2b(raw, digest_size=16, person=kind.encode()).hexdigest()
    return PackedColumn(kind, count, digest, _packed(raw))


@lru_cache(maxsize=_MAX_KNOWN)
def _packed(raw: bytes) -> bytes:
    """Return `raw` packed by gzip. Ranks that are built alike have most in common: what was packed last stays."""
    return gzip.compress(raw, _LEVEL, mtime=0)


def _as_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _raw(column: NDArray[Any]) -> bytes:
    return column.astype(column.dtype.newbyteorder("<"), copy=False).tobytes()
