"""Train the small GPT of ddp_gpt.py sharded over all ranks (FSDP2), in mixed precision, and watch it.

    torchrun --nproc-per-node 2 examples/fsdp2.py
    torchrun --nproc-per-node 4 examples/fsdp2.py --replicas 2         # two replicas, each sharded over two ranks

The three lines that attach the monitor are marked. Gradients are accumulated without being reduced in between, so there
is a gradient of each rank alone; where every micro step is reduced there is none, and the monitor says so.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from ddp_gpt import GPT, batches, read_text
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from trainermon import TrainerMon  # line 1

MICRO_STEPS = 2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--config", default=str(Path(__file__).with_name("monitor_config.json")))
    return parser.parse_args()


def shard(gpt: GPT, mesh: DeviceMesh) -> nn.Module:
    """Shard each block for itself, and what is left as one more group."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in gpt.h:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(gpt, mesh=mesh, mp_policy=policy)


def main() -> None:
    arguments = parse_arguments()
    if "RANK" not in os.environ:  # a single process, without torchrun
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shape = (arguments.replicas, world_size // arguments.replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    torch.manual_seed(0)
    gpt = GPT(layers=arguments.layers, width=arguments.width, heads=4, context=arguments.context)
    model = shard(gpt, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

    monitor = TrainerMon(arguments.config)  # line 2
    monitor.set_monitor(model, optimizer, grad_acc_steps=MICRO_STEPS)  # line 3

    data = batches(read_text(), batch=arguments.batch, context=arguments.context, rank=rank)
    for step in range(arguments.steps):
        for micro_step in range(MICRO_STEPS):
            model.set_requires_gradient_sync(micro_step == MICRO_STEPS - 1)
            loss = model(*next(data))
            monitor.record(loss=loss)
            (loss / MICRO_STEPS).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % arguments.log_every == 0:
            print(f"step {step + 1:3}/{arguments.steps}   loss {loss.item():7.4f}", flush=True)
    monitor.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
