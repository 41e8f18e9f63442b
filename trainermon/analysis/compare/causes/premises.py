"""What holds for a whole pair of dumps, found before any call is judged: other inputs, weights, types, and NaN."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from trainermon.analysis.compare.flow import CallFlow
from trainermon.analysis.compare.frameworks import dtype_name
from trainermon.analysis.compare.items import OUTPUT, PARAMETERS, DumpCall, DumpRow, Value, value_of
from trainermon.analysis.compare.matching import CallPair
from trainermon.analysis.compare.noise import is_product, is_sparse, least_rounding, roundoff, roundoff_of, takes_weight
from trainermon.analysis.compare.verdicts import TensorError, TypePairs
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


class RunTypes(NamedTuple):
    """In which types the two runs compute as a whole, as pairs (the target's, the golden dump's), where these differ.

    Attributes:
        products: Those of most products of matrices, of most floating results if there are no products.
        given: Those of most of what products are given, which autocast makes the same: the types of weights.
    """

    products: TypePairs = frozenset()
    given: TypePairs = frozenset()


def run_types(pairs: Sequence[CallPair]) -> RunTypes:
    """Return in which types the two runs compute as a whole; one function in another type does not count."""
    both = [pair for pair in pairs if pair.target and pair.golden]
    dtypes = [{item.dtype for pair in both for item in call_of(pair).items} for call_of in (_target, _golden)]
    if dtypes[0] == dtypes[1] and sum(bool(roundoff_of(dtype)) for dtype in dtypes[0]) < 2:
        return RunTypes()
    products = [pair for pair in both if is_product(_target(pair)) and _target(pair).direction == FORWARD]
    found = _most(map(_result_types, products or both))
    if found or not products:
        return RunTypes(found)
    given = [rows for pair in products for rows in pair.rows() if rows[0] and rows[0].state != OUTPUT]
    return RunTypes(given=_most(_both_types(*rows) for rows in given))


def _target(pair: CallPair) -> DumpCall:
    assert pair.target
    return pair.target


def _golden(pair: CallPair) -> DumpCall:
    assert pair.golden
    return pair.golden


def _most(types: Iterable[tuple[str, str] | None]) -> TypePairs:
    """Return the pairs of unlike types that are at least half of all; what is None does not count."""
    counts = Counter(filter(None, types))
    return frozenset(each for each, count in counts.items() if each[0] != each[1] and 2 * count >= counts.total())


def _result_types(pair: CallPair) -> tuple[str, str] | None:
    """Return the types of the first floating result of a call on both sides; None if a side has none."""
    made = [[row for row in call.items if row.state == OUTPUT and roundoff_of(row.dtype)] for call in pair[:2] if call]
    return _both_types(made[0][0], made[1][0]) if all(made) else None


def _both_types(ours: DumpRow | None, theirs: DumpRow | None) -> tuple[str, str] | None:
    if ours is None or theirs is None or not (roundoff_of(ours.dtype) and roundoff_of(theirs.dtype)):
        return None
    return dtype_name(ours.dtype), dtype_name(theirs.dtype)


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
