import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainermon.exporters.grid import MIN_COLUMNS, StepGrid


def put_all(grid, table):
    for step, values in table.items():
        grid.put(step, np.array(values, np.float64))


def test_every_step_has_its_own_column_while_all_fit():
    grid = StepGrid()

    put_all(grid, {10: [1.0, 2.0], 11: [3.0, np.nan], 12: [np.inf, -4.0]})

    pooled = grid.pool(100)
    assert (pooled.first_step, pooled.stride) == (10, 1)
    np.testing.assert_array_equal(pooled.values, np.array([[1, 3, np.inf], [2, np.nan, -4]], np.float32))


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.integers(0, 3000),
        st.lists(st.sampled_from([np.nan, np.inf, -1.0, 0.0, 0.5, 2.0, 7.0]), min_size=1, max_size=3),
        min_size=1,
        max_size=200,
    ),
    st.integers(1, 300),
)
def test_a_cell_is_the_largest_value_of_its_steps_whatever_was_merged_on_the_way(table, columns):
    table = dict(sorted(table.items()))
    grid = StepGrid(max_cells=3 * MIN_COLUMNS, max_columns=128)

    put_all(grid, table)

    pooled = grid.pool(columns)
    num_rows = max(map(len, table.values()))
    expected = np.full((num_rows, pooled.values.shape[1]), np.nan, np.float32)
    for step, values in table.items():
        for row, value in enumerate(values):
            column = (step - pooled.first_step) // pooled.stride
            expected[row, column] = np.fmax(expected[row, column], value)
    np.testing.assert_array_equal(pooled.values, expected)
    assert pooled.values.shape[1] <= columns
    assert grid.num_bytes <= 4 * max(3 * MIN_COLUMNS, num_rows * MIN_COLUMNS)


def test_rows_that_come_later_have_no_earlier_values():
    grid = StepGrid()

    put_all(grid, {0: [1.0], 1: [2.0, 5.0]})

    np.testing.assert_array_equal(grid.pool(10).values, np.array([[1, 2], [np.nan, 5]], np.float32))


def test_columns_are_as_wide_as_the_interval_of_collection():
    grid = StepGrid()

    put_all(grid, {step: [float(step)] for step in range(0, 1000, 10)})

    pooled = grid.pool(1000)
    assert pooled.stride == 10
    assert not np.isnan(pooled.values).any()


def test_a_cut_forgets_that_step_and_what_follows():
    grid = StepGrid()
    put_all(grid, {step: [float(step)] for step in range(10)})

    grid.cut(6)
    grid.put(6, np.array([-1.0]))

    np.testing.assert_array_equal(grid.pool(10).values, np.array([[0, 1, 2, 3, 4, 5, -1]], np.float32))


def test_a_cut_behind_the_last_step_and_a_step_before_the_first_change_nothing():
    grid = StepGrid()
    put_all(grid, {step: [float(step)] for step in range(5, 13)})

    grid.cut(13)
    grid.put(4, np.array([99.0]))

    np.testing.assert_array_equal(grid.pool(10).values, np.array([range(5, 13)], np.float32))


def test_a_grid_that_was_cut_to_nothing_begins_anew_at_an_earlier_step():
    grid = StepGrid()
    put_all(grid, {100: [1.0], 101: [1.0]})

    grid.cut(50)
    grid.put(50, np.array([2.0]))

    pooled = grid.pool(10)
    assert pooled.first_step == 50
    np.testing.assert_array_equal(pooled.values, [[2.0]])


def test_a_finite_value_beyond_float32_is_not_shown_as_infinite():
    grid = StepGrid()

    put_all(grid, {0: [1e39, -1e39]})

    assert np.isfinite(grid.pool(1).values).all()


def test_a_selection_can_be_added_to_without_changing_the_grid():
    grid = StepGrid()
    put_all(grid, {0: [1.0, 2.0, 3.0]})

    copy = grid.select(np.array([2, 0, 5]))
    copy.put(1, np.array([9.0, 9.0, 9.0]))

    np.testing.assert_array_equal(copy.pool(10).values, np.array([[3, 9], [1, 9], [np.nan, 9]], np.float32))
    assert grid.pool(10).values.shape == (3, 1)


def test_an_empty_grid_has_no_columns():
    assert StepGrid().pool(10).values.shape == (0, 0)
