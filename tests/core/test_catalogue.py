from trainermon.core.catalogue import KINDS, STATISTICS
from trainermon.core.values import STATISTICS as MOMENTS
from trainermon.core.values import Kind, Moments


def test_every_kind_is_described():
    assert list(KINDS) == list(Kind)


def test_every_stored_and_derived_statistic_is_described():
    derived = [name for name, member in vars(Moments).items() if isinstance(member, property)]

    assert list(STATISTICS) == [*MOMENTS, *derived]
