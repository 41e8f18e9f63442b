"""A plain argument that differs is where a difference begins, unless tensors that differed before may have made it."""

import json
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis.compare.dumps import forward, tensor, write_dump
from trainermon.analysis.compare import compare
from trainermon.analysis.compare.answer.summary import causes_of, headline
from trainermon.analysis.compare.output.advisor import advisor_text
from trainermon.analysis.compare.output.files import as_document

FC, MUL, BLOCK = "Module.fc.Linear.forward.0", "Tensor.__mul__.3.forward", "Module.b.Block.forward.0"
FRAMES = [
    "File /lib/site-packages/torch/_tensor.py, line 5, in f, x",
    "File /srv/train2.py, line 18, in forward, h * s",
]
SENTENCE = f"{MUL} was given 1.001, where the golden dump has 1.0 (input.1), called in train2.py:18"
KINDS = {float: "float", int: "int", bool: "bool", str: "str"}


def plain(value):
    return None if value is None else {"type": KINDS[type(value)], "value": value}


def form(value):
    return tensor(shape=(64, 64), value=value, requires_grad=True)


def model(literal, made, *, weight=0.5, given=0.7):
    """Return a linear layer, and behind it a function that takes its result and a plain argument."""
    return {
        FC: forward(form(1.0), output=form(given), parameters={"weight": form(weight)}),
        MUL: forward(form(given), plain(literal), output=form(made)),
    }


def found(tmp_path, target, golden, construct=None):
    ours, theirs = (
        write_dump(tmp_path / name, data, construct=construct) for name, data in (("a", target), ("b", golden))
    )
    (ours / "stack.json").write_text(json.dumps({"0": [[MUL], FRAMES]}))
    (comparison,) = compare(ours, theirs)
    return comparison


def blamed(comparison):
    return [(call.key, call.origin) for call in comparison.blamed]


def test_it_is_named_with_both_values_and_its_line_everywhere(tmp_path):
    comparison = found(tmp_path, model(1.001, 0.7007), model(1.0, 0.7))

    assert headline(comparison) == f"The first difference: {SENTENCE}."
    document = as_document(comparison)
    assert (document["blamed"], document["origins"]) == ([MUL], ["input.1"])
    advice = advisor_text(comparison)
    assert f"Suspect Nodes: {MUL}.input.1\n" in advice
    assert SENTENCE.removeprefix(f"{MUL} ") in advice
    assert "batches" not in advice


@pytest.mark.parametrize(("ours", "theirs"), [(2, 1), (True, False), (None, 0.5), ("mean", "sum"), (0.1234567891, 0.2)])
def test_every_kind_counts_where_nothing_differed_before(ours, theirs, tmp_path):
    comparison = found(tmp_path, model(ours, 0.9), model(theirs, 0.7))

    assert blamed(comparison) == [(MUL, "input.1")]
    assert f"was given {ours}, where the golden dump has {theirs}" in headline(comparison)


@pytest.mark.parametrize(("ours", "theirs"), [(-1, 2), (None, 0.125), ("mean", "avg")])
def test_one_that_changes_nothing_is_no_difference_to_blame(ours, theirs, tmp_path):
    assert blamed(found(tmp_path, model(ours, 0.7), model(theirs, 0.7))) == []


@pytest.mark.parametrize(
    ("ours", "theirs"), [(31, 37), (True, False), (0.7123456789, 0.6987654321), (None, 3), ("cuda:0", "npu:0")]
)
def test_one_that_tensors_may_have_made_is_not_blamed_after_a_difference(ours, theirs, tmp_path):
    comparison = found(tmp_path, model(ours, 0.9, weight=0.6, given=0.84), model(theirs, 0.7))

    assert blamed(comparison) == [(FC, "parameters.weight")]


def test_what_was_written_comes_before_parameters_that_an_earlier_step_changed(tmp_path):
    comparison = found(tmp_path, changed_before(1.001, 1.25), changed_before(1.0, 1.0))
    literal, parameters = causes_of(comparison)

    assert "2 of 2 parameters differ before the step" in parameters.words
    assert (literal.call.key, f"{MUL} {literal.words}") == (MUL, SENTENCE)
    said = headline(comparison)
    assert said.startswith(f"The first difference: {SENTENCE}; ")
    assert said.endswith(f"{parameters.call.key}.{parameters.place}: {parameters.words}.")


def changed_before(literal, scale):
    """Return two layers whose weights an earlier step scaled, and a function that takes a plain argument."""
    data = model(literal, 0.7 * scale, weight=0.5 * scale, given=0.7 * scale)
    other = forward(form(1.0), output=form(0.4 * scale), parameters={"weight": form(0.3 * scale)})
    return {"Module.fc2.Linear.forward.0": other, **data}


ROOTS = st.integers(1, 1 << 16).map(math.sqrt).flatmap(lambda root: st.sampled_from([root, 1 / root]))


@settings(max_examples=40)
@given(ROOTS, st.one_of(ROOTS, st.sampled_from([0.5, 8.0])))
def test_roots_of_widths_are_written_and_what_float32_has_of_them_is_not(tmp_path_factory, ours, theirs):
    for is_read in (False, True):
        folder = tmp_path_factory.mktemp("roots")
        sides = [float(np.float32(value)) if is_read else value for value in (ours, theirs)]
        hypothesis.assume(sides[0] != sides[1])
        comparison = found(folder, changed_before(sides[0], 1.25), changed_before(sides[1], 1.0))

        is_written = all(
            side in {float(f"{side:.4g}"), value} for side, value in zip(sides, (ours, theirs), strict=True)
        )
        assert ((MUL, "input.1") in blamed(comparison)) is is_written


def test_a_trained_operand_of_a_function_is_one_of_the_parameters_that_an_earlier_step_changed(tmp_path):
    def data(scale):
        batch = form(0.9) | {"requires_grad": False}
        add = {"Tensor.__add__.0.forward": forward(batch, form(0.2 * scale), output=form(0.9 + 0.2 * scale))}
        return add | changed_before(1.0, scale)

    comparison = found(tmp_path, data(1.25), data(1.0))

    assert ("Tensor.__add__.0.forward", "input.1") in blamed(comparison)
    (parameters,) = causes_of(comparison)
    assert "2 of 2 parameters differ before the step" in parameters.words


@pytest.mark.parametrize(("ours", "theirs"), [(1.5, 1.0), (3, 2)])
def test_one_that_the_module_around_was_given_is_blamed_there(ours, theirs, tmp_path):
    def data(literal, made):
        inner = forward(form(1.0), plain(literal), output=form(made))
        return {MUL: inner, BLOCK: forward(form(1.0), plain(literal), output=form(made))}

    comparison = found(tmp_path, data(ours, 1.5), data(theirs, 1.0), {MUL: BLOCK, BLOCK: None})

    assert blamed(comparison) == [(BLOCK, "input.1")]


def test_a_module_that_makes_one_call_is_blamed_for_its_setting(tmp_path):
    def data(eps, made):
        return {MUL: forward(form(1.0), plain(eps), output=form(made)), BLOCK: forward(form(1.0), output=form(made))}

    (call,) = found(tmp_path, data(0.1, 0.9), data(0.2, 0.8), {MUL: BLOCK, BLOCK: None}).blamed

    assert (call.key, call.given_to) == (BLOCK, MUL)


def test_a_line_that_runs_for_every_layer_is_blamed_once(tmp_path):
    def data(literal, scale):
        again = forward(form(0.7 * scale), plain(literal), output=form(0.6 * scale**2))
        return model(literal, 0.7 * scale) | {"Tensor.__mul__.4.forward": again}

    assert blamed(found(tmp_path, data(1.001, 1.001), data(1.0, 1.0))) == [(MUL, "input.1")]
