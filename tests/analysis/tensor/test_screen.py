"""Numbers, sizes and tables as text."""

import math

import numpy as np
import pytest

from trainermon.analysis.tensor.screen import number, position, size, table


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (True, "True"),
        (123456789, "123456789"),
        (np.int64(-7), "-7"),
        (np.float32(0.1), "0.1"),
        (123456.789, "1.2346e+05"),
        (math.nan, "NaN"),
        (math.inf, "Inf"),
        (-math.inf, "-Inf"),
        (1.5 + 2j, "1.5+2j"),
        (1.5 - 2j, "1.5-2j"),
        (np.complex64(complex(math.nan, -math.inf)), "NaN-Infj"),
    ],
)
def test_a_number_is_short_and_keeps_its_sign(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("count_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (3 << 20, "3.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (7 << 40, "7.0 TiB"),
        (1 << 60, "1048576.0 TiB"),
    ],
)
def test_a_size_has_the_largest_unit_of_which_it_has_one(count_bytes, text):
    assert size(count_bytes) == text


def test_columns_are_aligned_names_to_the_left_and_numbers_to_the_right():
    assert list(table(("name", "n"), [("a", "1,000"), ("longer", "2")])) == [
        "  name        n",
        "  a       1,000",
        "  longer      2",
    ]


def test_a_position_is_written_as_an_index():
    assert [position(()), position((3, 17))] == ["[]", "[3, 17]"]
