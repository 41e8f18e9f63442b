"""Runs that repeat, and generators that go on."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from trainermon.dump import seed_all
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


def test_dropout_drops_nothing_if_it_shall_not():
    layer = nn.Dropout(0.5)

    with seed_all(7, False, True):
        assert torch.equal(layer(torch.ones(100)), torch.ones(100))
        assert torch.equal(functional.dropout(torch.ones(100), p=0.9), torch.ones(100))

    assert not torch.equal(layer(torch.ones(100)), torch.ones(100))


def test_generators_are_never_frozen():
    with pytest.raises(ConfigError, match="is_enhanced would draw the same numbers again and again"):
        seed_all(7, is_enhanced=True)
