"""What a rank notes of its collectives, and that nothing of it stays behind or reaches training."""

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from trainermon.core.call_notes import MAX_NOTES, OPERATIONS, check_sum, parse_notes
from trainermon.monitor.taps.noted_calls import NotedCalls
from trainermon.monitor.taps.operands import METHODS


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def noted():
    noted = NotedCalls()
    noted.attach()
    yield noted
    noted.detach()


@pytest.fixture
def notes(noted):
    """Read the notes as an agent does."""
    place = Path(f"/proc/{os.getpid()}/fd/{noted.descriptor}")
    return lambda: parse_notes(place.read_bytes())


def during(monkeypatch, owner, name, look):
    """Return what `look` sees while the original of a method runs."""
    original, seen = getattr(owner, name), []

    def looks(*args, **kwargs):
        seen.append(look())
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, looks)
    return seen


def test_calls_are_counted_by_group_and_none_is_in_flight_once_it_was_waited_for(world, noted, notes):
    pair = dist.new_group([0])
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    dist.broadcast(torch.ones(2), 0, group=pair)

    found = {note.group: note for note in notes()}

    first, second = found[check_sum(dist.group.WORLD.group_name)], found[check_sum(pair.group_name)]
    assert (first.collectives, first.p2p, first.operation) == (3, 0, "")
    assert (second.collectives, second.p2p, second.operation) == (1, 0, "")


def test_call_is_told_while_it_runs_and_while_it_is_waited_for(world, monkeypatch):
    def look():
        return parse_notes(Path(f"/proc/self/fd/{told.descriptor}").read_bytes())

    in_call = during(monkeypatch, dist.ProcessGroup, "allreduce", look)
    in_wait = during(monkeypatch, dist.Work, "wait", look)
    told = NotedCalls()
    told.attach()
    try:
        dist.all_reduce(torch.ones(2, 3))
        at_once = [*in_call, *in_wait]
        handle = dist.all_reduce(torch.ones(5), async_op=True)
        between = look()
        handle.wait()
    finally:
        told.detach()

    assert [[(note.operation, note.number, note.elements) for note in notes] for notes in at_once] == [
        [("all_reduce", 1, 6)]
    ] * 2
    assert [(note.operation, note.collectives) for note in between] == [("", 2)]
    assert [(note.operation, note.number, note.elements) for note in in_wait[1]] == [("all_reduce", 2, 5)]


def test_call_that_fails_is_over_and_stays_told_as_failed_until_the_next(world, noted, notes):
    no_tensor: Any = "no tensor"
    with pytest.raises(TypeError, match="incompatible function arguments"):
        dist.group.WORLD.allreduce(no_tensor)

    assert [(note.collectives, note.operation, note.failed) for note in notes()] == [(1, "all_reduce", True)]
    dist.all_reduce(torch.ones(4))
    assert [(note.collectives, note.operation, note.failed) for note in notes()] == [(2, "", False)]


def test_nothing_stays_when_it_is_over(world):
    before = {name: vars(dist.ProcessGroup).get(name) for name in METHODS}
    waits, descriptors = dist.Work.wait, os.listdir("/proc/self/fd")
    noted = NotedCalls()
    noted.attach()
    group = dist.new_group([0])
    dist.all_reduce(torch.ones(2), group=group)
    gone = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()

    assert gone() is None
    noted.detach()
    noted.detach()

    assert {name: vars(dist.ProcessGroup).get(name) for name in METHODS} == before
    assert dist.Work.wait is waits
    assert len(os.listdir("/proc/self/fd")) <= len(descriptors)


def test_notes_cannot_be_shortened_which_would_end_the_training(noted):
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.truncate(f"/proc/self/fd/{noted.descriptor}", size)


def test_groups_beyond_the_last_place_are_left_out(world, noted, notes):
    for group in [dist.new_group([0]) for _ in range(MAX_NOTES + 3)]:
        dist.all_reduce(torch.ones(2), group=group)

    assert [note.collectives for note in notes()] == [1] * MAX_NOTES


def test_fault_of_the_notes_ends_only_the_notes(world, noted, monkeypatch):
    monkeypatch.setattr(noted, "_add", lambda _: 1 / 0)
    x = torch.ones(2)

    dist.all_reduce(x)
    dist.all_reduce(x)

    assert x.tolist() == [1.0, 1.0]
    assert noted.descriptor == -1


def test_every_operation_has_a_place():
    assert {op.name for op in METHODS.values()} <= set(OPERATIONS)
