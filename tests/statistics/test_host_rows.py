"""Rows on the host, with the compiled library and without, against numpy in float64."""

import math

import numpy as np
import pytest

from tests.moments import numpy_moments
from trainermon.core.native.builtins import builtin
from trainermon.statistics.rows import host_rows
from trainermon.statistics.rows.host_rows import Columns, address_of, any_nonfinite, norm

NANS, INFS = 6, 7
SCALARS = (0.0, -0.0, 2.5, -3.0, math.inf, -math.inf, math.nan, 1e150, 1e-150)


@pytest.fixture(params=["compiled", "numpy"], autouse=True)
def _library(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(host_rows, "builtin", lambda _name: None)
        for name in ("_any_nonfinite", "_norm"):
            monkeypatch.setattr(host_rows, name, None)
    else:
        assert builtin("norm") is not None


def table(num_rows=7):
    """Return rows of moments, each number another one."""
    return np.random.default_rng(0).normal(size=(num_rows, 8))


def test_columns_are_the_rows_in_the_order_of_their_places_and_then_those_of_the_numbers():
    places, columns = [3, 0, 0, 6], Columns([3, 0, 0, 6], len(SCALARS))
    for step, scalars in enumerate([SCALARS, SCALARS[::-1]]):
        rows = table() + step

        columns.write(rows, address_of(rows), scalars)

        expected = [*(rows[place] for place in places), *(numpy_moments(np.array([number])) for number in scalars)]
        assert columns.values.shape == (8, len(places) + len(SCALARS))
        np.testing.assert_array_equal(columns.values.T, expected)


@pytest.mark.parametrize("scalars", [(), (1.5,)])
def test_columns_of_no_rows(scalars):
    columns = Columns((), len(scalars))

    columns.write(table(), address_of(table()), scalars)

    expected = [numpy_moments(np.array([number])) for number in scalars] or np.empty((0, 8))
    np.testing.assert_array_equal(columns.values.T, expected)


@pytest.mark.parametrize("column", [NANS, INFS])
def test_a_count_of_what_is_not_finite_is_seen_in_the_rows_that_are_asked_for(column):
    rows = np.ones((5, 8))
    rows[:, [NANS, INFS]] = 0
    rows[2, column] = 1

    assert [any_nonfinite(rows, address_of(rows), first, 2) for first in range(4)] == [False, True, True, False]
    assert not any_nonfinite(rows, address_of(rows), 2, 0)


def test_the_norm_is_that_of_all_elements_together_and_nan_where_there_is_one():
    arrays = [np.random.default_rng(number).normal(size=number + 2) for number in range(3)]
    rows = np.array([numpy_moments(each) for each in [*arrays, np.array([1.0, math.nan])]])

    assert norm(rows, address_of(rows), (2, 0)) == pytest.approx(
        np.linalg.norm(np.concatenate([arrays[2], arrays[0]])), rel=1e-15
    )
    assert math.isnan(norm(rows, address_of(rows), (0, 3)))
    assert norm(rows, address_of(rows), ()) == 0.0
