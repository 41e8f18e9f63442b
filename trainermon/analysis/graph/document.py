"""The graph of one dump as JSON."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np

from trainermon.analysis.graph.findings import GraphFindings, NodeVerdict
from trainermon.analysis.graph.flow import FlowSummary
from trainermon.analysis.graph.overflow import OverflowLevel, overflow_levels
from trainermon.analysis.graph.screen import path_of
from trainermon.analysis.graph.tree import GraphKind, GraphTree, numberless


def as_document(
    directory: Path, tree: GraphTree, found: GraphFindings, flow: FlowSummary, *, overflow: bool = False
) -> dict[str, Any]:
    """Return what `trainermon graph --json` prints of one dump, see docs/graph.md; levels only with `overflow`."""
    kinds = np.bincount([node.kind for node in tree.nodes], minlength=len(GraphKind)).tolist()
    verdicts = np.bincount(found.verdicts, minlength=len(NodeVerdict)).tolist()
    levels = np.bincount(overflow_levels(tree), minlength=len(OverflowLevel)).tolist() if overflow else []
    return {
        "dump": str(directory),
        "model": tree.nodes[0].name,
        "structure": structure_digest(tree),
        "sentence": found.sentence,
        "whole": found.whole,
        "nodes": {kind.name.lower(): kinds[kind] for kind in GraphKind},
        "verdicts": {verdict.name.lower(): verdicts[verdict] for verdict in NodeVerdict},
        **({"overflow": {one.name.lower(): levels[one] for one in OverflowLevel if one}} if overflow else {}),
        "edges": len(flow.edges),
        "values_taken": flow.num_taken,
        "values_from_outside": flow.num_entering,
        "findings": [
            {
                "key": _key(tree, one.node),
                "path": path_of(tree, one.node),
                "message": one.message,
                "error": None if math.isnan(found.errors[one.node]) else float(found.errors[one.node]),
            }
            for one in found.findings
        ],
    }


def structure_digest(tree: GraphTree) -> str:
    """Return 16 hexadecimal digits that are equal for models with the same modules, functions and order of them."""
    digest = hashlib.blake2b(digest_size=8)
    for node, size in zip(tree.nodes, tree.sizes.tolist(), strict=True):
        digest.update(f"{size}|{node.kind:d}|{node.class_name}|{node.direction}|{numberless(node.name)}\n".encode())
    return digest.hexdigest()


def _key(tree: GraphTree, place: int) -> str:
    call = tree.nodes[place].call
    return "" if call is None else call.key
