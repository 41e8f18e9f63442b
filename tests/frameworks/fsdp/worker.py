"""One rank of small FSDP1 and FSDP2 trainings; see `torch_job`."""

import contextlib
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.frameworks.torch_job import MAX_NORM, Block, Variant, main
from trainermon.hooks.names import plain_name

BF16 = torch.bfloat16


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


# ---------------------------------------------------------------------- FSDP2


def full(tensor):
    with torch.no_grad():
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole2(model, optimizer, what):
    held = {plain_name(name): p for name, p in model.named_parameters()}
    if what == "value":
        return {name: full(p) for name, p in held.items()}
    if what == "gradient":
        return {name: full(p.grad) for name, p in held.items()}
    return {name: full(optimizer.state[p][what]) for name, p in held.items()}


@contextlib.contextmanager
def sync2(model, is_last):
    model.set_requires_gradient_sync(is_last)
    yield


def fsdp2(*, mesh=None, policy=None, no_sync=True, compiled=False, shards=None, **options):
    def wrap(net):
        common: dict[str, Any] = {"mesh": mesh() if mesh else init_device_mesh("cpu", (dist.get_world_size(),))}
        common |= {"mp_policy": MixedPrecisionPolicy(**(policy or {}))} | (shards or {})
        for block in net.blocks:
            if compiled:
                block.compile(backend="aot_eager")
            fully_shard(block, **common)
        fully_shard(net, **common)
        return net, adamw(net)

    if no_sync:
        options["sync"] = sync2
    return Variant(wrap=wrap, whole=whole2, **options)


def hybrid_mesh(shards):
    """Return a mesh of replicas, each of so many shards, or of all ranks where there are fewer."""
    shards = min(shards, dist.get_world_size())
    return init_device_mesh("cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("replicate", "shard"))


def hsdp():
    """Two ranks are two replicas, four are two replicas of two shards."""
    return fsdp2(mesh=lambda: hybrid_mesh(max(dist.get_world_size() // 2, 1)))


def columns(parameter):
    """Shard the second dimension where it divides."""
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % dist.get_world_size() == 0 else Shard(0)


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
EVEN = {"hidden": (8, 4)}


def tensor_parallel():
    """Pairs of ranks share the blocks' matrices, the other axis is FSDP's."""
    size = dist.get_world_size()
    tp = min(size, 2)
    mesh = init_device_mesh("cpu", (size // tp, tp), mesh_dim_names=("dp", "tp"))

    def wrap(net):
        for block in net.blocks:
            parallelize_module(block, mesh["tp"], PLAN)
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(net, mesh=mesh["dp"])
        return net, adamw(net)

    groups = {"tp_group": mesh["tp"].get_group(), "dp_group": mesh["dp"].get_group()}
    place: dict[str, Any] = {"data_rank": mesh["dp"].get_local_rank(), "data_size": mesh["dp"].size()}
    return Variant(wrap=wrap, whole=whole2, sync=sync2, clip=clip_by_hand, groups=groups, model=EVEN, **place)


def tensor_parallel_only():
    """DTensors without FSDP beside plain parameters, and no data parallelism."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))

    def wrap(net):
        for block in net.blocks:
            parallelize_module(block, mesh, PLAN)
        return net, adamw(net)

    groups = {"tp_group": mesh.get_group()}
    place: dict[str, Any] = {"data_rank": 0, "data_size": 1}
    return Variant(wrap=wrap, whole=whole2, clip=clip_by_hand, groups=groups, model=EVEN, **place)


def clip_by_hand(model):
    """Clip parameters on several meshes, which torch's own function does not."""
    norm = torch.stack([full(p.grad).norm() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.grad.mul_(min(1.0, MAX_NORM / float(norm)))
    return norm


# ---------------------------------------------------------------------- FSDP1


def whole1(model, optimizer, what):
    if what == "value":
        with FullyShardedDataParallel.summon_full_params(model):
            return {plain_name(name): p.detach().clone() for name, p in model.named_parameters()}
    if what != "gradient" and not model._use_orig_params:
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
        return {plain_name(name): tensors[what].clone() for name, tensors in state.items()}
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            parts = whole_gradients(module) if what == "gradient" else whole_states(module, optimizer, what)
            found |= {plain_name(f"{path}.{fqn}".lstrip(".")): part for fqn, part in parts}
    return found


def whole_states(module, optimizer, what):
    """Put the pieces of each parameter together in the order of the ranks; on a CPU torch's own function errs here.

    (`optim_state_dict` hands out every state of a parameter in one buffer there, so that they all look like the last.)
    """
    flat, group, whole = module._handle.flat_param, module.process_group, []
    for name, parameter, shape in zip(flat._fqns, flat._params, flat._shapes, strict=True):
        pieces = [optimizer.state[parameter][what].flatten() if parameter.numel() else torch.empty(0)]
        if module._handle.uses_sharded_strategy:
            mine, pieces = pieces[0], [None] * group.size()
            dist.all_gather_object(pieces, mine, group=group)
        whole.append((name, torch.cat(pieces).view(shape)))
    return whole


def whole_gradients(module):
    """Gather a flat gradient and cut it up by the sizes of the original parameters, in their order."""
    flat = module._handle.flat_param
    pieces = [flat.grad]
    if module._handle.uses_sharded_strategy:
        pieces = [torch.empty_like(flat.grad) for _ in range(module.process_group.size())]
        dist.all_gather(pieces, flat.grad, group=module.process_group)
    whole, parts = torch.cat(pieces)[: sum(flat._numels_with_padding)], []
    for part, is_padding in zip(whole.split(flat._numels_with_padding), flat._is_padding_mask, strict=True):
        if not is_padding:
            parts.append(part.clone())
    return [(n, part.view(shape)) for n, part, shape in zip(flat._fqns, parts, flat._shapes, strict=True)]


def fsdp1(strategy, *, original, policy=None, no_sync=True, **options):
    def wrap(net):
        mesh = hybrid_mesh(2) if "HYBRID" in strategy else None
        model = FullyShardedDataParallel(
            net,
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=original,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=MixedPrecision(**policy) if policy else None,
            device_mesh=mesh,
            device_id=torch.device("cpu"),
        )
        return model, adamw(model)

    def sync(model, is_last):
        return contextlib.nullcontext() if is_last or not no_sync else model.no_sync()

    return Variant(wrap=wrap, whole=whole1, sync=sync, clip=lambda model: model.clip_grad_norm_(MAX_NORM), **options)


MIXED = {"param_dtype": BF16, "reduce_dtype": torch.float32}
VARIANTS = {
    "fsdp2": fsdp2,
    "fsdp2-every": functools.partial(fsdp2, no_sync=False),
    "fsdp2-bf16": functools.partial(fsdp2, policy=MIXED, micro_steps=3),
    "fsdp2-bf16-reduce": functools.partial(
        fsdp2, policy={"param_dtype": BF16}, shards={"reshard_after_forward": False}
    ),
    "fsdp2-hsdp": hsdp,
    "fsdp2-columns": functools.partial(fsdp2, shards={"shard_placement_fn": columns}),
    "fsdp2-offload": functools.partial(fsdp2, shards={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "fsdp2-compiled": functools.partial(fsdp2, compiled=True, config={"xy_distribution": False}),
    "fsdp2-reentrant": functools.partial(fsdp2, model={"reentrant": True}),
    "fsdp2-checkpoint": functools.partial(fsdp2, model={"reentrant": False}, policy=MIXED),
    "fsdp2-tp": tensor_parallel,
    "tp-only": tensor_parallel_only,
    "fsdp1-full": functools.partial(fsdp1, "FULL_SHARD", original=True),
    "fsdp1-full-flat": functools.partial(fsdp1, "FULL_SHARD", original=False),
    "fsdp1-every": functools.partial(fsdp1, "FULL_SHARD", original=True, no_sync=False),
    "fsdp1-bf16": functools.partial(fsdp1, "FULL_SHARD", original=True, policy=MIXED),
    "fsdp1-grad-op": functools.partial(fsdp1, "SHARD_GRAD_OP", original=True),
    "fsdp1-grad-op-flat-bf16": functools.partial(fsdp1, "SHARD_GRAD_OP", original=False, policy=MIXED),
    "fsdp1-hybrid": functools.partial(fsdp1, "HYBRID_SHARD", original=True),
    "fsdp1-hybrid-flat": functools.partial(fsdp1, "HYBRID_SHARD", original=False),
    "fsdp1-none": functools.partial(fsdp1, "NO_SHARD", original=True),
    "fsdp1-none-flat-bf16": functools.partial(fsdp1, "NO_SHARD", original=False, policy=MIXED),
    "fsdp1-checkpoint": functools.partial(fsdp1, "FULL_SHARD", original=True, model={"reentrant": False}),
}

if __name__ == "__main__":
    main(VARIANTS)
