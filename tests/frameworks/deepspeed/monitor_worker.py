"""Trains at every stage under a `TrainerMon` that collects everything, with schedulers made before and after it."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.frameworks.deepspeed.engines import Case, loss_of, make_engine, start, step_engine, tokens_of, whole_weights
from trainermon import TrainerMon

STEPS, GAS = 3, 2
VARIANTS = {
    "stage0": Case(0, "fp32", GAS),
    "stage0_bf16": Case(0, "bf16", GAS),
    "stage1": Case(1, "bf16", GAS),
    "stage2": Case(2, "bf16", GAS),
    "stage3": Case(3, "bf16", GAS),
    "stage3_fp16": Case(3, "fp16", GAS),
}
SCHEDULED_BEFORE = ("stage0", "stage1", "stage3")
EVERYTHING = {
    "wg_distribution": True,
    "monitor_mbs_grad": True,
    "mv_distribution": True,
    "mg_direction": True,
    "ur_distribution": True,
    "param_distribution": True,
    "xy_distribution": True,
    "agent": {"start": False},
}


def scheduler_of(engine):
    return torch.optim.lr_scheduler.LambdaLR(engine.basic_optimizer, lambda step: 0.5**step)


def train(variant, optimizer_too, monitor=None):
    engine = make_engine(VARIANTS[variant])
    scheduler = scheduler_of(engine) if variant in SCHEDULED_BEFORE else None
    if monitor is not None:
        monitor.set_monitor(engine, engine.optimizer if optimizer_too else None, grad_acc_steps=GAS)
    scheduler = scheduler or scheduler_of(engine)
    rates = []
    for step in range(STEPS):
        rates.append([group["lr"] for group in engine.basic_optimizer.param_groups])
        for micro_step in range(GAS):
            engine.backward(loss_of(engine, tokens_of(step, micro_step, dist.get_rank())))
            step_engine(engine)
        scheduler.step()
    if monitor is not None:
        monitor.close()
    norm = engine.get_global_grad_norm()
    return whole_weights(engine), rates, None if norm is None else float(norm)


def main():
    start()
    folder = Path(sys.argv[1])
    for number, variant in enumerate(VARIANTS):
        bare, _, _ = train(variant, optimizer_too=False)
        monitor = TrainerMon({**EVERYTHING, "run_id": variant})
        watched, rates, norm = train(variant, number % 2 == 0, monitor)
        assert all(torch.equal(bare[name], watched[name]) for name in bare), f"{variant}: the run is not the same"
        if dist.get_rank() == 0:
            numels = {name: weight.numel() for name, weight in bare.items() if "frozen" not in name}
            torch.save({"rates": rates, "norm": norm, "numels": numels}, folder / f"{variant}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
