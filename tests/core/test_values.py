"""Texts by which people tell series apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainermon.core.values import Kind, SeriesKey, Severity, TextEnum

WORDS = st.text("abc", min_size=1, max_size=3)
KEYS = st.builds(
    SeriesKey,
    st.just(Kind.ACTV),
    WORDS,
    WORDS,
    st.integers(0, 3),
    st.none() | st.integers(0, 3),
    st.integers(0, 3),
)


@given(KEYS, KEYS)
def test_series_of_one_kind_have_labels_of_their_own(one, other):
    assert (one.label == other.label) == (one == other)


@pytest.mark.parametrize(
    ("key", "label"),
    [
        (SeriesKey(Kind.PARAM_ORIGIN, "h.0.weight"), "h.0.weight"),
        (SeriesKey(Kind.ACTV, "h.0", "output.0", 2), "h.0.output.0#2"),
        (SeriesKey(Kind.ACTV, "h.0", "output.0", 0, 1), "h.0.output.0@1"),
        (SeriesKey(Kind.ACTV, "h.0", "output.0", 2, 0, 3), "3:h.0.output.0#2@0"),
    ],
)
def test_a_label_leaves_out_what_goes_without_saying(key, label):
    assert key.label == label


@pytest.mark.parametrize("member", [*Kind, *Severity])
def test_a_name_of_a_closed_set_is_equal_to_its_text_and_shown_as_it(member: TextEnum):
    assert [member, str(member), f"{member}", f"{member!s:>20}".strip()] == [member.value] * 4
