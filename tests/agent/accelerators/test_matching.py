"""Which accelerator a rank is on, by what the environment, torch and the driver say."""

from __future__ import annotations

import pytest

from trainermon.agent.accelerators.matching import RankAccelerator, find_accelerator
from trainermon.agent.accelerators.readings import AcceleratorReading

A, B = (AcceleratorReading(uuid=f"GPU-{name * 8}-0000", index=i, pids=(100 + i,)) for i, name in enumerate("ab"))
SLICES = tuple(AcceleratorReading(uuid=f"MIG-{i}", index=-1, pids=(200 + i,)) for i in range(2))


def device(index=0, visible="", uuid="", pid=0, type="cuda"):
    return RankAccelerator(type=type, index=index, visible=visible, uuid=uuid, pid=pid)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (device(0), A),
        (device(1), B),
        (device(0, visible="1"), B),
        (device(1, visible="1, 0"), A),
        (device(0, visible="GPU-bbbbbbbb-0000"), B),
        (device(1, visible="GPU-a,GPU-b"), B),  # beginnings
        (device(0, visible="MIG-1,MIG-0"), SLICES[1]),
        (device(0, uuid="bbbbbbbb-0000"), B),  # the driver's order is another one than torch's
        (device(0, pid=101), B),
        (device(0, uuid="bbbbbbbb-0000", pid=100), B),
        (device(0, pid=200), SLICES[0]),
        (device(0, pid=12345), A),  # a container has process ids of its own
        (device(2), None),
        (device(0, visible="GPU-c"), None),
        (device(3, visible="0,1"), None),
        (device(1, visible="1,0", type="npu"), A),
    ],
)
def test_the_surest_evidence_counts(given, expected):
    assert find_accelerator(given, (A, B, *SLICES)) is expected


def test_nothing_is_guessed_where_two_would_fit():
    assert find_accelerator(device(0, visible="GPU-"), (A, B)) is None
    both = (AcceleratorReading(uuid="GPU-x", index=5, pids=(7,)), AcceleratorReading(uuid="GPU-y", index=6, pids=(7,)))
    assert find_accelerator(device(0, pid=7), both) is None


def test_what_a_rank_has_written_is_read():
    about = {"pid": 7, "accelerator": {"type": "cuda", "index": 1, "visible": "3,4", "uuid": "u"}}
    assert RankAccelerator.of(about) == device(1, visible="3,4", uuid="u", pid=7)
    assert RankAccelerator.of({"pid": 7, "accelerator": None}) is None
    assert RankAccelerator.of({"pid": 7}) is None
