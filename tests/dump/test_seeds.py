"""Runs that repeat, and generators that go on."""

import logging
import os
import random
import subprocess
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from trainermon.core.errors import ConfigError
from trainermon.dump import seed_all


def draws():
    return [random.random(), float(np.random.rand()), *torch.rand(2).tolist()]


def test_two_runs_with_a_seed_draw_the_same_and_never_the_same_twice():
    with seed_all(7):
        first = [draws(), draws()]
    with seed_all(7):
        second = [draws(), draws()]

    assert first == second
    assert len({value for drawn in first for value in drawn}) == 8


def test_layers_that_are_made_one_after_the_other_differ():
    with seed_all(7, mode=True):
        left, right = nn.Linear(2, 2), nn.Linear(2, 2)

    assert not torch.equal(left.weight, right.weight)


def test_ranks_draw_different_numbers_if_they_shall(monkeypatch):
    drawn = {}
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        with seed_all(7, rank_offset=True):
            drawn[rank] = torch.rand(1).item()

    assert drawn["0"] != drawn["1"]


def test_everything_is_put_back():
    states = (random.getstate(), torch.get_rng_state(), torch.are_deterministic_algorithms_enabled())

    with seed_all(7, mode=True):
        assert torch.are_deterministic_algorithms_enabled()
        draws()

    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert torch.are_deterministic_algorithms_enabled() == states[2]


@pytest.mark.parametrize("seed", [-1, 2**32, True, 1.5])
def test_a_wrong_seed_is_refused(seed):
    with pytest.raises(ConfigError, match="seed_all: seed: found"):
        seed_all(seed)


def test_dropout_drops_nothing_if_it_shall_not():
    layer = nn.Dropout(0.5)

    with seed_all(7, False, True):
        assert torch.equal(layer(torch.ones(100)), torch.ones(100))
        assert torch.equal(functional.dropout(torch.ones(100), p=0.9), torch.ones(100))

    assert not torch.equal(layer(torch.ones(100)), torch.ones(100))


def test_generators_are_never_frozen():
    with pytest.raises(ConfigError, match="is_enhanced would draw the same numbers again and again"):
        seed_all(7, is_enhanced=True)


VARIABLES = ("PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG", "HCCL_DETERMINISTIC", "LCCL_DETERMINISTIC")


def settings():
    cudnn = torch.backends.cudnn
    return [*map(os.environ.get, VARIABLES), cudnn.enabled, cudnn.deterministic, cudnn.benchmark]


@pytest.mark.parametrize(("mode", "words"), [(False, ["False", "0"]), (True, ["True", "1"])])
def test_everything_that_msprobes_manual_lists_is_set_and_put_back(mode, words, monkeypatch):
    for name in VARIABLES[:-1]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(VARIABLES[-1], "as it was")
    before = settings()

    with seed_all(7, mode):
        assert settings() == ["7", ":4096:8", *words, False, True, False]
        assert torch.are_deterministic_algorithms_enabled() is mode
        assert torch.initial_seed() == 7
        assert random.getstate() == random.Random(7).getstate()
        states: list[Any] = [np.random.get_state(), np.random.RandomState(7).get_state()]
        assert np.array_equal(states[0][1], states[1][1])

    assert settings() == before


def test_processes_that_are_started_hash_alike():
    def hashed():
        command = [sys.executable, "-c", "print(hash('layer'))"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with seed_all(7):
        assert hashed() == hashed()


def test_npus_are_seeded_where_there_are_any(monkeypatch):
    seeds = []
    npu = types.SimpleNamespace(manual_seed_all=seeds.append)
    monkeypatch.setattr(torch, "npu", npu, raising=False)

    with seed_all(7):
        assert seeds == [7]


def test_dropout_stays_unless_it_is_asked_for():
    with seed_all(7):
        assert not torch.equal(nn.Dropout(0.5)(torch.ones(100)), torch.ones(100))


DATA = TensorDataset(torch.arange(8))


@pytest.mark.parametrize(
    ("loader", "is_told"),
    [
        (lambda: DataLoader(DATA, shuffle=True), True),
        (lambda: DataLoader(DATA, batch_size=2, shuffle=True), True),
        (lambda: DataLoader(DATA), False),
        (lambda: DataLoader(DATA, shuffle=True, generator=torch.Generator().manual_seed(1)), False),
        (lambda: DataLoader(DATA, sampler=DistributedSampler(DATA, num_replicas=2, rank=0, shuffle=True)), False),
    ],
)
def test_a_loader_that_shuffles_by_what_was_drawn_before_is_told_once(loader, is_told, caplog):
    with seed_all(7), caplog.at_level(logging.WARNING, "trainermon"):
        seed_all(7)
        for _ in range(2):
            list(loader())

    told = [record for record in caplog.records if "a DataLoader shuffles (RandomSampler)" in record.getMessage()]
    assert len(told) == is_told


def test_loaders_are_left_as_they_were():
    iterate = DataLoader.__iter__

    with seed_all(7):
        assert DataLoader.__iter__ is not iterate

    assert DataLoader.__iter__ is iterate
