"""What a node can be coloured by beside its verdict: size, norm, growth and type of what it gives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainermon.analysis.graph.calls import GraphCall
from trainermon.analysis.graph.tree import GraphTree
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
_NONE = -1  # the last of all values, which is none


def measure(tree: GraphTree) -> NodeMeasures:
    """Return the measures of the nodes of `tree`. Costs one pass over their values, and two the first time."""
    largest = tree.worked_out("largest", partial(_find_largest, tree))
    norms = np.fromiter(chain((value.norm for call in _calls(tree) for value in call.values), [math.nan]), np.float64)
    given, taken = norms[largest.given], norms[largest.taken]
    taken[taken == 0.0] = math.nan
    with np.errstate(over="ignore", invalid="ignore"):  # what float32 cannot hold becomes infinite
        growths = (given / taken).astype(np.float32)
        return NodeMeasures(largest.num_bytes, given.astype(np.float32), growths, largest.dtypes, largest.names)


class _LargestValues(NamedTuple):
    """Which value of each node is measured.

    Attributes:
        given: int32 [n]: the place of the value among those of all calls; -1: none.
        taken: int32 [n]: likewise, what the value's norm is held against.
        num_bytes: As in `NodeMeasures`, with the next two.
        dtypes: Likewise.
        names: Likewise.
    """

    given: NDArray[np.int32]
    taken: NDArray[np.int32]
    num_bytes: NDArray[np.float32]
    dtypes: NDArray[np.uint8]
    names: tuple[str, ...]


def _calls(tree: GraphTree) -> Iterator[GraphCall]:
    """Yield the calls of the nodes, each once, in order."""
    return (node.call for node in tree.nodes if node.call is not None and not node.slot)


def _find_largest(tree: GraphTree) -> _LargestValues:
    places = np.full((2, len(tree.nodes)), _NONE, np.int32)
    num_bytes = np.full(len(tree.nodes), np.nan, np.float32)
    dtypes = np.zeros(len(tree.nodes), np.uint8)
    known: dict[str, int] = {}
    ends = accumulate(len(call.values) for call in _calls(tree))
    begins = {call.key: end - len(call.values) for call, end in zip(_calls(tree), ends, strict=True)}
    for place, node in enumerate(tree.nodes):
        if node.call is None:
            continue
        values, begin = node.call.values, begins[node.call.key]
        if node.slot:
            given = next((at for at, one in enumerate(values) if one.slot == node.slot), _NONE)
            taken = _NONE
        else:
            given, taken = _largest(values, ValueUse.GIVEN), _largest(values, ValueUse.TAKEN)
        if given == _NONE:
            continue
        places[0, place] = begin + given
        places[1, place] = _NONE if taken == _NONE else begin + taken
        num_bytes[place] = values[given].num_bytes
        number = known.setdefault(values[given].dtype, len(known) + 1)
        dtypes[place] = number if number <= _MAX_NAMES else 0
    names = tuple(name.rpartition(".")[2] for name in known)[:_MAX_NAMES]
    return _LargestValues(places[0], places[1], num_bytes, dtypes, names)


def _largest(values: Iterable[GraphValue], use: ValueUse) -> int:
    """Return the place of the largest of the values with this use; -1: there is none."""
    found, most = _NONE, -1
    for at, value in enumerate(values):
        if value.use is use and value.num_bytes > most:
            found, most = at, value.num_bytes
    return found
