"""Differences that are there on the first common step: mistakes are located, and rounding is not blamed."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis import wrong_twins
from tests.analysis.stored_run import actv, grad, store, store_journals
from tests.analysis.wrong_twins import HEALTHY, MISTAKES, NUM_STEPS, SOUND
from tests.ranks import run_ranks
from trainermon.analysis.diagnosis.against.against import diagnose_against
from trainermon.analysis.diagnosis.findings import DiagnosisVerdict
from trainermon.core.values import Kind, SeriesKey


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    folder = tmp_path_factory.mktemp("twins")
    run_ranks(Path(wrong_twins.__file__), str(folder), world_size=1)
    for run in folder.iterdir():
        store_journals(run)
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_that_is_there_from_the_start_is_located(twins, mistake):
    diagnosis = diagnose_against(twins / mistake.name, twins / mistake.reference)

    assert (diagnosis.verdict, diagnosis.step) == (DiagnosisVerdict.LOCATED, 0), diagnosis.reason
    assert diagnosis.phase.value == mistake.phase
    assert not mistake.modules or diagnosis.module in mistake.modules
    assert mistake.micro_step is None or diagnosis.micro_step == mistake.micro_step


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "reference"), HEALTHY)
def test_another_order_of_summation_is_not_blamed(twins, name, reference):
    diagnosis = diagnose_against(twins / name, twins / reference)

    assert diagnosis.verdict is DiagnosisVerdict.EQUAL, diagnosis.reason
    assert f"the stored rows of {NUM_STEPS} steps agree but for noise" in diagnosis.reason.lower()


def scaled(factor, count=400):
    """Return the moments of numbers between -2 and 3, each multiplied by `factor`."""
    total, square = 0.1 * count, 1.5 * count
    return (count, -2.0 * factor, 3.0 * factor, total * factor, square * factor**2, 0, 0, 0)


MODULES = [f"h.{number}" for number in range(6)]


def forwards(factors):
    """Return a step on which each module of `factors` returns this multiple of what it should."""
    rows = {}
    for place, (name, factor) in enumerate(zip(MODULES, factors, strict=True)):
        before = factors[place - 1] if place else 1.0
        rows[actv(name, "input.0")] = scaled((place + 1) * before)
        rows[actv(name, "output.0")] = scaled((place + 2) * factor)
    return {0: rows}


@settings(max_examples=15)
@given(first=st.integers(0, 5), exponent=st.floats(-5.0, -0.5))
def test_what_is_exact_before_a_place_and_not_behind_it_has_its_origin_there(tmp_path_factory, first, exponent):
    folder = tmp_path_factory.mktemp("runs")
    error = 1 + 10**exponent
    store(folder / "ours", {0: forwards([1.0] * first + [error] * (6 - first))}, modules=MODULES, dtype="float32")
    store(folder / SOUND, {0: forwards([1.0] * 6)}, modules=MODULES, dtype="float32")

    diagnosis = diagnose_against(folder / "ours", folder / SOUND)

    assert (diagnosis.step, diagnosis.module, diagnosis.phase.value) == (0, MODULES[first], "forward")


@settings(max_examples=15)
@given(sizes=st.lists(st.floats(1e-8, 2e-7), min_size=6, max_size=6))
def test_rounding_of_every_module_is_no_difference(tmp_path_factory, sizes):
    folder = tmp_path_factory.mktemp("runs")
    store(folder / "ours", {0: forwards([1.0 + size for size in sizes])}, modules=MODULES, dtype="float32")
    store(folder / SOUND, {0: forwards([1.0] * 6)}, modules=MODULES, dtype="float32")

    assert diagnose_against(folder / "ours", folder / SOUND).verdict is DiagnosisVerdict.EQUAL


def test_a_buffer_that_differs_is_the_origin_of_what_follows(tmp_path):
    for name, factor in (("ours", 1.2), (SOUND, 1.0)):
        rows = {
            actv("h.0", "output.0"): scaled(1.0),
            SeriesKey(Kind.BUFFER, "h.1.running_mean"): scaled(factor),
            actv("h.1", "input.0"): scaled(1.0),
            actv("h.1", "output.0"): scaled(factor),
        }
        store(tmp_path / name, {0: {0: rows}}, modules=MODULES, dtype="float32")

    diagnosis = diagnose_against(tmp_path / "ours", tmp_path / SOUND)

    assert diagnosis.verdict is DiagnosisVerdict.LOCATED
    assert (diagnosis.step, diagnosis.module) == (0, "h.1")
    assert "h.1.running_mean" in diagnosis.reason


def test_gradients_that_are_added_up_in_any_order_are_no_difference(tmp_path):
    steps = ({grad(f"h.{number}.w"): scaled(1 + error * (number > 2)) for number in range(6)} for error in (2e-7, 0.0))
    for name, rows in zip(("ours", SOUND), steps, strict=True):
        forward = {actv("h.0", "output.0"): scaled(1.0)}
        store(tmp_path / name, {0: {0: rows | forward}}, modules=MODULES, dtype="float32")

    assert diagnose_against(tmp_path / "ours", tmp_path / SOUND).verdict is DiagnosisVerdict.EQUAL


def backward(error, micro_step):
    """Return a step in which the gradient that `h.1` gives back, and all behind it, is off in one micro step."""
    rows = {}
    for number in (0, 1):
        off = error if number == micro_step else 1.0
        later = error if number > micro_step else 1.0
        rows[SeriesKey(Kind.ACTV, "h.0", "output.0", micro_step=number)] = scaled(2.0 * later)
        rows[SeriesKey(Kind.ACTV_GRAD, "h.1", "output.0", micro_step=number)] = scaled(4.0)
        rows[SeriesKey(Kind.ACTV_GRAD, "h.1", "input.0", micro_step=number)] = scaled(5.0 * off)
    return {0: rows}


def test_the_backward_of_a_micro_step_comes_before_the_forward_of_the_next(tmp_path):
    store(tmp_path / "ours", {0: backward(1.01, 0)}, modules=MODULES, dtype="float32")
    store(tmp_path / SOUND, {0: backward(1.0, 0)}, modules=MODULES, dtype="float32")

    diagnosis = diagnose_against(tmp_path / "ours", tmp_path / SOUND)

    assert (diagnosis.module, diagnosis.phase.value, diagnosis.micro_step) == ("h.1", "backward", 0)


@pytest.mark.parametrize("slot", ["input.weight", "input.1"])
def test_a_weight_that_is_passed_as_an_argument_is_no_activation_of_that_call(slot, tmp_path):
    def step(error):
        weight = scaled(0.5, count=900)
        return {
            0: {
                SeriesKey(Kind.PARAM_ORIGIN, "h.0.weight"): weight,
                actv("h.5", slot): weight,
                actv("h.3", "output.0"): scaled(3.0),
                SeriesKey(Kind.ACTV_GRAD, "h.5", "output.0"): scaled(7.0),
                SeriesKey(Kind.ACTV_GRAD, "h.5", slot): scaled(6.0 * error, count=900),
                SeriesKey(Kind.ACTV_GRAD, "h.3", "output.0"): scaled(8.0),
                SeriesKey(Kind.ACTV_GRAD, "h.3", "input.0"): scaled(9.0 * error),
            }
        }

    store(tmp_path / "ours", {0: step(1.1)}, modules=MODULES, dtype="float32")
    store(tmp_path / SOUND, {0: step(1.0)}, modules=MODULES, dtype="float32")

    diagnosis = diagnose_against(tmp_path / "ours", tmp_path / SOUND)

    assert (diagnosis.module, diagnosis.phase.value) == ("h.3", "backward")


@pytest.mark.parametrize("last", ["h.5", "h.5.out"])
def test_what_the_last_module_is_given_in_the_backward_is_made_by_the_loss(last, tmp_path):
    modules = [*MODULES, "h.5.out"]

    def step(error):
        rows = {actv(name, "output.0"): scaled(2.0 + place) for place, name in enumerate(modules)}
        rows |= {SeriesKey(Kind.ACTV_GRAD, name, "output.0"): scaled(error) for name in (last, "h.5")}
        return {0: rows | {SeriesKey(Kind.ACTV_GRAD, last, "input.0"): scaled(3 * error), grad("h.5.w"): scaled(error)}}

    store(tmp_path / "ours", {0: step(1.001)}, modules=modules, dtype="float32")
    store(tmp_path / SOUND, {0: step(1.0)}, modules=modules, dtype="float32")

    diagnosis = diagnose_against(tmp_path / "ours", tmp_path / SOUND)

    assert (diagnosis.module, diagnosis.phase.value) == ("(loss)", "backward")
    assert math.isclose(diagnosis.contrasts[0].relative, 0.001, rel_tol=0.01)
