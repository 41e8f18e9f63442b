"""What holds for a whole pair of dumps, found before any call is judged: other inputs, weights, types, and NaN."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from trainermon.analysis.compare.flow import CallFlow, TensorError
from trainermon.analysis.compare.frameworks import dtype_name
from trainermon.analysis.compare.items import OUTPUT, PARAMETERS, DumpCall, Value, value_of
from trainermon.analysis.compare.matching import CallPair
from trainermon.analysis.compare.noise import is_product, is_sparse, least_rounding, roundoff, roundoff_of, takes_weight
from trainermon.analysis.compare.verdicts import TypePairs
from trainermon.dump.files.reader import split_key
from trainermon.dump.files.records import FORWARD

_ADDED_UP = 2.0**-48
"""What a statistic of equal elements may differ by where parts of ranks were added up in another order, in float64."""


def has_other_input(pairs: Sequence[CallPair], flow: CallFlow, floor_of: Callable[[DumpCall, DumpCall], float]) -> bool:
    """Return whether the model was given another input: a call was, before any call made something else.

    That is other indices; or the very first difference is one of few elements of an input. It is little in the
    statistics of many, and becomes a lot where others cancel. `floor_of` returns by how much two calls may differ.
    """
    is_first = True
    for pair in pairs:
        facts = flow.facts.get(pair.target.key) if pair.target and pair.golden else None
        if facts is None or not (facts.given or facts.made):
            continue
        assert pair.target
        assert pair.golden
        if any(math.isinf(error.size) for error in facts.given if error.item.is_tensor):
            return True
        if is_first and any(_is_other(error) and _is_input(pair.target, error, flow) for error in facts.given):
            return True
        is_first = False
        floor = floor_of(pair.target, pair.golden)
        if facts.after > floor or facts.before > floor:
            return False
    return False


def other_weights(
    pairs: Sequence[CallPair],
    flow: CallFlow,
    limit_of: Callable[[DumpCall, DumpCall, TensorError], float],
) -> frozenset[Value]:
    """Return the values of parameters that differ by more than `limit_of` allows: by more than rounding.

    Of a weight that was replaced or whose elements stand in another order, statistics show a part only.
    """
    found = set()
    for pair in pairs:
        facts = flow.facts.get(pair.target.key) if pair.target and pair.golden else None
        for error in facts.given if facts is not None else ():
            assert pair.target
            assert pair.golden
            if error.size <= least_rounding(roundoff_of(error.item.dtype)):
                continue
            if error.item.state != PARAMETERS and not takes_weight(pair.target, error.item.place):
                continue
            value = value_of(error.item)
            if value is not None and error.size > limit_of(pair.target, pair.golden, error):
                found.add(value)
    return frozenset(found)


def run_types(pairs: Sequence[CallPair]) -> TypePairs:
    """Return in which types the two runs compute as a whole, where these differ: those of most products of matrices.

    Of most floating results if there are no products. One function in another type is none of these.
    """
    both = [(pair.target, pair.golden) for pair in pairs if pair.target and pair.golden]
    ours, theirs = ({item.dtype for calls in both for item in calls[side].items} for side in (0, 1))
    if ours == theirs:
        return frozenset()
    chosen = [calls for calls in both if is_product(calls[0])] or both
    counts = Counter(filter(None, (_result_types(*calls) for calls in chosen)))
    number = counts.total()
    return frozenset(types for types, count in counts.items() if types[0] != types[1] and 2 * count >= number)


def _result_types(ours: DumpCall, theirs: DumpCall) -> tuple[str | None, str | None] | None:
    """Return the types of the first floating result of a call on both sides; None if a side has none."""
    found = [
        next((item.dtype for item in call.items if item.state == OUTPUT and roundoff_of(item.dtype)), None)
        for call in (ours, theirs)
    ]
    return (dtype_name(found[0]), dtype_name(found[1])) if all(found) else None


def has_nan_backward(flow: CallFlow) -> bool:
    """Return whether backwards of one side alone have NaN or Inf, and no forward has."""
    bad = [key for key, facts in flow.facts.items() if math.isnan(facts.before) or math.isnan(facts.after)]
    return bool(bad) and not any(split_key(key)[2] == FORWARD for key in bad)


def _is_other(error: TensorError) -> bool:
    """Return whether few elements of a tensor are others, and it is not one that was rounded to another type."""
    is_one_type = error.item.dtype == error.golden.dtype
    rounded = _ADDED_UP if is_one_type else least_rounding(roundoff((error.item, error.golden)))
    return error.size > rounded and is_sparse(error.item, error.golden)


def _is_input(call: DumpCall, error: TensorError, flow: CallFlow) -> bool:
    """Return whether a tensor is what the outermost calls are given: no call made it, and it takes no gradient."""
    if error.item.requires_grad is not False or takes_weight(call, error.item.place):
        return False
    value = value_of(error.item)
    made = any(value_of(each.item) == value for facts in flow.facts.values() for each in facts.made)
    outermost = (facts for key, facts in flow.facts.items() if flow.around[key] is None)
    return not made and any(value_of(each.item) == value for facts in outermost for each in facts.given)
