"""Runs that repeat, and generators that go on."""

import csv
import random

import numpy as np
import pytest
import torch
from torch import nn

from trainermon.dump import random_save, seed_all
from trainermon.monitor.errors import ConfigError


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


def test_draws_are_listed_with_what_was_drawn(tmp_path):
    def listed(extra):
        with seed_all(7), random_save(tmp_path / str(extra)) as path:
            torch.randn(3)
            for _ in range(extra):
                torch.rand(1)
            torch.empty(2).normal_()
        with open(path, encoding="utf-8") as file:
            return list(csv.DictReader(file))

    short, long = listed(0), listed(1)

    assert [row["api_name"] for row in long] == [
        "torch_random.randn.0",
        "torch_random.rand.0",
        "tensor_random.normal_.0",
    ]
    assert short[0]["crc32"] == long[0]["crc32"]
    assert short[1]["crc32"] != long[2]["crc32"]
    assert "in listed" in long[0]["stack"]
