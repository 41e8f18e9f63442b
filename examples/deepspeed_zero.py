"""Train the small GPT of ddp_gpt.py by DeepSpeed, ZeRO stage 0 to 3, on CPU ranks, and watch it.

    torchrun --nproc-per-node 2 examples/deepspeed_zero.py --stage 3
    torchrun --nproc-per-node 2 examples/deepspeed_zero.py --stage 2 --offload --dtype fp32

The three lines that attach the monitor are marked. The engine steps for the script, so it is the engine that is passed;
its optimizer need not be.
"""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before DeepSpeed is imported

import deepspeed
import torch
import torch.distributed as dist
from ddp_gpt import GPT, batches, read_text

from trainermon import TrainerMon  # line 1

MICRO_STEPS = 2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=2, choices=range(4))
    parser.add_argument("--dtype", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument(
        "--offload", action="store_true", help="keep the optimizer on the CPU, as one would beside a GPU"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--config", default=str(Path(__file__).with_name("monitor_config.json")))
    return parser.parse_args()


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return DeepSpeed's own configuration."""
    zero: dict[str, Any] = {"stage": arguments.stage}
    if arguments.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "gradient_accumulation_steps": MICRO_STEPS,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": arguments.dtype == "bf16"},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": arguments.log_every,
    }


def main() -> None:
    arguments = parse_arguments()
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # an op that would have to be compiled
    deepspeed.init_distributed("gloo", verbose=False)
    rank = dist.get_rank()
    torch.manual_seed(0)
    gpt = GPT(layers=arguments.layers, width=arguments.width, heads=4, context=arguments.context)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3, weight_decay=0.1)
    engine, *_ = deepspeed.initialize(model=gpt, optimizer=optimizer, config=settings(arguments))

    monitor = TrainerMon(arguments.config)  # line 2
    monitor.set_monitor(engine, grad_acc_steps=MICRO_STEPS)  # line 3

    data = batches(read_text(), batch=arguments.batch, context=arguments.context, rank=rank)
    for step in range(arguments.steps):
        for _ in range(MICRO_STEPS):
            loss = engine(*next(data))
            engine.backward(loss)
            engine.step()  # steps at the last micro step only
        if rank == 0 and (step + 1) % arguments.log_every == 0:
            print(f"step {step + 1:3}/{arguments.steps}   loss {loss.item():7.4f}", flush=True)
    monitor.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
