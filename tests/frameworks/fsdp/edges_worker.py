"""One of two ranks: what is refused, what is left behind, and what stands between two due steps; asserts for itself."""

import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor

from tests.frameworks.torch_job import Net, batch
from trainermon import TrainerMon
from trainermon.core.errors import AttachError
from trainermon.core.values import Coordinates
from trainermon.monitor.frameworks import detect

CONFIG = {"monitor_mbs_grad": True, "xy_distribution": True, "agent": {"start": False}}
BOTH = Coordinates(world_size=2, dp_size=2)


def make(wrap):
    torch.manual_seed(0)
    model = wrap(Net())
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def fsdp2(net, **options):
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def fsdp1(net):
    return FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))


def flat_fsdp1(net):
    return FullyShardedDataParallel(net, use_orig_params=False, device_id=torch.device("cpu"))


def step(model, optimizer, number):
    model(*batch(number, 0, dist.get_rank())).backward()
    optimizer.step()
    optimizer.zero_grad()


def traces(model):
    """Return everything that a monitor could have left on a model and in torch."""
    groups = [
        g for m in model.modules() if hasattr(m, "_get_fsdp_state") for g in m._get_fsdp_state()._fsdp_param_groups
    ]
    unsharded = [p._unsharded_param for group in groups for p in group.fsdp_params]
    leaves = [*unsharded, *model.parameters(), *(m._flat_param for m in model.modules() if hasattr(m, "_flat_param"))]
    return [
        [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()],
        [len(leaf._backward_hooks or {}) + len(leaf._post_accumulate_grad_hooks or {}) for leaf in leaves],
        [sorted(vars(group)) for group in groups],
        vars(_fsdp_param_group)["foreach_reduce"],
    ]


def check_nothing_is_left(wrap):
    model, optimizer = make(wrap)
    step(model, optimizer, 0)
    before = traces(model)
    with TrainerMon(CONFIG) as monitor:
        monitor.set_monitor(model, optimizer)
        assert traces(model) != before
        step(model, optimizer, 1)
    assert traces(model) == before


def check_nothing_is_attached_between_due_steps():
    model, optimizer = make(fsdp2)
    step(model, optimizer, 0)
    before = traces(model)
    with TrainerMon(CONFIG | {"step_interval": 2}) as monitor:
        monitor.set_monitor(model, optimizer)
        step(model, optimizer, 1)  # step 0 of the monitor is due, and what comes now is not
        assert traces(model) == before
        step(model, optimizer, 2)
        assert traces(model) != before


def check_unsharded_parameters_are_refused():
    model, optimizer = make(fsdp2)
    model.unshard()
    with pytest.raises(AttachError, match="unsharded at the moment"):
        detect([model], optimizer, BOTH)


def check_an_optimizer_that_was_made_before_sharding_is_refused(wrap):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with TrainerMon(CONFIG) as monitor, pytest.raises(AttachError, match=r"steps none of .* wrapped or sharded"):
        monitor.set_monitor(wrap(net), optimizer)


def check_ranks_that_nothing_is_known_of_are_refused():
    """A mesh over one of the two ranks: the other may hold anything."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "dp"))["dp"]
    model, optimizer = make(lambda net: fsdp2(net, mesh=mesh))
    with pytest.raises(AttachError, match="lives on 1 of 2 ranks, and what the others hold is not known"):
        detect([model], optimizer, BOTH)
    training = detect([model], optimizer, Coordinates(rank=0, world_size=2, pp=0, pp_size=2))
    assert all(p.owned.in_global_norm for p in training.parameters)


def check_ignored_and_frozen_parameters():
    def wrap(net):
        net.norm.weight.requires_grad_(False)
        return fully_shard(net, ignored_params={net.scale})

    model, optimizer = make(wrap)
    rank = dist.get_rank()
    training = detect([model], optimizer, Coordinates(rank=rank, world_size=2, dp=rank, dp_size=2))
    by_name = {p.name: p for p in training.parameters}
    assert "norm.weight" not in by_name
    assert by_name["scale"].shard is None
    assert by_name["scale"].placement.in_global_norm is (rank == 0)
    assert isinstance(by_name["head.weight"].tensor, DTensor)
    with TrainerMon(CONFIG) as monitor:
        monitor.set_monitor(model, optimizer)
        step(model, optimizer, 0)
        values = dict(zip(by_name, training.values(), strict=True))
    assert values["head.weight"].shape == ((2, 6) if rank == 0 else (1, 6))
    assert values["scale"] is model.scale


def check_a_gradient_that_waits_for_its_reduction_is_not_gone():
    model, optimizer = make(fsdp2)
    training = detect([model], optimizer, BOTH)
    assert training.gradients_are_gone()
    model.set_requires_gradient_sync(False)
    model(*batch(0, 0, dist.get_rank())).backward()
    assert all(p.grad is None for p in model.parameters())
    assert not training.gradients_are_gone()
    assert not training.is_reduced_now()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    check_nothing_is_left(fsdp2)
    check_nothing_is_left(fsdp1)
    check_nothing_is_attached_between_due_steps()
    check_unsharded_parameters_are_refused()
    check_an_optimizer_that_was_made_before_sharding_is_refused(fsdp2)
    check_an_optimizer_that_was_made_before_sharding_is_refused(flat_fsdp1)
    check_ranks_that_nothing_is_known_of_are_refused()
    check_ignored_and_frozen_parameters()
    check_a_gradient_that_waits_for_its_reduction_is_not_gone()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's own end is not always clean
