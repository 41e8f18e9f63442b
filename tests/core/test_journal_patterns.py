"""What follows from which series a block shows is worked out once for each combination, and belongs to it alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from trainermon.core.journal.patterns import ByPattern, compact


def test_each_combination_is_worked_out_once_and_again_after_clear() -> None:
    asked: list[list[int]] = []

    def total(series: NDArray[np.uint32]) -> int:
        asked.append(series.tolist())
        return int(series.sum())

    made = ByPattern[int](total)
    first, second = np.array([1, 2], np.uint32), np.array([1, 3], np.uint32)

    assert [made.of(series) for series in (first, first.copy(), second, first)] == [3, 3, 4, 3]
    assert asked == [[1, 2], [1, 3]]

    made.clear()
    assert made.of(first) == 3
    assert asked == [[1, 2], [1, 3], [1, 2]]


def test_combinations_without_end_are_not_all_kept() -> None:
    made = ByPattern[int](lambda series: int(series[0]))
    for number in range(1000):
        assert made.of(np.array([number], np.uint32)) == number
    assert len(made._made) <= 16


@given(st.lists(st.integers(0, 30), unique=True))
def test_compact_chooses_the_same_elements(chosen: list[int]) -> None:
    elements, indices = np.arange(100, 140), np.array(chosen, np.intp)

    found = compact(indices)

    assert elements[found].tolist() == elements[indices].tolist()
    assert isinstance(found, slice) == (chosen == list(range(chosen[0], chosen[0] + len(chosen))) if chosen else True)


@pytest.mark.parametrize("indices", [[2, 2, 2], [3, 2, 1], [0, 2, 1], [1, 1, 3]])
def test_indices_that_are_not_ascending_are_no_slice(indices: list[int]) -> None:
    assert not isinstance(compact(np.array(indices)), slice)
