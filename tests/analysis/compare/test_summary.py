"""A comparison in words: what is to blame, how much, and what the screen has no room for."""

import itertools
import operator
from pathlib import Path
from typing import Any

import pytest

from tests.analysis.compare.dumps import forward, tensor, write_dump
from tests.analysis.compare.small_models import build, record
from trainermon.analysis.compare import compare
from trainermon.analysis.compare.answer.summary import (
    RESULTS,
    ComparisonOutcome,
    failed,
    first_different,
    render_text,
    summarise,
)
from trainermon.analysis.compare.merging.beginnings import Beginning, first_of

LINEAR = "Module.fc.Linear.forward.0"


def compared(tmp_path, ours, theirs):
    sides = (write_dump(tmp_path / name, data) for name, data in (("a", ours), ("b", theirs)))
    (comparison,) = compare(*sides)
    return summarise(comparison)


def outcome(label, **options):
    counts = dict.fromkeys(RESULTS, 0)
    made: dict[str, Any] = {
        "target": "a",
        "golden": "b",
        "mode": "statistics",
        "headline": f"All of {label}.",
        "rows": counts,
    }
    made |= {"calls": counts, "only_target": 0, "only_golden": 0, "blamed": (), "within": (), "called_in": ""}
    return ComparisonOutcome(label=label, **(made | options))


def linear(weight=1.0, given=1.0, result=1.0):
    return {
        LINEAR: forward(tensor(value=given), output=tensor(value=result), parameters={"weight": tensor(value=weight)})
    }


def test_a_parameter_that_differed_before_is_where_it_came_in(tmp_path):
    found = compared(tmp_path, linear(weight=1.5, result=1.5), linear())

    words = "the parameter differs by 0.33 of its size before that call, and no call before it made that"  # 0.5 of 1.5
    assert found.headline == f"The first difference came in with {LINEAR}.parameters.weight: {words}."
    assert found.blamed == ((LINEAR, words),)
    assert found.differs


def test_a_parameter_that_was_nan_before_is_said_to_be(tmp_path):
    found = compared(tmp_path, linear(weight=float("nan"), result=float("nan")), linear())

    words = "the parameter is NaN or Inf on one side only before that call, and no call before it made that"
    assert found.headline == f"The first difference came in with {LINEAR}.parameters.weight: {words}."


def layers(*weights):
    """Return three linear layers, one behind the other, of weights that scale what they are given."""
    values = [1.0, *itertools.accumulate(weights, operator.mul)]
    return {
        f"Module.fc{at}.Linear.forward.0": forward(
            tensor(value=values[at]), output=tensor(value=values[at + 1]), parameters={"weight": tensor(value=weight)}
        )
        for at, weight in enumerate(weights)
    }


def test_what_an_earlier_step_did_to_the_parameters_is_said_once(tmp_path):
    found = compared(tmp_path, layers(1.01, 1.25, 1.0), layers(1.0, 1.0, 1.0))

    ((key, words),) = found.blamed
    assert key == "Module.fc1.Linear.forward.0"
    assert words.startswith(
        "2 of 3 parameters differ before the step, this one most, by 0.2 of its size, and no"
    )  # 0.25 of 1.25
    assert found.headline == f"The first difference came in with {key}.parameters.weight: {words}."


def test_single_parameters_are_each_to_blame(tmp_path):
    found = compared(tmp_path, layers(1.25, 1.0, 1.0), layers(1.0, 1.0, 1.0))

    assert [key for key, _ in found.blamed] == ["Module.fc0.Linear.forward.0"]
    assert "parameters differ" not in found.headline


@pytest.mark.parametrize(
    ("result", "words"), [(1.0, "which was given other inputs (input.0)"), (4.0, "by what it was given (input.0)")]
)
def test_where_inputs_explain_the_difference_no_call_is_to_blame(result, words, tmp_path):
    found = compared(tmp_path, linear(given=4.0, result=result), linear())

    assert found.headline == f"No call is to blame: the dumps differ from {LINEAR} on, {words}."
    assert found.differs


def test_a_result_that_inputs_do_not_explain_is_to_blame(tmp_path):
    found = compared(tmp_path, linear(result=2.0), linear())

    assert found.headline == (
        f"The first difference arose in {LINEAR}: its results differ by 0.5 of their size, its inputs not at all."
    )


def test_dumps_without_a_call_in_common_are_not_said_to_agree(tmp_path):
    found = compared(tmp_path, linear(), {"Module.other.Conv.forward.0": forward(output=tensor())})

    assert found.headline == "Nothing could be compared: no call of the target is in the golden dump."
    assert (found.only_target, found.only_golden) == (1, 1)
    assert not found.differs


def test_a_dump_without_calls_is_named(tmp_path):
    found = compared(tmp_path, linear(), {})

    assert found.headline == f"Nothing could be compared: no call was dumped in {tmp_path / 'b'}."


def test_a_screen_tells_how_much_it_leaves_out():
    blamed = tuple((f"Functional.gelu.{number}.forward", "odd") for number in range(11))
    notes = tuple(f"note {number}" for number in range(9))

    lines = render_text([outcome("step0", blamed=blamed, notes=notes)]).splitlines()

    assert [text for text in lines if "odd" in text][:2] == [
        "to blame  Functional.gelu.0.forward: odd",
        "          Functional.gelu.1.forward: odd",
    ]
    assert sum("odd" in text for text in lines) == 8
    assert sum("note " in text for text in lines) == 6
    assert [text.strip() for text in lines if "more" in text] == ["and 3 more", "and 3 more"]


def test_nothing_that_a_file_names_drives_the_terminal():
    evil = "a\033]0;x\007\nb"
    one = outcome(evil, headline=evil, blamed=((evil, evil),), within=(evil,), called_in=evil, notes=(evil,))

    shown = render_text([one, one], colour=False)

    assert {letter for letter in shown if not letter.isprintable()} == {"\n"}
    assert r"note      a\x1b]0;x\x07\nb" in shown.splitlines()


def began(place, **changed):
    return Beginning(**({"step": 0, "micro_step": 0, "is_backward": False, "stage": 0, "place": place} | changed))


def agreeing(label):
    counts = dict.fromkeys(RESULTS, 0) | {"pass": 5}
    return outcome(label, rows=counts)


def test_the_sentence_names_the_rank_and_stands_above_the_ranks_with_something_to_say():
    blamed = (("Module.fc.Linear.forward.0", "odd"),)
    several = [agreeing(f"step0 rank{number}") for number in range(63)]
    several.insert(41, outcome("step0 rank41", blamed=blamed, began=began(7)))

    lines = render_text(several).splitlines()

    assert lines[0] == "Step 0, rank 41: all of step0 rank41."
    assert lines[2].split() == ["dump", "error", "warning", "pass", "unmatched", "first", "to", "blame"]
    assert lines[3].split() == ["step0", "rank41", "0", "0", "0", "0", LINEAR]
    assert lines[4:6] == ["63 of 64 dumps agree", ""]


def test_many_that_have_something_to_say_are_counted_beyond_a_screen():
    several = [outcome(f"step{number}", blamed=(("a", "odd"),), began=began(0, step=number)) for number in range(30)]

    lines = render_text(several).splitlines()

    assert "and 18 more, in the files" in lines
    assert len(lines) <= 40


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (began(9), began(1, step=1)),
        (began(9), began(1, micro_step=1)),
        (began(9), began(1, is_backward=True)),
        (began(9), began(1, stage=1)),
        (began(9, is_backward=True, stage=-1), began(1, is_backward=True)),  # backwards run from the last stage
        (began(5), began(5, is_made=True)),
    ],
)
def test_of_several_ranks_that_is_shown_in_which_it_began_first(first, later):
    blamed = (("a", "odd"),)
    ranks = [outcome("rank0", blamed=blamed, began=later), outcome("rank1", blamed=blamed, began=first)]

    assert first_different(ranks).label == "rank1"
    assert first_of([later, first]) == 1


def test_a_weight_of_one_rank_comes_before_the_module_around_it_on_another(tmp_path):
    """The module has ended after what is within it, whose weight was wrong before."""
    outer, inner = "Module.moe.MoE.forward.0", "Module.moe.fc.Linear.forward.0"
    for side, fault in (("target", 1.5), ("golden", 1.0)):
        for rank in range(2):
            own = fault if rank else 1.0
            data = {
                inner: forward(tensor(value=2.0), output=tensor(value=3 * own), parameters={"w": tensor(value=own)}),
                outer: forward(tensor(value=7.0), output=tensor(value=5 * fault)),
            }
            write_dump(tmp_path / side / "step0" / f"rank{rank}", data, construct={inner: outer, outer: None})

    outcomes = [summarise(one) for one in compare(tmp_path / "target", tmp_path / "golden")]

    assert [one.blamed[0][0] for one in outcomes] == [outer, inner]
    assert first_different(outcomes).label == "step0 rank1"


@pytest.mark.parametrize("colour", [False, True])
def test_what_could_not_be_compared_is_said_instead_of_a_result(colour):
    one = failed(Path("a"), Path("b"), "step3", "a/dump.json is damaged")

    lines = render_text([outcome("step2"), one], colour=colour).splitlines()

    assert lines[3].split()[-2:] == ["not", "compared"]
    said = "Step 3: not compared: a/dump.json is damaged"
    assert lines[0] == (f"\033[1m{said}\033[0m" if colour else said)


@pytest.mark.parametrize("norm", [1.0, 1.0 + 2.0**-25])
def test_an_input_that_was_only_rounded_to_another_type_explains_no_wrong_result(norm, tmp_path):
    sides = (("float64", norm, 2.0), ("float32", 1.0, 1.0))
    ours, theirs = (
        {
            LINEAR: forward(
                tensor(f"torch.{dtype}", Norm=norm, requires_grad=False),
                output=tensor(f"torch.{dtype}", value=result),
            )
        }
        for dtype, norm, result in sides
    )
    found = compared(tmp_path, ours, theirs)

    assert [key for key, _ in found.blamed] == [LINEAR]


@pytest.mark.parametrize(
    ("result", "words"), [(1.0, "have equal statistics"), (1.0 + 1e-7, "differ by no more than rounding")]
)
def test_rows_that_agree_are_said_to_be_equal_or_apart_by_rounding(result, words, tmp_path):
    found = compared(tmp_path, linear(result=result), linear())

    assert found.headline.startswith(f"The dumps agree: 3 rows {words}")


def test_tensors_that_are_equal_are_said_to_be(tmp_path):
    for side in ("target", "golden"):
        record(tmp_path / side, build("table"))
    (comparison,) = compare(tmp_path / "target", tmp_path / "golden")

    assert "rows are equal" in summarise(comparison).headline
