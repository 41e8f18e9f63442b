"""The states of generators that a replay begins from, against what numpy and Python themselves say."""

import random

import numpy as np
import pytest
import torch

from trainermon.replay.state import RandomState


@pytest.fixture(autouse=True)
def _generator_as_it_was():
    before = np.random.get_state()
    yield
    np.random.set_state(before)


def test_numpys_state_is_what_numpy_says_however_it_was_used():
    draws = random.Random(0)
    uses = (
        lambda: None,
        np.random.randn,  # leaves a second normal number ready, or takes the one that is
        lambda: np.random.randn(2),
        lambda: np.random.rand(draws.randrange(700)),
        lambda: np.random.seed(draws.randrange(3)),
    )
    for number in range(1000):
        draws.choice(uses)()
        name, words, *rest = RandomState.current([]).numpy
        expected_name, expected_words, *expected = np.random.get_state()

        assert (name, rest) == (expected_name, expected), number
        np.testing.assert_array_equal(words, expected_words)


def test_pythons_state_is_what_python_says_however_it_was_used():
    draws, before = random.Random(0), random.getstate()
    kept = [before]
    uses = (
        lambda: None,
        lambda: random.gauss(0.0, 1.0),  # leaves a second normal number ready, or takes the one that is
        lambda: random.randbytes(draws.randrange(3000)),
        lambda: random.seed(draws.randrange(3)),
        lambda: random.setstate(draws.choice(kept)),
    )
    try:
        for number in range(1000):
            draws.choice(uses)()
            assert RandomState.current([]).python == random.getstate(), number
            kept.append(random.getstate())
    finally:
        random.setstate(before)


def test_a_state_that_was_put_back_by_the_script_is_seen_when_asked_for_anew():
    np.random.seed(1)
    np.random.randn()
    with_number = np.random.get_state()
    np.random.randn()
    RandomState.current([])
    np.random.set_state(with_number)

    assert RandomState.current([], anew=True).numpy[3] == 1


def test_another_bit_generator_is_asked_as_it_is():
    usual = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]
    try:
        assert RandomState.current([]).numpy["bit_generator"] == "PCG64"
    finally:
        np.random.set_bit_generator(usual)  # type: ignore[attr-defined]


@pytest.fixture
def torch_state():
    before = torch.get_rng_state()
    yield
    torch.set_rng_state(before)


def test_torchs_state_is_what_torch_says_however_it_was_used(torch_state):
    draws = random.Random(0)
    uses = (
        lambda: None,
        lambda: torch.randn(draws.randrange(20)),  # few leave a second normal number ready, or take the one that is
        lambda: torch.randn(3, dtype=torch.float64),
        lambda: torch.rand(draws.choice([1, 7, 624, 1248])),
        lambda: torch.nn.functional.dropout(torch.ones(draws.randrange(2000)), 0.5),
        lambda: torch.manual_seed(draws.randrange(3)),
    )
    for number in range(1000):
        draws.choice(uses)()
        assert torch.equal(RandomState.current([]).cpu, torch.get_rng_state()), number


def test_torch_is_not_asked_again_if_its_generator_was_not_used(torch_state):
    torch.manual_seed(0)
    first = RandomState.current([]).cpu
    torch.ones(3).sum()

    assert RandomState.current([]).cpu is first
    torch.rand(1)
    assert RandomState.current([]).cpu is not first


def test_a_normal_number_that_torch_was_given_back_is_seen_when_asked_for_anew(torch_state):
    torch.manual_seed(1)
    torch.randn(1, dtype=torch.float64)
    with_number = torch.get_rng_state()
    torch.randn(1, dtype=torch.float64)
    RandomState.current([])
    torch.set_rng_state(with_number)

    assert torch.equal(RandomState.current([], anew=True).cpu, with_number)
