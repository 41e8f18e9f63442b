"""The states of generators that a replay begins from, against what numpy and Python themselves say."""

import random

import numpy as np
import pytest

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
