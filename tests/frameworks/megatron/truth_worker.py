"""Holds what the monitor reads of Megatron-Core against the truth, in every layout of one world size: one launch."""

import importlib.util
import itertools
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from tests.frameworks.megatron.gpt import KNOWS_STAGES, Layout, version
from tests.frameworks.megatron.truth import check_layout

BF16, FP16 = torch.bfloat16, torch.float16
GRID = {
    1: [
        Layout(),
        Layout(dtype=BF16),
        Layout(dtype=FP16, loss_scale=64.0),
        Layout(distributed_optimizer=True),
        Layout(experts=4, tied=False),
        Layout(per_token_loss=True),
        Layout(fused=True),
    ],
    2: [
        Layout(average_in_collective=True, tied=False),
        Layout(distributed_optimizer=True, overlap=True, overlap_gather=True, bucket=2000),
        Layout(distributed_optimizer=True, per_token_loss=True),
        Layout(distributed_optimizer=True, overlap=True, dtype=BF16, fused=True),
        Layout(distributed_optimizer=True, dtype=BF16, offload=True),
        Layout(layer_wise=True, dtype=BF16),
        Layout(tp=2, sp=True, distributed_optimizer=True),
        Layout(tp=2, gated=True, distributed_optimizer=True),
        Layout(pp=2, tied=False, distributed_optimizer=True),
        Layout(pp=2, vpp=2, layers=4, overlap=True),
        Layout(cp=2, distributed_optimizer=True),
        Layout(ep=2, experts=4),
        Layout(layer_wise=True, ep=2, experts=4),
        Layout(tp=2, sp=True, ep=2, etp=1, experts=4),
    ],
    4: [
        Layout(distributed_optimizer=True, instances=2, overlap=False),
        Layout(tp=2, pp=2, sp=True, dtype=BF16),
        Layout(tp=2, sp=True, ep=2, experts=4, dispatcher="allgather"),  # gloo gathers equal sizes only
    ],
}
# Each option of these is in a layout above, together with others.
REST = {
    2: [
        Layout(),
        Layout(tp=2, dtype=BF16),
        Layout(overlap=True, bucket=2000),
        Layout(distributed_optimizer=True),
        Layout(distributed_optimizer=True, dtype=BF16, overlap=True, bucket=1000),
        Layout(distributed_optimizer=True, instances=2),
        Layout(dtype=BF16),
        Layout(tp=2),
        Layout(pp=2),
        Layout(cp=2),
        Layout(ep=2, experts=4, distributed_optimizer=True),
        Layout(layer_wise=True),
    ],
    4: [
        Layout(tp=2, sp=True, distributed_optimizer=True, overlap=True, bucket=1000),
        Layout(pp=2, vpp=2, layers=4, distributed_optimizer=True, overlap=True, overlap_gather=True, bucket=2000),
        Layout(ep=2, experts=4, distributed_optimizer=True),
        Layout(cp=2, tp=2, distributed_optimizer=True),
    ],
}


Options = dict[str, Any]
SPREAD: dict[int, list[Options]] = {
    2: [{}, {"tp": 2}, {"tp": 2, "sp": True}, {"pp": 2}, {"pp": 2, "vpp": 2, "layers": 4}, {"cp": 2}]
}
SPREAD[4] = [*SPREAD[2], {"tp": 2, "pp": 2}, {"tp": 4}, {"pp": 4, "layers": 4}, {"cp": 2, "pp": 2}]
DISTRIBUTED: Options = {"distributed_optimizer": True}
OVERLAP: Options = {"overlap": True, "bucket": 1000}
OPTIMIZERS = [
    {},
    OVERLAP,
    DISTRIBUTED,
    DISTRIBUTED | OVERLAP,
    DISTRIBUTED | OVERLAP | {"overlap_gather": True},
]
MODELS: list[Options] = [{}, {"tied": False}, {"per_token_loss": True}]


def wide_grid(world_size):
    """Yield every spread with every optimizer and dtype, where the models take turns, and what is left of `GRID`."""
    yield from REST[world_size]
    combinations = itertools.product(SPREAD[world_size], OPTIMIZERS, [torch.float32, BF16])
    for (spread, optimizer, dtype), model in zip(combinations, itertools.cycle(MODELS)):
        yield Layout(dtype=dtype, **spread, **optimizer, **model)


def is_known(layout):
    """Return whether the version at hand can train the layout and returns its norm.

    Only 0.16 has the layer-wise optimizer. 0.12 cannot pad the bucket in front of a tied embedding, and counts every
    instance of the distributed optimizer in its norm.
    """
    if layout.layer_wise:
        return importlib.util.find_spec("megatron.core.optimizer.layer_wise_optimizer") is not None
    pads_before_tied = layout.distributed_optimizer and layout.bucket and layout.tied and layout.pp > 1
    return KNOWS_STAGES or (layout.instances == 1 and not pads_before_tied)


def main():
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    layouts = list(wide_grid(world_size)) if "wide" in sys.argv else GRID[world_size]
    if dist.get_rank() == 0:
        print("megatron-core", version, flush=True)
    for layout in filter(is_known, layouts):
        errors = check_layout(layout)
        if dist.get_rank() == 0:
            print(layout.name, {kind: f"{error:.1e}" for kind, error in errors.items()}, flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
