"""The settings that two runs kept are compared first, and what neither kept is no difference."""

import json

import pytest

from tests.analysis.stored_run import store
from trainermon.analysis.diagnosis.against.settings import setting_differences
from trainermon.analysis.diagnosis.findings import Diagnosis, DiagnosisVerdict
from trainermon.analysis.diagnosis.report import render_text
from trainermon.core.values import Kind, SeriesKey

KEPT = {"variables": {"NCCL_ALGO": "Ring", "NCCL_BUFFSIZE": "1"}, "torch": {"version": "2.6"}}
OTHER = {"variables": {"NCCL_ALGO": "Tree", "NCCL_BUFFSIZE": "2"}, "torch": {"version": "2.6"}}


def run_with(folder, settings):
    (folder / "ranks").mkdir(parents=True)
    about = {"rank": 0, "coordinates": {"world_size": 2}, "framework": "ddp", "environment": settings}
    (folder / "ranks/rank00000.json").write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize(
    ("other", "found"),
    [(KEPT, ()), (OTHER, ("variables: NCCL_ALGO is Ring, in the reference Tree",)), (None, ())],
)
def test_settings_that_may_change_numbers_are_told(other, found, tmp_path):
    runs = run_with(tmp_path / "a", KEPT), run_with(tmp_path / "b", other)

    assert setting_differences(*runs) == found


def hyper(arguments, **optimizer):
    named = {f"optimizer.{name}": value for name, value in optimizer.items()}
    return {**KEPT, "arguments": arguments.split(), "hyperparameters": {"optimizer.class": "AdamW", **named}}


@pytest.mark.parametrize(
    ("here", "there", "found"),
    [
        (hyper("--lr 2e-3", lr=0.002, initial_lr=0.002), hyper("--lr 1e-3", lr=0.001, initial_lr=0.001),
         ("hyperparameters: lr is 2e-3, in the reference 1e-3",)),
        (hyper("", lr=0.002), hyper("", lr=0.001), ("hyperparameters: optimizer.lr is 0.002, in the reference 0.001",)),
        (hyper("--bf16"), hyper(""), ("hyperparameters: bf16 is true, in the reference –",)),
        (hyper("--bf16"), hyper("--fp16"), ("hyperparameters: bf16 is true, in the reference fp16 true",)),
        (hyper("", weight_decay=30.0), hyper("", weight_decay=0.1),
         ("hyperparameters: optimizer.weight_decay is 30.0, in the reference 0.1",)),
        ({**hyper("--lr 1"), **OTHER, "arguments": ["--lr", "1"]}, {**hyper("--lr 2")},
         ("hyperparameters: lr is 1, in the reference 2", "variables: NCCL_ALGO is Tree, in the reference Ring")),
        (hyper("--run_name a --log-dir b", lr=1), hyper("--run_name c --log-dir d", lr=1), ()),
    ],
)  # fmt: skip
def test_hyperparameters_come_first_and_each_once(here, there, found, tmp_path):
    assert setting_differences(run_with(tmp_path / "a", here), run_with(tmp_path / "b", there)) == found


def rated(folder, rates):
    steps = {
        step: {0: {SeriesKey(Kind.STEP, "learning_rate", "0"): (1, rate, rate, rate, rate * rate, 0, 0, 0)}}
        for step, rate in enumerate(rates)
    }
    store(folder, steps)
    return folder


@pytest.mark.parametrize(
    ("rates", "step", "found"),
    [
        ([0.1, 0.2], None, ("learning rate is 0.2 on step 1, in the reference 0.1",)),
        ([0.1, 0.2], 1, ("learning rate is 0.2 on step 1, in the reference 0.1",)),
        ([0.1, 0.2], 0, ()),  # values differed before: the rate may follow from them
        ([0.1, 0.1 * (1 + 1e-9)], None, ()),
    ],
)
def test_stored_rates_tell_where_no_setting_was_kept(rates, step, found, tmp_path):
    runs = rated(tmp_path / "a", rates), rated(tmp_path / "b", [0.1, 0.1])

    assert setting_differences(*runs, step) == found


@pytest.mark.parametrize("number", [1, 9])
def test_they_stand_before_anything_else(number):
    diagnosis = Diagnosis(
        verdict=DiagnosisVerdict.EQUAL,
        run_id="x",
        headline="They agree",
        reason="",
        setting_differences=tuple(f"torch: s{n} is 1, in the reference 2" for n in range(number)),
    )

    lines = render_text(diagnosis).splitlines()

    assert (
        lines[0]
        == f"{number} setting{'s differ' if number > 1 else ' differs'}, look there first, what follows may come of it:"
    )
    assert lines[1] == "  torch: s0 is 1, in the reference 2"
    assert ("and 4 more: trainermon env compare" in lines) is (number > 5)
    assert "They agree" in lines
