"""What the first steps of a free benchmark learn from the CPU, and which errors that excuses.

The CPU that they learn from is sound, or one whose results are planted to be off.
"""

import json

import pytest
import torch

from tests.dump.online.steps import FaultyKernels, rows_of, tried
from trainermon.analysis.check.baselines import read_baseline
from trainermon.dump.debugger_config import read_debugger_config
from trainermon.dump.online import preheat

X = torch.randn(64, generator=torch.Generator().manual_seed(0))


def spoiled():
    with FaultyKernels(lambda result: result.mul_(1.002), "exp"):
        X.exp()


@pytest.fixture
def peer(monkeypatch):
    """Return the calls that a CPU ran whose results are off by a thousandth."""
    calls = []

    def call_on(call, _device):
        calls.append(call)
        return call.function(*call.args) * 1.001

    monkeypatch.setattr(preheat, "call_on", call_on)
    return calls


@pytest.mark.usefixtures("peer")
def test_an_error_that_the_cpu_about_makes_too_is_a_warning_in_later_steps_as_well(tmp_path):
    [row] = tried(tmp_path, spoiled, if_preheat=True, preheat_step=1, steps=2)

    assert (row["step"], row["status"], row["reason"]) == ("1", "warning", "about as far off as the baseline")


def test_an_error_that_the_device_alone_makes_stays_one(tmp_path):
    [row] = tried(tmp_path, spoiled, if_preheat=True)

    assert (row["api_name"], row["status"], row["reason"]) == ("Tensor.exp.0.forward", "error", "inexact")


def test_what_was_learned_is_a_baseline_of_so_many_calls(tmp_path, peer):
    def step():
        for _ in range(3):
            X.exp()

    tried(tmp_path, step, if_preheat=True, max_sample=4, preheat_step=2, steps=3)

    found = read_baseline(tmp_path / "dump" / "free_benchmark_baseline_rank0.json")
    assert (list(found.worst), len(peer)) == (["exp.forward.float32"], 4)
    assert found.worst["exp.forward.float32"] > 100


def test_a_second_run_into_the_folder_replaces_both_files(tmp_path):
    for _ in range(2):
        tried(tmp_path, spoiled, report="all")

    summary = json.loads((tmp_path / "dump/step0/rank0/free_benchmark.json").read_text())
    assert len(rows_of(tmp_path)) == sum(summary["results"].values()) == 1


def test_a_mode_that_does_not_judge_by_size_says_that_it_learns_nothing():
    block = {"if_preheat": True, "pert_mode": "no_change"}
    _, notes = read_debugger_config({"task": "free_benchmark", "dump_path": "free", "free_benchmark": block})

    assert notes == ("if_preheat has no effect: only pert_mode improve_precision and to_cpu learn from the CPU",)
