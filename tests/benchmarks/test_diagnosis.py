"""Injected faults through the real monitor and `diagnose`: a few of the many of `make bench-diagnosis`."""

import dataclasses

import pytest

from benchmarks.bench_diagnosis import report
from benchmarks.diagnosis.cases import CLEAN, MEGATRON, SITES, SPLITS, UNSEEN_SEED, Case, all_cases
from benchmarks.diagnosis.judge import Judged, judge
from benchmarks.diagnosis.record import record
from trainermon.analysis.diagnosis.findings import Diagnosis, DiagnosisVerdict, FaultPhase

pytestmark = pytest.mark.distributed

AGAINST = " against a healthy run"
SHORT = {
    "plain": (*SITES, *CLEAN, f"weight{AGAINST}"),
    "ddp": ("weight", "output", "gradient", "moment", "loss", "healthy", f"output{AGAINST}", f"gradient{AGAINST}"),
}
PLACES = [(split, site) for split, sites in SHORT.items() for site in sites]


def chosen(split):
    """Return the first case of each site."""
    cases = {case.site + (AGAINST if case.against else ""): case for case in reversed(all_cases([split], [0]))}
    return {(split, site): cases[site] for site in SHORT[split]}


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("diagnosis")
    cases = chosen("plain") | chosen("ddp")
    trained = record(list(cases.values()), folder)
    return {place: judge(case, folder) for place, case in zip(cases, trained, strict=True)}


@pytest.mark.parametrize("place", PLACES, ids="-".join)
def test_first_cause_of_one_fault_at_every_place_is_found(judged, place):
    found = judged[place]

    assert found.wrong == (), found.diagnosis


def test_the_report_counts_what_was_judged(judged):
    wrong = dataclasses.replace(judged["ddp", "weight"], case=dataclasses.replace(judged["ddp", "weight"].case, rank=7))

    lines = list(report([*judged.values(), wrong]))

    assert lines[0] == "24 runs, 20 of them with a fault."
    assert "| first cause right | 19 of 20, 95.0% | ≥ 90 % |" in lines
    assert "| of faults that stay finite, by `diagnose RUN --against HEALTHY` | 3 of 3, 100.0% | ≥ 90 % |" in lines
    assert "| clean runs without a claimed origin | 4 of 4, 100.0% | all |" in lines
    assert lines[-1].startswith(f"| `{wrong.case.run_id}` | rank | ")


def test_there_are_more_than_200_faults_in_all_splits_places_and_ranks():
    cases = all_cases()

    faults = [case for case in cases if case.site in SITES]
    assert len({case.run_id for case in cases}) == len(cases)
    assert len(faults) > 200
    assert {case.split for case in faults} == {*SPLITS}
    assert {case.direction for case in faults} == {"parameter", "forward", "backward", "optimizer"}
    for split, num_ranks in SPLITS.items():
        of_split = [case for case in faults if case.split == split]
        assert {case.rank for case in of_split} == set(range(num_ranks))
        assert {case.site for case in of_split} == {*SITES} - ({"batch"} if split in MEGATRON else set())


def test_the_seed_of_megatron_that_nobody_looked_at_is_none_of_the_others():
    unseen = all_cases(MEGATRON, [UNSEEN_SEED])

    assert not {case.run_id for case in unseen} & {case.run_id for case in all_cases()}
    assert {case.split for case in unseen} == {*MEGATRON}
    assert any(case.against for case in unseen)


CASE = Case(split="ddp", seed=1, number=0, site="output", role="mlp", effect="nan", module="h.0.mlp.up", rank=1, step=2)
FOUND = Diagnosis(
    verdict=DiagnosisVerdict.LOCATED,
    run_id="",
    headline="",
    reason="",
    step=2,
    rank=1,
    module="h.0.mlp",
    candidates=("h.0", "h.0.mlp.up"),
    phase=FaultPhase.FORWARD,
)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, ()),
        ({"step": 3}, ("step",)),
        ({"rank": 0}, ("rank",)),
        ({"candidates": ("h.0", "h.1", "h.0.mlp.up")}, ("module",)),  # the fourth that is named
        ({"phase": FaultPhase.BACKWARD}, ("direction",)),
        ({"verdict": DiagnosisVerdict.NOT_REPRODUCED}, ("verdict",)),
    ],
)
def test_step_rank_module_and_direction_must_all_be_right(change, wrong):
    assert Judged(CASE, dataclasses.replace(FOUND, **change)).wrong == wrong


def test_a_clean_run_is_right_only_if_nothing_is_claimed():
    clean = dataclasses.replace(CASE, site="healthy")

    assert Judged(clean, dataclasses.replace(FOUND, verdict=DiagnosisVerdict.FINITE)).wrong == ()
    assert Judged(clean, FOUND).wrong == ("verdict",)
