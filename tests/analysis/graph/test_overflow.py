"""Levels of overflow by their definition, with numbers made by hand; msprobe's own levels are in test_database."""

import math

import pytest

from tests.analysis.graph.graph_calls import function_call
from trainermon.analysis.graph.overflow import OverflowLevel, level_of, overflow_levels, overflow_sentence
from trainermon.analysis.graph.tree import build_tree, number_nodes
from trainermon.analysis.graph.values import GraphValue, ValueUse

GOOD, BAD = True, False


def _value(use, norm, is_finite):
    return GraphValue(use, use.name, None, 4, "torch.float32", norm, is_finite)


def _call(taken, given, *, name="mul", kind="Tensor", number=0, parent=None):
    values = [_value(ValueUse.TAKEN, *one) for one in taken] + [_value(ValueUse.GIVEN, *one) for one in given]
    return function_call(name, place=number, number=number, kind=kind, parent=parent, values=values)


@pytest.mark.parametrize(
    ("taken", "given", "level"),
    [
        ([(1.0, GOOD)], [(1.0, GOOD)], OverflowLevel.NONE),
        ([(1.0, BAD), (1.0, GOOD)], [(1.0, GOOD)], OverflowLevel.MEDIUM),
        ([(1.0, GOOD), (1.0, BAD)], [(1.0, BAD)], OverflowLevel.HIGH),
        ([(1.0, GOOD)], [(1.0, GOOD), (1.0, BAD)], OverflowLevel.CRITICAL),
        ([], [(1.0, BAD)], OverflowLevel.CRITICAL),
        ([(1.0, GOOD), (2.0, GOOD)], [(200.0, GOOD)], OverflowLevel.NONE),
        ([(1.0, GOOD), (2.0, GOOD)], [(200.5, GOOD)], OverflowLevel.HIGH),
        ([(0.0, GOOD)], [(100.0, GOOD)], OverflowLevel.NONE),
        ([(0.0, GOOD)], [(100.5, GOOD)], OverflowLevel.HIGH),
        ([], [(1e9, GOOD)], OverflowLevel.NONE),
        ([(math.nan, GOOD)], [(1e9, GOOD)], OverflowLevel.NONE),
        ([(1.0, GOOD)], [(math.nan, GOOD)], OverflowLevel.NONE),
    ],
)
def test_a_level_is_what_goes_in_and_what_comes_out(taken, given, level):
    assert level_of(_call(taken, given)) is level


def test_what_was_never_written_may_be_anything():
    assert level_of(_call([], [(1.0, BAD)], name="empty", kind="Torch")) is OverflowLevel.NONE
    assert level_of(_call([(1.0, BAD)], [(1.0, GOOD)], name="recv", kind="Distributed")) is OverflowLevel.NONE
    assert level_of(_call([(1.0, BAD)], [(1.0, BAD)], name="recv", kind="Distributed")) is OverflowLevel.CRITICAL


def test_the_first_critical_call_is_the_one_that_no_other_is_within():
    outer = _call([(1.0, GOOD)], [(1.0, BAD)], name="net", number=2)
    inner = [
        _call([(1.0, GOOD)], [(1.0, GOOD)], name="before", number=0, parent=outer.key),
        _call([(1.0, GOOD)], [(1.0, BAD)], name="spoils", number=1, parent=outer.key),
    ]
    tree = number_nodes(build_tree({call.key: call for call in (*inner, outer)}, "model"))

    sentence = overflow_sentence(tree, overflow_levels(tree))

    assert sentence == "Overflow: 2 critical, 0 high, 0 medium; the first critical call is Tensor.spoils.1.forward."
