"""The text of a tensor's statistics, by the compiled library and without it: Python's own repr of each number."""

import json
import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainermon.core.native.library import library_or_none
from trainermon.dump.files import numbers
from trainermon.dump.files.numbers import ElementKind, numbers_texts

KINDS = (ElementKind.FRACTION, ElementKind.INTEGER, ElementKind.BOOLEAN)
# A double of any sign and exponent is as likely as another; those that training has are among the rest.
BITS = st.integers(0, (1 << 64) - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0])
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.floats(width=32, min_value=-8, max_value=8)


@pytest.fixture(params=["compiled", "python"], autouse=True)
def way(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(numbers, "_compiled", lambda: None)
    elif library_or_none() is None:
        pytest.skip("the library was not built")
    return request.param


def texts_of(*rows, kind=ElementKind.FRACTION):
    return numbers_texts(np.array(rows, np.float64), [kind] * len(rows))


def row_of(value, count=1):
    return [count, value, value, value, 0, 0, 0, 0]


def edges():
    """Return the doubles around which the digits change: powers of two and of ten, and their neighbours."""
    powers = [math.ldexp(1, exponent) for exponent in range(-1074, 1024)]
    powers += [float(f"1e{exponent}") for exponent in range(-323, 309)]
    around = [math.nextafter(value, end) for value in powers for end in (0, math.inf)]
    return [value for value in (0.0, -0.0, *powers, *around) if math.isfinite(value)]


def test_each_number_is_the_shortest_that_reads_back_the_same():
    values = [*edges(), *(number / 1000 for number in range(2000)), *map(float, range(2000))]
    values += [-value for value in values]

    for value, text in zip(values, texts_of(*map(row_of, values)), strict=True):
        assert text.startswith(f'"Max": {value!r}, "Min": {value!r}, "Mean": {value!r}, ')


@given(st.lists(NUMBERS | BITS.filter(math.isfinite), min_size=1))
def test_any_number_is_written_as_python_writes_it(values):
    for value, text in zip(values, texts_of(*map(row_of, values)), strict=True):
        assert text.startswith(f'"Max": {value!r}, "Min": {value!r}, "Mean": {value!r}, ')


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_an_object_of_json_with_every_number(kind):
    text = texts_of([12, 0, 1, 9, 16, 3, 2, 1], kind=kind)[0]

    one, zero = (True, False) if kind is ElementKind.BOOLEAN else (1, 0)
    means = {"Mean": None, "Norm": None} if kind is ElementKind.BOOLEAN else {"Mean": 1.0, "Norm": 4.0}
    assert json.loads(f"{{{text}}}") == {"Max": one, "Min": zero, **means, "nans": 2, "infs": 1, "zeros": 3}
    assert isinstance(json.loads(f"{{{text}}}")["Max"], {ElementKind.FRACTION: float}.get(kind, int))


def test_rows_of_all_kinds_keep_their_order():
    rows = [row_of(float(number)) for number in range(9)]
    kinds = [KINDS[number % 3] for number in range(9)]

    texts = numbers_texts(np.array(rows), kinds)

    shown = [json.loads(f"{{{text}}}")["Max"] for text in texts]
    assert shown == [0.0, 1, True, 3.0, 4, True, 6.0, 7, True]


@pytest.mark.parametrize("nans", [0, 3])
def test_without_a_finite_element_there_are_counts_only(nans):
    text = texts_of([nans, math.inf, -math.inf, 0, 0, 0, nans, 0])[0]

    found = json.loads(f"{{{text}}}")
    assert found == {"Max": None, "Min": None, "Mean": None, "Norm": None, "nans": nans, "infs": 0, "zeros": 0}


def test_a_sum_that_fits_no_double_leaves_the_extremes():
    text = texts_of([2, 1e300, 1.5e308, math.inf, math.inf, 0, 0, 0])[0]

    found = json.loads(f"{{{text}}}")
    assert found == {"Max": 1.5e308, "Min": 1e300, "Mean": None, "Norm": None, "nans": 0, "infs": 0, "zeros": 0}
