"""Median and spread of rows: held against numpy, and the compiled library against what does without it."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from tests.alerts.series import INF, NAN, PATIENT
from trainermon.alerts.conditions import spread
from trainermon.alerts.conditions.spread import Floats, RowSpread, median_of, spread_of

VALUES = st.one_of(st.floats(-1e3, 1e3, width=32), st.integers(-3, 3), st.just(NAN))
ROWS = arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=40), elements=VALUES)
ANY_ROWS = arrays(np.float32, (3, 9), elements=st.one_of(st.floats(width=32), st.just(NAN), st.just(INF)))


def without_library(window: Floats) -> RowSpread:
    return spread._of_sorted(np.sort(window, axis=1))


@PATIENT
@given(ROWS)
def test_spread_is_what_numpy_finds(window: Floats) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of rows without any value
        level = np.nanmedian(window, axis=1)
        apart = np.abs(window - level[:, None])
        deviation = np.nanmedian(apart, axis=1)
    count = (~np.isnan(window)).sum(axis=1)

    found = spread_of(window.copy())

    np.testing.assert_array_equal(found.level, level)
    np.testing.assert_array_equal(found.deviation, deviation)
    np.testing.assert_array_equal(found.num_values, count)
    np.testing.assert_array_equal(median_of(window.copy()), level)
    for row, bound, num in zip(apart, found.bound, count, strict=True):
        within = np.sort(row)[: max(int(0.95 * num), 1)]
        assert bound == within[-1] if num else np.isnan(bound)


@PATIENT
@given(st.one_of(ROWS, ANY_ROWS))
@pytest.mark.skipif(spread._library() is None, reason="there is no compiled library to compare with")
def test_the_library_finds_the_same_to_the_last_bit(window: Floats) -> None:
    with np.errstate(all="ignore"):
        wanted = without_library(window)
    for name, mine, theirs in zip(RowSpread._fields, spread_of(window.copy()), wanted, strict=True):
        np.testing.assert_array_equal(mine, theirs, err_msg=name)


def test_sigma_is_the_standard_deviation_of_normal_values_and_more_for_heavy_tails() -> None:
    rng = np.random.default_rng(0)
    normal = rng.normal(3.0, 2.0, (1, 20_000)).astype(np.float32)
    heavy = np.where(rng.random(normal.shape) < 0.1, 10 * (normal - 3.0), normal).astype(np.float32)
    assert spread_of(normal).sigma == pytest.approx(2.0, rel=0.03)
    assert spread_of(heavy).sigma > 4.0
