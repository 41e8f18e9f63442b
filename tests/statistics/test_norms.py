"""Norms hold over the whole range of float64: a power of two scales them, whatever becomes of the squares."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainermon.statistics.pairs import cosine_of, norm_of

NUMBERS = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8)


def exact(values):
    """Return the norm by rational numbers, to 60 digits."""
    square = sum(Fraction(value) ** 2 for value in values)
    digits = 1 << 2400
    root = math.isqrt(int(square * digits * digits))
    try:
        return float(Fraction(root, digits))
    except OverflowError:
        return math.inf


@given(values=NUMBERS)
def test_the_norm_is_the_exact_one(values):
    assert norm_of(np.array(values)) == pytest.approx(exact(values), rel=1e-14, abs=5e-324)


@given(values=NUMBERS)
def test_only_zeros_have_no_norm(values):
    assert (norm_of(np.array(values)) == 0) == (not any(values))


def test_nothing_has_the_norm_zero():
    assert norm_of(np.array([])) == 0.0


@given(exponent=st.integers(-1000, 900), angle=st.floats(0.01, 3.1))
def test_the_cosine_does_not_depend_on_the_size(exponent, angle):
    one, two = np.array([3.0, 0.0]), 2 * np.array([math.cos(angle), math.sin(angle)])
    norms = [float(np.ldexp(norm_of(each), exponent)) for each in (one, two, one - two)]

    assert cosine_of(*norms) == pytest.approx(math.cos(angle), abs=1e-12)
