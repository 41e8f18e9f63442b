"""What readers derive from moments, against numpy on the elements."""

import math

import duckdb
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.moments import numpy_moments
from tests.strategies import fixed
from trainermon.core.derived import DERIVED, SQL
from trainermon.core.values import NO_ELEMENTS, STATISTICS, Moments
from trainermon.statistics.merge import merge_rows


def derive(moments, name):
    with np.errstate(divide="ignore", invalid="ignore"):
        return DERIVED[name](moments)


ELEMENTS = st.lists(st.one_of(st.floats(-1e30, 1e30), st.sampled_from((0.0, -0.0, math.nan, math.inf, -math.inf))))
EXPECTED = {
    "mean": lambda values: values.mean() if values.size else math.nan,
    "norm": lambda values: math.sqrt(np.square(values).sum()),
    "rms": lambda values: math.sqrt(np.square(values).mean()) if values.size else math.nan,
    "std": lambda values: values.std() if values.size else math.nan,
    "finite": lambda values: values.size,
    "absmax": lambda values: np.abs(values).max() if values.size else math.nan,
}


@pytest.mark.parametrize("name", EXPECTED)
@fixed
@given(elements=ELEMENTS)
def test_derived_statistics_are_those_of_the_finite_elements(name, elements):
    values = np.array(elements, dtype=np.float64)
    finite = values[np.isfinite(values)]

    [found] = derive(numpy_moments(values)[:, None], name)

    # std is a difference of two numbers of the size of the mean square
    scale = np.abs(finite).max(initial=0.0)
    np.testing.assert_allclose(
        found, EXPECTED[name](finite), rtol=1e-9, atol=1e-7 * scale if name == "std" else 1e-9 * scale
    )


@fixed
@given(elements=ELEMENTS)
def test_ratios_and_counts_are_of_all_elements(elements):
    values = np.array(elements, dtype=np.float64)
    moments = numpy_moments(values)[:, None]

    assert derive(moments, "nonfinite") == (~np.isfinite(values)).sum()
    np.testing.assert_allclose(derive(moments, "zero_ratio"), [(values == 0).mean() if values.size else math.nan])


@pytest.mark.parametrize("name", ["mean", "norm", "rms", "std", "zero_ratio", "finite", "nonfinite"])
@fixed
@given(elements=ELEMENTS)
def test_columns_and_single_values_agree(name, elements):
    moments = numpy_moments(np.array(elements, dtype=np.float64))

    np.testing.assert_array_equal(derive(moments[:, None], name)[0], getattr(Moments(*moments.tolist()), name))


@fixed
@given(elements=ELEMENTS)
def test_the_store_derives_the_same(elements):
    moments = Moments(*numpy_moments(np.array(elements, dtype=np.float64)).tolist())
    columns = ", ".join(f"?::DOUBLE AS {name}" for name in STATISTICS)

    found = duckdb.execute(
        f"SELECT {', '.join(SQL.values())} FROM (SELECT {columns})", [getattr(moments, name) for name in STATISTICS]
    ).fetchone()

    expected = [getattr(moments, name) for name in SQL]
    np.testing.assert_allclose([math.nan if value is None else value for value in found], expected, rtol=1e-12)


def test_equal_elements_have_a_standard_deviation_of_zero():
    counts = range(1, 200)
    rows = np.array([numpy_moments(np.full(count, 0.1)) for count in counts])

    spread = derive(rows.T, "std")

    assert np.all(spread >= 0)
    np.testing.assert_allclose(spread, 0, atol=1e-8)


def test_every_stored_statistic_can_be_read_by_name():
    moments = np.arange(16.0).reshape(8, 2)

    for index, name in enumerate(STATISTICS):
        np.testing.assert_array_equal(derive(moments, name), moments[index])


@fixed
@given(parts=st.lists(ELEMENTS, max_size=5))
def test_merge_gives_the_moments_of_all_elements(parts):
    rows = np.array([numpy_moments(np.array(part, dtype=np.float64)) for part in parts]).reshape(-1, 8)

    by_rows = merge_rows(torch.from_numpy(rows)).numpy()
    one_by_one = NO_ELEMENTS
    for row in rows:
        one_by_one = one_by_one.merge(Moments(*row.tolist()))

    expected = numpy_moments(np.array([element for part in parts for element in part], dtype=np.float64))
    scale = np.abs(rows[:, 3]).sum()
    for found in (by_rows, np.array([getattr(one_by_one, name) for name in STATISTICS])):
        np.testing.assert_array_equal(found[[0, 1, 2, 5, 6, 7]], expected[[0, 1, 2, 5, 6, 7]])
        np.testing.assert_allclose(found[3], expected[3], rtol=0, atol=1e-12 * max(scale, np.sqrt(expected[4])) * 8)
        np.testing.assert_allclose(found[4], expected[4], rtol=1e-12)
