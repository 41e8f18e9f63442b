"""Layers more on one side, where modules do not tell: each function is matched with the one that takes its weights."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis.compare.small_models import Block, build, record
from trainermon.analysis.compare import CompareOptions, Mode, compare
from trainermon.analysis.compare.answer.summary import causes_of
from trainermon.analysis.compare.insertions import matching_parts
from trainermon.analysis.compare.items import INPUT, OUTPUT, DumpCall, DumpRow, read_rows


@dataclasses.dataclass
class Tape:
    """Makes functions, each of a kind: what it takes and gives is one number each."""

    calls: list = dataclasses.field(default_factory=list)

    def call(self, layer, name, *given, weight=None):
        """Note that `layer` calls a function; return the value that it makes."""
        at = len(self.calls)
        made = f"{layer}-{at}"
        rows = [self._row(INPUT, index, value) for index, value in enumerate((*given, *([weight] if weight else [])))]
        rows.append(self._row(OUTPUT, 0, made))
        self.calls.append(
            (layer, name, DumpCall(f"Torch.{name}.{at}.forward", "Torch", name, "forward", at, "", tuple(rows)))
        )
        return made

    @staticmethod
    def _row(state, index, value):
        return DumpRow(f"{state}.{index}", state, "torch.float32", (4, 4), requires_grad=True, max=hash(value), min=-1)


def layer_of(tape, name, hidden, shape):
    """Call what a residual layer calls: functions with a weight of the layer's own, and others, as `shape` says."""
    state = hidden
    for index, kind in enumerate(shape):
        state = tape.call(name, kind, state, weight=f"{name}.{index}" if kind == "linear" else None)
    return tape.call(name, "add", hidden, state)


def model_of(names, shape):
    tape = Tape()
    hidden = tape.call("start", "embedding", "ids", weight="table")
    for name in names:
        hidden = layer_of(tape, name, hidden, shape)
    tape.call("end", "linear", hidden, weight="head")
    return tape.calls


def calls_of(names):
    tape = Tape()
    for name in names:
        tape.call("layer", name, "given")
    return [call for *_, call in tape.calls]


SHAPES = st.lists(st.sampled_from(["linear", "relu", "norm"]), min_size=1, max_size=5).filter(lambda of: "linear" in of)


@settings(max_examples=150, deadline=None)
@given(SHAPES, st.integers(1, 5), st.lists(st.integers(0, 5), min_size=1, max_size=3), st.booleans())
def test_what_is_left_alone_is_the_layers_that_one_side_has_more(shape, number, places, is_swapped):
    names = [f"layer{at}" for at in range(number)]
    more = list(names)
    for new, at in enumerate(places):
        more.insert(min(at, len(more)), f"new{new}")
    longer, shorter = model_of(more, shape), model_of(names, shape)
    sides = (shorter, longer) if is_swapped else (longer, shorter)

    one, other = ([call for *_, call in side] for side in sides)
    kinds = [name for _, name, _ in sides[0]], [name for _, name, _ in sides[1]]
    parts = list(matching_parts(one, other, kinds))

    layers = [{call.key: layer for layer, _, call in side} for side in sides]
    pairs = [pair for part in parts for pair in zip(*part, strict=True)]
    assert len(pairs) == len(shorter)
    assert all(layers[0][ours.key] == layers[1][theirs.key] for ours, theirs in pairs)


@given(st.lists(st.sampled_from("ab"), max_size=8), st.lists(st.sampled_from("ab"), max_size=8))
def test_parts_are_in_order_and_nothing_is_in_two_of_them(ours, theirs):
    one, other = calls_of(ours), calls_of(theirs)

    parts = list(matching_parts(one, other, (ours, theirs)))

    for side, found in zip((one, other), zip(*parts, strict=True), strict=True):
        numbers = [call.number for part in found for call in part]
        assert all(before < after for before, after in itertools.pairwise(numbers))
        assert set(numbers) <= {call.number for call in side}


CALLS = 10
"""Functions that a block calls: norm, mix, drop, add, gate, silu, up, product, down, add."""


def with_more(places):
    """Return a model with new layers that stand at these places, which rise."""
    model = build("language")
    torch.manual_seed(9)
    for at in places:
        model.layers.insert(at, Block(16).eval())
    return model


@pytest.mark.parametrize("is_swapped", [False, True])
@pytest.mark.parametrize("places", [(0,), (3,), (1, 2), (0, 2), (1, 4)])
def test_in_dumps_of_functions_alone_they_are_the_one_finding(places, is_swapped, tmp_path):
    for name, model in (("more", with_more(places)), ("less", build("language"))):
        record(tmp_path / name, model, level="L1")
    record(tmp_path / "modules", with_more(places), level="mix")
    new = tuple(f"layers.{at}" for at in places)

    sides = ("less", "more") if is_swapped else ("more", "less")
    (modules,) = (tmp_path / "modules").rglob("dump.json")
    within = {one.key for one in read_rows(modules.parent).calls if one.scope.startswith(new)}
    number = len(places) if places == (1, 2) else 1  # one behind the other
    for mode in (Mode.STATISTICS, Mode.TENSOR):
        (comparison,) = compare(*(tmp_path / side for side in sides), options=CompareOptions(mode=mode))

        ((call, place, words),) = causes_of(comparison)
        assert call.key in within
        assert place == ""
        alone = f"is in the {'golden dump' if is_swapped else 'target'} alone"
        assert words.startswith(f"{alone}, like the {number * CALLS - 1} calls before it, and the dumps differ from ")
