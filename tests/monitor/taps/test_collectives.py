"""Collectives in one process, on the backend of torch that communicates with nobody."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.monitor.taps.collective_rows import EVERYTHING, Steps
from trainermon.core.config import CollectivesConfig
from trainermon.core.errors import ConfigError
from trainermon.core.flight_recorder import FlightRecorder
from trainermon.hooks.guard import FaultGuard
from trainermon.monitor.taps.collectives import CollectiveTaps

CPU = torch.device("cpu")


@pytest.fixture
def world():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def unnumbered(world, monkeypatch):
    """Return the world as a backend without sequence numbers shows it, whatever groups this process had before."""

    def refuse(_group):
        raise RuntimeError("does not yet support sequence numbers")

    monkeypatch.setattr(dist.ProcessGroup, "_get_sequence_number_for_group", refuse)
    monkeypatch.setattr(FlightRecorder, "progress", lambda _recorder: {})
    return world


def test_calls_of_a_coalesced_block_are_taken_when_the_block_was_waited_for(world):
    steps = Steps()

    def step():
        with _coalescing_manager(group=world, device=CPU, async_ops=True) as block:
            dist.isend(torch.full((2,), 3.0), 1)
            dist.irecv(torch.full((2,), 4.0), 1)
            dist.isend(torch.full((2,), 5.0), 1)
        block.wait()

    rows = steps.rows(step)

    assert rows.slots("world.send", 0) == {"pre.0", "wait_seconds"}
    assert rows.slots("world.send", 1) == {"pre.0"}  # waited for together with the first
    assert rows.slots("world.recv") == {"post.0"}
    assert rows.of("world.recv", "post.0").max == 4.0
    assert rows.value("world", "bytes") == 24
    assert rows.value("world", "unfinished") == 0


def test_block_that_fails_does_not_swallow_what_comes_after_it(world):
    steps = Steps()

    def fail():
        with _coalescing_manager(group=world, device=CPU):
            raise KeyError

    def step():
        with pytest.raises(KeyError):
            fail()
        dist.distributed_c10d._world.pg_coalesce_state.clear()  # torch forgets to

    steps.rows(step)

    assert steps.rows(lambda: dist.all_reduce(torch.ones(2))).slots("world.all_reduce") >= {"pre.0", "post.0"}


def test_result_is_taken_at_once_where_there_is_no_handle(world, monkeypatch):
    monkeypatch.setattr(dist.ProcessGroup, "allreduce", lambda group, tensors, opts=None: tensors[0].mul_(2) and None)
    steps = Steps()
    original = vars(dist.ProcessGroup)["allreduce"]

    rows = steps.rows(lambda: world.allreduce([torch.ones(1)]))

    assert rows.slots("world.all_reduce") == {"pre.0", "post.0"}
    assert rows.of("world.all_reduce", "post.0").max == 2.0
    assert vars(dist.ProcessGroup)["allreduce"] is original


def test_backend_without_sequence_numbers_has_no_count(unnumbered):
    rows = Steps().rows(lambda: dist.all_reduce(torch.ones(2)))

    assert rows.slots("world") == {"bytes", "unfinished"}


def test_only_the_first_tensors_of_a_long_list_are_taken(world):
    rows = Steps().rows(lambda: world.allreduce_coalesced([torch.ones(1) for _ in range(40)]).wait())

    assert sum(slot.startswith("post") for slot in rows.slots("world.all_reduce_coalesced")) == 16


def test_operand_that_cannot_be_read_has_no_row_and_is_told_once(world, caplog):
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    steps = Steps()

    def step():
        for _ in range(2):
            world.allreduce_coalesced([torch.ones(2), freed]).wait()

    rows = steps.rows(step)

    assert rows.slots("world.all_reduce_coalesced") == {"pre.0", "post.0", "wait_seconds"}
    assert len([record for record in caplog.records if "has no statistics" in record.message]) == 1


def test_error_of_a_collective_reaches_its_caller(world):
    steps = Steps()

    def step():
        with pytest.raises(TypeError, match="incompatible function arguments"):
            world.allreduce("no tensor")

    assert steps.rows(step).names() == set()


def test_fault_of_the_monitor_does_not_reach_training(world, monkeypatch, caplog):
    monkeypatch.setattr("trainermon.monitor.taps.collector.Collector.take", lambda *_: 1 / 0)
    steps = Steps()
    steps.taps.attach()

    dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(2))
    steps.taps.detach()

    assert len(steps.faults) == 1
    assert "division by zero" in steps.faults[0]


def test_handle_of_a_call_before_attaching_is_left_alone(world):
    work = dist.all_reduce(torch.ones(2), async_op=True)

    rows = Steps().rows(work.wait)

    assert rows.names() == set()


def test_without_process_groups_there_are_no_rows():
    assert Steps().rows(lambda: None) == {}


def test_groups_that_are_destroyed_are_let_go_of(world):
    steps = Steps()
    steps.taps.attach()
    extra = dist.new_group([0])
    extra.allreduce([torch.ones(1)]).wait()
    dist.destroy_process_group(extra)

    steps.taps.step_ended()
    steps.taps.detach()

    assert "other" not in {key.name for key in steps.sealed()}


def test_names_stay_the_same_when_taps_come_and_go(world):
    groups = [dist.new_group([0], group_desc="mesh_dp") for _ in range(2)]
    steps = Steps()

    def step():
        for factor, group in enumerate(groups, start=1):
            group.allreduce([torch.full((1,), float(factor))]).wait()

    for _ in range(2):
        rows = steps.rows(step)
        assert rows.of("dp.all_reduce", "post.0").max == 1.0
        assert rows.of("dp-2.all_reduce", "post.0").max == 2.0


def test_somebody_who_wraps_after_us_keeps_his_wrapper(world, monkeypatch):
    steps = Steps()
    calls = []
    steps.taps.attach()
    ours = dist.ProcessGroup.allreduce
    theirs = lambda *args: calls.append(1) or ours(*args)  # noqa: E731
    monkeypatch.setattr(dist.ProcessGroup, "allreduce", theirs)
    steps.taps.detach()

    assert dist.ProcessGroup.allreduce is theirs
    steps.collector.reset_step()
    rows = steps.rows(lambda: dist.all_reduce(torch.ones(2)))
    assert len(calls) == 1
    assert rows.slots("world.all_reduce", 0) == {"pre.0", "post.0", "wait_seconds"}
    assert rows.slots("world.all_reduce", 1) == set()
    assert dist.ProcessGroup.allreduce is theirs


def test_bad_pattern_is_refused():
    with pytest.raises(
        ConfigError, match=r"cc_distribution\.cc_codeline\[0\]: found '\(', expected a regular expression"
    ):
        CollectivesConfig(enable=True, cc_codeline=("(",))


def test_log_only_says_that_training_goes_on(caplog):
    caplog.set_level(logging.INFO, logger="trainermon")

    CollectiveTaps(None, FaultGuard(print), purposes={}, config=CollectivesConfig(enable=True, cc_log_only=True))

    assert "training goes on" in caplog.text


def test_nothing_is_taken_without_asking(unnumbered):
    steps = Steps(CollectivesConfig())

    assert steps.rows(lambda: dist.all_reduce(torch.ones(2))) == {}
    assert EVERYTHING.enable
