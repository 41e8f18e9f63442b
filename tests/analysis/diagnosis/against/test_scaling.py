"""All gradients apart by one factor: it is told with what it means, and the loss or the reduction is named."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.stored_run import actv, store
from trainermon.analysis.diagnosis.against.against import diagnose_against
from trainermon.analysis.diagnosis.against.scaling import Gradient, common_factor, meaning_of
from trainermon.core.values import Kind, SeriesKey

MODULES = [f"h.{number}" for number in range(4)]


def moments(values):
    return (values.size, *map(float, (values.min(), values.max(), values.sum(), (values**2).sum(), 0, 0, 0)))


def gradients(factors, *, seed=5):
    """Return, for each factor, statistics of a random tensor times that factor, and of the tensor."""
    random = np.random.default_rng(seed)
    tensors = [random.normal(size=64) for _ in factors]
    return [(moments(tensor * factor), moments(tensor)) for factor, tensor in zip(factors, tensors, strict=True)]


def pairs(factors):
    def told(row):
        count, low, high, _, square, *_ = row
        return low, high, math.sqrt(square), math.sqrt(square / count)

    return [(told(ours), told(theirs)) for ours, theirs in gradients(factors)]


def factor_of(factors):
    return common_factor([Gradient(*pair) for pair in pairs(factors)])


@given(exponent=st.floats(0.02, 5.0), is_less=st.booleans(), is_negative=st.booleans(), number=st.integers(3, 9))
def test_one_factor_of_all_is_found(exponent, is_less, is_negative, number):
    factor = 10 ** (-exponent if is_less else exponent) * (-1 if is_negative else 1)

    assert factor_of([factor] * number) == pytest.approx(factor)


@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=9).filter(lambda found: max(found) > 1.05 * min(found)))
def test_several_factors_are_none(factors):
    assert factor_of(factors) is None


def test_one_gradient_that_agrees_is_enough_to_tell_that_not_all_are_scaled():
    assert factor_of([0.5] * 40 + [1.0]) is None


def test_equal_gradients_and_few_have_no_factor():
    assert factor_of([1.0] * 5) is None
    assert factor_of([0.5] * 2) is None


@pytest.mark.parametrize(
    ("factor", "numbers", "found"),
    [
        (2.0, {"context parallel ranks": 2}, "2, with 2 the number of context parallel ranks"),
        (
            0.125,
            {"micro steps of a step": 8, "tensor parallel ranks": 2},
            "1 / 8, with 8 the number of micro steps of a step",
        ),
        (-1.0, {"data parallel ranks": 1}, ""),
        (64.0, {"data parallel ranks": 8}, ""),
        (2.0**-16, {}, "1 / 2^16, as loss scales are"),
    ],
)
def test_what_a_factor_is_is_said(factor, numbers, found):
    assert meaning_of(factor, numbers) == found


def run(folder, factor, kinds, *, num_ranks=1, agreeing=()):
    """Store one step of a run whose gradients of `kinds` are `factor` times what they should be."""
    steps = {}
    for kind in (*kinds, *agreeing):
        found = gradients([factor if kind in kinds else 1.0] * len(MODULES))
        for module, (ours, _) in zip(MODULES, found, strict=True):
            steps[SeriesKey(kind, f"{module}.weight")] = ours
    forward = {actv(name, "output.0"): moments(np.arange(9.0)) for name in MODULES}
    store(folder, {0: dict.fromkeys(range(num_ranks), forward | steps)}, modules=MODULES, dtype="float32")
    for rank in range(num_ranks):
        place = {"rank": rank, "dp": rank, "dp_size": num_ranks}
        told = json.dumps({"modules": MODULES, "coordinates": place})
        (folder / f"ranks/rank{rank:05d}.json").write_text(told)
    return folder


def compared(tmp_path, factor, kinds, **options):
    return diagnose_against(run(tmp_path / "a", factor, kinds, **options), run(tmp_path / "b", 1.0, kinds, **options))


def test_gradients_of_one_rank_that_are_all_halved_are_the_losss(tmp_path):
    found = compared(tmp_path, 0.5, [Kind.GRAD_REDUCED])

    assert (found.module, found.phase.value) == ("(loss)", "backward")
    assert "All 4 gradients are 0.5 times the reference's, and no forward differs" in found.reason


def test_gradients_that_are_doubled_before_the_reduction_are_the_losss(tmp_path):
    found = compared(tmp_path, 2.0, [Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED], num_ranks=2)

    assert (found.module, found.phase.value) == ("(loss)", "backward")
    assert "All 8 gradients are 2 times the reference's (2, with 2 the number of data parallel ranks)" in found.reason


def test_gradients_that_are_doubled_by_the_reduction_are_its_doing(tmp_path):
    found = compared(tmp_path, 2.0, [Kind.GRAD_REDUCED], agreeing=[Kind.GRAD_UNREDUCED], num_ranks=2)

    assert found.phase.value == "reduction"
    assert "2, with 2 the number of data parallel ranks): they were summed, averaged or divided" in found.reason


def test_gradients_after_the_reduction_alone_leave_both_open(tmp_path):
    found = compared(tmp_path, 2.0, [Kind.GRAD_REDUCED], num_ranks=2)

    assert found.phase.value == "unknown"
    assert "the loss was scaled, or they were summed or averaged, otherwise" in found.reason
