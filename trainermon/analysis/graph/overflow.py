"""Where values stop being finite, or grow at once: the levels of msprobe's overflow check, from the values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainermon.analysis.graph.calls import GraphCall
from trainermon.analysis.graph.tree import GraphTree
from trainermon.analysis.graph.values import GraphValue, ValueUse
from trainermon.dump.files.records import PARAMETERS_GRAD

GROWTH = 100.0
"""How many times larger than its inputs' the norm of an output may be."""


class OverflowLevel(IntEnum):
    """How a call deals with values that are not finite."""

    NONE = 0
    MEDIUM = 1
    HIGH = 2
    CRITICAL = 3


# What these take, or give, was never written before: any bits may be in it.
_UNWRITTEN_INPUTS = {
    "Distributed.recv",
    "Distributed.irecv",
    "Distributed.all_gather",
    "Distributed.all_gather_into_tensor",
    "Distributed._all_gather_base",
    "Distributed.reduce_scatter",
    "Distributed.reduce_scatter_tensor",
    "Distributed._reduce_scatter_base",
    "Tensor.masked_fill_",
}
_UNWRITTEN_OUTPUTS = {"Torch.empty", "Torch.empty_like", "Torch.empty_strided"}


def overflow_levels(tree: GraphTree) -> NDArray[np.uint8]:
    """Return uint8 [n]: the `OverflowLevel` of each call of `tree`.

    Critical: it is given finite values only, and gives one that is not. High: it is given such values and gives them,
    or its output has more than `GROWTH` times the norm of its inputs. Medium: it is given such values, and gives none.
    Parameters do not count as given, as they do not for msprobe.
    """
    levels = np.zeros(len(tree.nodes), np.uint8)
    for place, node in enumerate(tree.nodes):
        if node.call is not None and not node.slot and node.call.direction != PARAMETERS_GRAD:
            levels[place] = level_of(node.call)
    return levels


def overflow_sentence(tree: GraphTree, levels: NDArray[np.uint8]) -> str:
    """Return how many calls have each level, and the first with the worst."""
    worst = int(levels.max())
    if worst == OverflowLevel.NONE:
        return "Overflow: no call is given or gives values that are not finite, or much larger ones."
    first = tree.nodes[innermost(tree, np.flatnonzero(levels == worst).tolist()) or 0].call
    assert first is not None
    counts = ", ".join(f"{int((levels == one).sum()):,} {one.name.lower()}" for one in reversed(OverflowLevel) if one)
    return f"Overflow: {counts}; the first {OverflowLevel(worst).name.lower()} call is {first.key}."


def innermost(tree: GraphTree, places: Sequence[int]) -> int | None:
    """Return the first of `places`, which are in order, that has none of them within it."""
    for place, following in pairwise((*places, len(tree.nodes))):
        if following >= place + tree.sizes[place]:
            return place
    return None


def level_of(call: GraphCall) -> OverflowLevel:
    """Return how a call deals with values that are not finite."""
    name = f"{call.class_name}.{call.module}"
    taken = [value for value in call.values if value.use is ValueUse.TAKEN]
    given = [value for value in call.values if value.use is ValueUse.GIVEN]
    bad_inputs = name not in _UNWRITTEN_INPUTS and not all(value.is_finite for value in taken)
    bad_outputs = name not in _UNWRITTEN_OUTPUTS and not all(value.is_finite for value in given)
    if bad_outputs:
        return OverflowLevel.HIGH if bad_inputs else OverflowLevel.CRITICAL
    if bad_inputs:
        return OverflowLevel.MEDIUM
    before, after = _largest_norm(taken), _largest_norm(given)
    return OverflowLevel.HIGH if after > GROWTH * (before or 1.0) else OverflowLevel.NONE


def _largest_norm(values: Sequence[GraphValue]) -> float:
    """Return the largest norm; NaN if none is known."""
    return max((value.norm for value in values if not math.isnan(value.norm)), default=math.nan)
