"""Which ranks hold copies of the same elements, and what an agent keeps of their checksums."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainermon.agent.across_nodes import replicas
from trainermon.agent.across_nodes.replicas import ReplicaChecksums, copies_of
from trainermon.core.journal import Header
from trainermon.core.values import Coordinates, Kind, Placement, SeriesKey, StatBlock
from trainermon.statistics.checksums import rows_of

KEY = SeriesKey(Kind.CHECKSUM, "weight")


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


def blocks(checksums, *, rank=0, attempt=0, place=None, order=None):
    """Return header and block of a step 40 with these checksums by name, in `order`, and a gradient beside them."""
    names = list(order or checksums)
    keys = (SeriesKey(Kind.GRAD_REDUCED, "weight"), *(SeriesKey(Kind.CHECKSUM, name) for name in names))
    placed = (placement(), *(place or placement("dp") for _ in names))
    coordinates = Coordinates(rank=rank, world_size=2, dp=rank, dp_size=2)
    header = Header(
        run_id="run",
        attempt=attempt,
        coordinates=coordinates,
        host="host",
        pid=1,
        started_s=0.0,
        series=keys,
        placements=placed,
    )
    sums = torch.tensor([checksums[name] - (1 << 64 if checksums[name] >> 63 else 0) for name in names])
    values = np.ascontiguousarray(np.vstack([np.ones((1, 8)), rows_of(sums).numpy()]).T)
    return header, StatBlock(step=40, time_s=0.0, series=np.arange(len(keys), dtype=np.uint32), values=values)


def keep(*given):
    kept = ReplicaChecksums()
    for header, block in given:
        kept.on_block(header, header.series, block)
    return kept


SUMS = st.integers(0, 2**64 - 1)


@given(st.dictionaries(st.text("abc.", min_size=1, max_size=4), SUMS, min_size=1, max_size=5), st.randoms())
def test_digests_do_not_depend_on_the_order_of_series_and_every_bit_of_a_checksum_is_told(checksums, random):
    order = list(checksums)
    random.shuffle(order)
    kept = keep(blocks(checksums), blocks(checksums, rank=1, order=order))

    [(group, digests)] = kept.digests()["steps"]["40"].items()

    assert digests["0"] == digests["1"]
    assert kept.copies(40, group) == {0: checksums, 1: {name: checksums[name] for name in order}}


@given(SUMS, SUMS, st.integers(0, 63))
def test_a_flipped_bit_or_two_exchanged_checksums_give_another_digest(first, second, bit):
    sound = {"a": first, "b": second}
    flipped, exchanged = {"a": first ^ 1 << bit, "b": second}, {"a": second, "b": first}
    digests = [keep(blocks(sums)).digests()["steps"]["40"] for sums in (sound, flipped, exchanged)]

    assert digests[0] != digests[1]
    assert (digests[0] != digests[2]) == (first != second)


def test_ranks_without_a_common_copy_are_of_different_groups():
    split = placement("dp", partitioned_over=("tp",))
    kept = keep(blocks({"a": 1}, place=split), blocks({"a": 1}, rank=1, place=placement("tp")))

    assert sorted(kept.digests()["steps"]["40"]) == ["dp1 pp0 cp0 ep0", "tp0 pp0 cp0"]


def test_only_the_last_steps_of_the_newest_attempt_are_kept():
    header, block = blocks({"a": 1})
    newer, _ = blocks({"a": 1}, attempt=1)
    steps = range(replicas.MAX_STEPS + 3)
    kept = keep(*((newer, dataclasses.replace(block, step=step)) for step in steps), (header, block))

    assert [int(step) for step in kept.digests()["steps"]] == list(steps)[3:]
    assert [int(step) for step in kept.digests(after=steps[-3])["steps"]] == list(steps)[-2:]
    assert kept.digests()["attempt"] == 1
    assert kept.copies(0, "tp0 pp0 cp0") == {}


def test_series_that_join_the_table_later_are_seen():
    header, block = blocks({"a": 1, "b": 2})
    early = dataclasses.replace(header, series=header.series[:2], placements=header.placements[:2])
    first = dataclasses.replace(block, series=block.series[:2], values=np.ascontiguousarray(block.values[:, :2]))
    kept = keep((early, first), (header, dataclasses.replace(block, step=41)))

    assert kept.copies(40, "tp0 pp0 cp0") == {0: {"a": 1}}
    assert kept.copies(41, "tp0 pp0 cp0") == {0: {"a": 1, "b": 2}}
