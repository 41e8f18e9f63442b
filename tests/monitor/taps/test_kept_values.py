"""Collectives that leave what they are given as it is are read once, and tell the same of it before and after."""

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, _make_nccl_premul_sum

from tests.monitor.taps.collective_rows import Steps, close, moments
from trainermon.monitor.taps.operands import keeps
from trainermon.statistics.slabs import Slab

REDUCTIONS = [getattr(dist.ReduceOp, name) for name in ("SUM", "PRODUCT", "MIN", "MAX")]


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def taken(monkeypatch):
    """Return a list of the tensors that were read, by their size."""
    read, take = [], Slab.take

    def takes(slab, tensors):
        read.extend(tensor.numel() for tensor in tensors)
        return take(slab, tensors)

    monkeypatch.setattr(Slab, "take", takes)
    return read


def bits_of_everything():
    """Return float32 values of all kinds: NaN with a payload, infinities, zeros of both signs, subnormal numbers."""
    rare = torch.tensor([0x7FC01234, 0xFFC00001, 0x7F800000, 0xFF800000, 0x80000000, 0, 1, 0x007FFFFF, 0x3F8CCCCD])
    return (rare - ((rare >> 31) << 32)).to(torch.int32)


@pytest.mark.parametrize("op", REDUCTIONS)
def test_group_of_one_changes_no_bit_and_is_read_once(alone, taken, op):
    bits = bits_of_everything()
    x = bits.clone().view(torch.float32)

    rows = Steps().rows(lambda: dist.all_reduce(x, op))

    assert torch.equal(x.view(torch.int32), bits)
    assert taken == [9]
    assert rows.slots("world.all_reduce") == {"pre.0", "post.0", "wait_seconds"}
    before, after = (rows.of("world.all_reduce", slot) for slot in ("pre.0", "post.0"))
    assert before == after
    assert (after.count, after.zeros, after.nans, after.infs) == (9, 2, 2, 2)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # names that newer versions of torch change
def test_copies_within_a_group_of_one_have_the_rows_of_what_was_copied(alone, taken):
    gathered, scattered, exchanged = (torch.full((3,), 9.0) for _ in range(3))
    given = torch.tensor([1.0, 2.0, 0.0])

    def step():
        dist.all_gather_into_tensor(gathered, given)
        dist.reduce_scatter_tensor(scattered, given)
        dist.all_to_all_single(exchanged, given)
        dist.broadcast(given, 0)

    rows = Steps().rows(step)

    assert taken == [3] * 4
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast"):
        assert close(rows.of(f"world.{name}", "post.0"), moments(given))
    assert all(torch.equal(each, given) for each in (gathered, scattered, exchanged))


def test_what_is_written_before_the_wait_is_seen(alone, taken):
    x = torch.ones(4)

    def step():
        work = dist.all_reduce(x, async_op=True)
        x.fill_(7.0)
        work.wait()

    rows = Steps().rows(step)

    assert rows.of("world.all_reduce", "pre.0").max == 1.0
    assert rows.of("world.all_reduce", "post.0").max == 7.0
    assert taken == [4, 4]


def test_result_is_read_where_what_goes_in_cannot_be(alone, monkeypatch):
    take, refused = Slab.take, []

    def takes(slab, tensors):
        if not refused:
            refused.append(tensors)
            raise ValueError("no memory of its own")
        return take(slab, tensors)

    monkeypatch.setattr(Slab, "take", takes)

    rows = Steps().rows(lambda: dist.all_reduce(torch.ones(4)))

    assert rows.slots("world.all_reduce") == {"post.0", "wait_seconds"}


def test_operation_that_scales_keeps_nothing():
    options, x = dist.AllreduceOptions(), torch.ones(2)
    options.asyncOp = False
    assert keeps(options, [x], [x])
    assert not keeps(options, [x], [torch.ones(3)])
    assert not keeps(options, [x], [x.double()])
    assert not keeps(options, [], [x])

    options.reduceOp = _make_nccl_premul_sum(2.0)

    assert not keeps(options, [x], [x])


def test_backend_that_may_pack_what_it_sends_is_read_twice(alone, taken, monkeypatch):
    monkeypatch.setitem(dist.distributed_c10d._world.pg_backend_config, alone, "cpu:of_somebody")

    Steps().rows(lambda: dist.all_reduce(torch.ones(5)))

    assert taken == [5, 5]
