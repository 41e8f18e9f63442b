"""The list of silent errors is as its page says, and the judge judges."""

import collections
import dataclasses
import math

import pytest

from benchmarks.silent.case import FRAMEWORKS, HALVES, Mechanism, all_cases
from benchmarks.silent.judge import SilentVerdict, judge, refusal_in
from benchmarks.silent.page import MARK, written
from benchmarks.silent.twins import Weights, problems_of, trained

MIN_FAULTS = {
    "plain": 28,
    "ddp": 28,
    "fsdp2": 18,
    "megatron": 40,
    "deepspeed": 12,
}


def test_every_framework_has_its_cases_in_both_halves():
    faults = [case for case in all_cases().values() if case.mechanism is not None]
    counts = collections.Counter(case.framework for case in faults)

    assert {name: counts[name] for name, least in MIN_FAULTS.items() if counts[name] < least} == {}
    assert set(MIN_FAULTS) == {name for name in FRAMEWORKS if name != "hard"}
    assert {case.half for case in faults} == set(HALVES)


@pytest.mark.parametrize("case", all_cases().values(), ids=lambda case: case.name)
def test_a_case_says_what_is_right_to_say_of_it(case):
    assert case.name.startswith(f"{case.framework}-")
    assert case.source
    assert case.wrong
    assert case.ranks in {1, 2, 3, 4}
    if case.mechanism is not None:
        assert isinstance(case.mechanism, Mechanism)
        assert case.phrases == tuple(phrase.lower() for phrase in case.phrases) != ()
        assert case.phases


def test_a_visible_error_is_judged_beside_its_twin(tmp_path):
    case = all_cases()["plain-schedule-too-fast"]

    verdict = judge(case, tmp_path / "runs")

    assert verdict.error == ""
    assert verdict.differs
    assert verdict.is_silent
    assert not verdict.false
    page = written(f"# Kept\n{MARK}old", [(case, verdict)], reveals=True)
    assert page.startswith(f"# Kept\n{MARK}")
    assert f"| {case.name} |" in page
    assert "old" not in page


def test_the_page_says_of_the_unseen_half_only_how_much_was_found():
    cases = all_cases().values()
    seen, unseen = (next(case for case in cases if case.half == half) for half in HALVES)
    verdicts = [(case, SilentVerdict(name=case.name, found_by={"some-rule": 7})) for case in (seen, unseen)]

    page = written(MARK, verdicts, reveals=False)

    assert f"| {seen.name} |" in page
    assert unseen.name not in page
    assert "| unseen | 1 | 1 |" in page


def test_the_page_names_no_healthy_program_of_the_unseen_half():
    programs = [
        dataclasses.replace(case, mechanism=None)
        for case in (next(case for case in all_cases().values() if case.half == half) for half in HALVES)
    ]
    verdicts = [(case, SilentVerdict(name=case.name, found_by={}, false={"some-rule": 3})) for case in programs]

    page = written(MARK, verdicts, reveals=False)

    assert [case.name in page for case in programs] == [True, False]
    assert [f"| {half} | 1 | 1 | 0 |" in page for half in HALVES] == [True, True]


def test_an_error_on_two_ranks_is_real_from_its_first_wrong_step_on():
    case = all_cases()["ddp-wrapper-bypassed"]

    found = trained(case)

    assert list(problems_of(case, found)) == []
    assert (found["healthy"].apart, found["broken"].apart) == (None, 1)


@pytest.mark.parametrize(
    ("broken", "losses", "problem"),
    [
        ("aaa", (1.0, 1.0, 1.0), "the weights are those of the twin"),
        ("bbb", (1.0, 1.0, 1.0), "first wrong in step 1, it says"),
        ("abb", (1.0, math.nan, 1.0), "broken: a loss is not finite"),
    ],
)
def test_an_error_that_is_not_as_it_says_is_told(broken, losses, problem):
    case = all_cases()["ddp-wrapper-bypassed"]
    twin = Weights(losses=[(1.0, 1.0, 1.0)], digests=["aaa"])

    assert list(problems_of(case, {"healthy": twin, "broken": Weights(losses=[losses], digests=[broken])})) == [problem]


@pytest.mark.parametrize("prefix", ["", "[rank3]: "])
def test_a_refusal_is_known_with_the_rank_that_torch_says_before_it(prefix):
    text = f"{prefix}Traceback\n{prefix}trainermon.core.errors.AttachError: model: half is there\n\nrank 3 ended"

    assert refusal_in(text) == "AttachError: model: half is there"
    assert not refusal_in(f"{prefix}RuntimeError: trainermon.core.errors.AttachError")
