"""Labelled runs through the real monitor and the default rules: a few of the many of `make bench-detection`."""

import dataclasses

import pytest

from benchmarks.bench_detection import report
from benchmarks.detection.cases import CLEAN, FAULTS, Case, all_cases, make_case
from benchmarks.detection.family_cases import FAULTS as FAULTS_OF_FAMILIES
from benchmarks.detection.family_cases import HELD_OUT, TUNING, family_cases, faults_of
from benchmarks.detection.family_faults import ACTIONS as ACTIONS_OF_FAMILIES
from benchmarks.detection.faults import BAD_RANK
from benchmarks.detection.faults import FAULTS as ACTIONS
from benchmarks.detection.record import record, segments
from benchmarks.detection.replay import Fired, Judged, blocks_of, by_fault, by_rule, judge, judge_family
from benchmarks.families.catalogue import FAMILIES
from tests.journal_rows import spool_named
from trainermon.alerts.rules import load_rules
from trainermon.core.derived import SUM
from trainermon.core.values import Kind

RULES = load_rules()
AFTER = 12  # steps that are trained beyond the beginning of the fault


def short(name):
    case = make_case(name, "small", 0)
    return dataclasses.replace(case, steps=case.first_bad + AFTER if case.first_bad >= 0 else 160)


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("detection")
    cases = record([short(name) for name in ("gradient-inf", "bad-batches", "second-moment-lost", "plain")], folder)
    return {case.name: judge(case, folder, RULES) for case in cases}


def test_there_are_more_than_200_runs_and_12_kinds_of_fault():
    cases = all_cases()

    assert len({case.run_id for case in cases}) == len(cases) >= 200
    assert len(FAULTS) >= 12
    assert {case.name for case in cases} == {*FAULTS, *CLEAN}
    assert FAULTS.keys() == ACTIONS.keys()


@pytest.mark.parametrize("name", ["gradient-inf", "bad-batches", "second-moment-lost"])
def test_a_fault_is_found_in_time_and_nothing_before_it(judged, name):
    found = judged[name]

    assert found.delay is not None
    assert found.false == []


def test_a_healthy_run_is_quiet(judged):
    assert judged["plain"].num_steps == judged["plain"].num_clean_steps == 160
    assert judged["plain"].fired == ()


def test_the_report_counts_what_was_judged(judged):
    lines = list(report(list(judged.values()), RULES))

    assert lines[0].startswith("3 faults of 3 kinds, ")
    assert "| faults found in time (recall) | 3 of 3, 100.0% | ≥ 95 % |" in lines
    assert "| false grouped alerts per 10 000 clean steps | 0.00 (0 alerts) | ≤ 1 |" in lines


def test_every_family_is_tuned_on_or_held_out_and_every_fault_is_made():
    trainings = list(family_cases())

    assert not set(TUNING) & set(HELD_OUT)
    assert {*TUNING, *HELD_OUT} == {case.size for case in trainings} == set(FAMILIES)
    assert FAULTS_OF_FAMILIES.keys() == ACTIONS_OF_FAMILIES.keys()
    made = {name for case in trainings if case.name == "faults" for names in faults_of(case).values() for name in names}
    assert made == set(FAULTS_OF_FAMILIES)


def test_faults_of_a_family_are_judged_apart_from_one_another(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "benchmarks.detection.family_training.faults_of", lambda _: {70: ["activation-nan", "bad-batches"]}
    )
    case = Case(name="faults", size="tabular", seed=0, ranks=1, steps=90)
    record([case], tmp_path)

    clean, first, second = judge_family(case, tmp_path, RULES)

    assert (clean.case.name, clean.num_clean_steps, clean.fired) == ("faults", 90, ())
    assert (first.case.name, first.case.first_bad, first.delay) == ("activation-nan", 70, 0)
    assert (second.case.name, second.case.first_bad) == ("bad-batches", 70)
    assert {fired.rule for fired in second.fired} <= {"loss-jump", "loss-spike", "gradient-jump", "gradient-spike"}
    assert second.delay is not None


def test_after_its_faults_a_training_goes_on_as_if_there_had_been_none(tmp_path, monkeypatch):
    losses = []
    for number, faults in enumerate(({}, {60: ["weight-decay-x3000", "learning-rate-x100"]})):
        monkeypatch.setattr("benchmarks.detection.family_training.faults_of", lambda _, faults=faults: faults)
        case = Case(name="faults", size="gan", seed=0, ranks=1, steps=70)
        folder = tmp_path / str(number)
        record([case], folder)
        healthy = [part for part in segments(case, folder) if not part.name]
        recorded = {
            block.step: block.values[SUM, row]
            for header, block in blocks_of(spool_named(folder / "spool" / case.run_id))
            for row, number in enumerate(block.series)
            if header.series[number].kind is Kind.LOSS
        }
        losses.append([recorded[part.first + age] for part in healthy for age in range(part.steps)])

    assert len(losses[0]) == 70
    assert losses[0] == losses[1]


def case_of(name, first_bad=100):
    ranks = FAULTS[name].ranks if name in FAULTS else 1
    return Case(name=name, size="small", seed=1, ranks=ranks, steps=200, first_bad=first_bad)


@pytest.mark.parametrize(
    ("fired", "delay"),
    [
        ([Fired("replica-divergence", 101, (BAD_RANK,))], 1),
        ([Fired("replica-divergence", 101, (0, 1, BAD_RANK))], None),  # blames others too
        ([Fired("replica-divergence", 110, (BAD_RANK,))], None),  # too late
        ([Fired("replica-divergence", 99, (BAD_RANK,))], None),  # before it was there
        ([Fired("loss-spike", 101, (BAD_RANK,))], None),  # finds something else
        ([], None),
    ],
)
def test_only_the_right_rule_and_rank_in_time_finds_a_fault(fired, delay):
    judged = Judged(case_of("bit-flip"), tuple(fired), 200, 100)

    assert judged.delay == delay
    assert by_fault([judged])["bit-flip"].found == (delay is not None)


def test_alerts_are_told_apart_as_right_wrong_and_consequences():
    runs = [
        Judged(case_of("bad-batches"), (Fired("loss-spike", 50, (0,)), Fired("loss-spike", 102, (0,))), 200, 100),
        Judged(case_of("weight-nan"), (Fired("loss-spike", 101, (0,)),), 200, 100),
        Judged(case_of("plain", -1), (Fired("loss-spike", 150, (0,)),), 200, 200),
    ]

    score = by_rule(runs, RULES)["loss-spike"]

    assert (score.found, score.asked, score.other, score.false, score.delays) == (1, 1, 1, 2, (2,))
    assert score.precision == 0.5
