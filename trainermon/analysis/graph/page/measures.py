"""What a node can be coloured by beside its verdict: size, norm, growth and type of what it gives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainermon.analysis.graph.tree import GraphKind, GraphNode
from trainermon.analysis.graph.values import GraphValue, ValueUse


class NodeMeasures(NamedTuple):
    """Measures of the largest tensor that each node gives; of a parameter, of itself.

    Attributes:
        num_bytes: float32 [n]: its size; NaN: the node gives none.
        norms: float32 [n]: its norm; NaN: not known.
        growths: float32 [n]: its norm over that of the largest tensor that the node takes; NaN: not known.
        dtypes: uint8 [n]: 0 none, else the place of its type in `names`, from 1 on.
        names: The types that there are, in the order in which they come; those after the 255th are left out.
    """

    num_bytes: NDArray[np.float32]
    norms: NDArray[np.float32]
    growths: NDArray[np.float32]
    dtypes: NDArray[np.uint8]
    names: tuple[str, ...]


_MAX_NAMES = 255


def measure(nodes: Sequence[GraphNode]) -> NodeMeasures:
    """Return the measures of `nodes`. Costs one pass over their values."""
    numbers = np.full((3, len(nodes)), np.nan, np.float32)
    dtypes = np.zeros(len(nodes), np.uint8)
    known: dict[str, int] = {}
    for place, node in enumerate(nodes):
        values = node.call.values if node.call is not None else ()
        if node.kind is GraphKind.PARAMETER:
            given = next((one for one in values if one.slot == node.slot), None)
            taken = None
        else:
            given, taken = _largest(values, ValueUse.GIVEN), _largest(values, ValueUse.TAKEN)
        if given is None:
            continue
        numbers[0, place], numbers[1, place] = given.num_bytes, _single(given.norm)
        if taken is not None and taken.norm:
            numbers[2, place] = _single(given.norm / taken.norm)
        number = known.setdefault(given.dtype, len(known) + 1)
        dtypes[place] = number if number <= _MAX_NAMES else 0
    return NodeMeasures(
        numbers[0], numbers[1], numbers[2], dtypes, tuple(name.rpartition(".")[2] for name in known)[:_MAX_NAMES]
    )


def _largest(values: Iterable[GraphValue], use: ValueUse) -> GraphValue | None:
    found: Any = None
    for value in values:
        if value.use is use and (found is None or value.num_bytes > found.num_bytes):
            found = value
    return found  # type: ignore[no-any-return]


def _single(value: float) -> float:
    """Return a float64 that float32 can hold: what is too large becomes infinite without a warning."""
    return math.copysign(math.inf, value) if abs(value) > 3.4e38 else value
