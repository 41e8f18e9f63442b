"""Which ranks hold copies of the same elements, and which of them are named, by hand."""

import pytest

from trainermon.agent.replicas import Copies, Divergence, copies_of, divergences
from trainermon.monitor.values import Coordinates, Kind, Placement, SeriesKey

KEY = SeriesKey(Kind.CHECKSUM, "weight")
COPIES = Copies(KEY)


def placement(*replicated_over, partitioned_over=()):
    return Placement(dtype="float32", shape=(4,), replicated_over=replicated_over, partitioned_over=partitioned_over)


def are_compared(place, one, other):
    return copies_of(KEY, place, Coordinates(**one)) == copies_of(KEY, place, Coordinates(**other))


@pytest.mark.parametrize(
    ("place", "one", "other", "expected"),
    [
        (placement("dp"), {"dp": 0}, {"dp": 1}, True),
        (placement("dp"), {"dp": 0, "ep": 0}, {"dp": 1, "ep": 1}, True),  # experts are spread over data-parallel ranks
        (placement("dp"), {"tp": 0}, {"tp": 1}, False),  # of a user's own tensor parallelism nothing is known
        (placement("dp", partitioned_over=("tp",)), {"dp": 0, "tp": 1}, {"dp": 1, "tp": 1}, True),
        (placement("dp", partitioned_over=("tp",)), {"tp": 0}, {"tp": 1}, False),
        (placement("dp", "tp"), {"tp": 0, "dp": 0}, {"tp": 1, "dp": 1}, True),
        (placement("dp"), {"pp": 0}, {"pp": 1}, False),
        (placement("edp"), {"dp": 0, "ep": 0}, {"dp": 2, "ep": 0}, True),
        (placement("edp"), {"dp": 0, "ep": 0}, {"dp": 1, "ep": 1}, False),
    ],
)
def test_ranks_hold_copies_where_only_replicated_axes_tell_them_apart(place, one, other, expected):
    assert are_compared(place, one, other) is expected


@pytest.mark.parametrize(
    "place",
    [
        placement(),
        placement("dp", partitioned_over=("etp",)),  # an axis on which no rank knows its place
    ],
)
def test_nothing_is_said_of_what_is_no_copy_or_cannot_be_told_apart(place):
    assert copies_of(KEY, place, Coordinates()) is None


@pytest.mark.parametrize(
    ("held", "ranks", "others"),
    [
        ({0: 7, 1: 8}, (0, 1), ()),
        ({0: 7, 1: 8, 2: 7}, (1,), (0, 2)),
        ({0: 7, 1: 8, 2: 8, 3: 7}, (0, 1, 2, 3), ()),
        ({0: 7, 1: 8, 2: 9, 3: 7}, (1, 2), (0, 3)),
        ({0: 5, 1: 6, 2: 7}, (0, 1, 2), ()),
    ],
)
def test_the_ranks_that_differ_from_most_are_named_or_all_where_nobody_can_tell(held, ranks, others):
    reports = {rank: {COPIES: checksum} for rank, checksum in held.items()}

    assert divergences(reports) == [Divergence(copies=COPIES, ranks=ranks, others=others)]


def test_equal_copies_and_a_rank_without_fellows_are_no_divergence():
    other = Copies(SeriesKey(Kind.CHECKSUM, "other"))

    assert divergences({0: {COPIES: 7}, 1: {COPIES: 7, other: 3}}) == []
    assert divergences({}) == []
