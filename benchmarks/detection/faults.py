"""What breaks: one function per fault, called on every step from the first bad one on with the steps since then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.detection.model import Change, Wire

if TYPE_CHECKING:
    from benchmarks.detection.training import Job

SPIKE_STEPS = 8
BAD_RANK = 2


def apply(job: Job, age: int) -> None:
    """Do what the fault of the run does `age` steps after its beginning."""
    FAULTS[job.case.name](job, age)


def _wire(job: Job, layer: int = 0) -> Wire:
    wire = job.module.h[layer].wire
    assert isinstance(wire, Wire)
    return wire


@torch.no_grad()
def _weight_nan(job: Job, age: int) -> None:
    if age == 0:
        job.module.h[1].mlp.fc.weight[0, 0] = torch.nan


def _with_one(value: float) -> Change:
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x.view(-1)[7] = value
        return x

    return change


def _gradient_inf(job: Job, age: int) -> None:
    _wire(job).change_gradient = _with_one(torch.inf) if age == 0 else None


def _activation_nan(job: Job, age: int) -> None:
    _wire(job).change = _with_one(torch.nan) if age == 0 else None


def _float16_overflow(job: Job, age: int) -> None:
    """A residual stream in half precision that grows until it overflows."""
    factor = 10.0 * 1.7**age
    _wire(job).change = lambda x: (x * factor).half()


def _learning_rate(job: Job, _age: int) -> None:
    job.rate_factor = 100.0


def _gradient_spike(job: Job, age: int) -> None:
    _wire(job).change_gradient = (lambda gradient: gradient * 100.0) if age < SPIKE_STEPS else None


def _gradient_spike_once(job: Job, age: int) -> None:
    job.gradient_factor = 100.0 if age == 0 else 1.0


def _bad_batches(job: Job, age: int) -> None:
    job.noisy = age < SPIKE_STEPS


def _bad_batch_once(job: Job, age: int) -> None:
    job.noisy = age == 0


@torch.no_grad()
def _second_moment_lost(job: Job, age: int) -> None:
    if age == 0:
        for state in job.optimizer.state.values():
            state["exp_avg_sq"] *= 1e-4


def _vanishing(job: Job, age: int) -> None:
    factor = 0.7**age
    _wire(job).change_gradient = lambda gradient: gradient * factor


def _massive_activations(job: Job, _age: int) -> None:
    def change(x: Tensor) -> Tensor:
        scale = torch.ones_like(x)
        scale[..., 3] = 300.0
        return x * scale

    _wire(job).change = change


@torch.no_grad()
def _dead_relu(job: Job, age: int) -> None:
    if age == 0:
        job.module.h[1].mlp.fc.bias.fill_(-100.0)


def _frozen_layer(job: Job, _age: int) -> None:
    _wire(job).change_gradient = lambda gradient: gradient * 0.0


@torch.no_grad()
def _expert_collapse(job: Job, age: int) -> None:
    if age == 0:
        job.module.h[0].mlp.router.choice.bias[1] = 50.0


def _loss_scale_collapse(job: Job, age: int) -> None:
    factor = 1.0 if age % 4 == 3 else torch.inf
    _wire(job).change_gradient = lambda gradient: (gradient * factor).half().float()


def _padding_only(job: Job, _age: int) -> None:
    job.repeat_batch(padding=True)


def _nothing_learned(job: Job, _age: int) -> None:
    job.repeat_batch()
    job.rate_factor = 0.0


def _throughput_drop(job: Job, _age: int) -> None:
    job.slow = {0: 1.5}


@torch.no_grad()
def _bit_flip(job: Job, age: int) -> None:
    if age == 0 and job.rank == BAD_RANK:
        words = job.module.h[1].mlp.out.weight.view(torch.int32)
        words[3, 5] ^= 1 << (job.case.number % 20)


def _all_reduce_skipped(job: Job, _age: int) -> None:
    job.unreduced = True


def _rank_learning_rate(job: Job, _age: int) -> None:
    job.rate_factor = 1.01 if job.rank == BAD_RANK else 1.0


def _rank_nan(job: Job, age: int) -> None:
    _wire(job).change_gradient = _with_one(torch.nan) if age == 0 and job.rank == BAD_RANK else None


def _rank_bad_data(job: Job, _age: int) -> None:
    job.noisy = job.rank == BAD_RANK


def _straggler(job: Job, _age: int) -> None:
    job.slow = {BAD_RANK: 1.4}


FAULTS: Mapping[str, Callable[[Job, int], None]] = MappingProxyType(
    {
        "weight-nan": _weight_nan,
        "gradient-inf": _gradient_inf,
        "activation-nan": _activation_nan,
        "float16-overflow": _float16_overflow,
        "learning-rate-x100": _learning_rate,
        "gradient-spike": _gradient_spike,
        "gradient-spike-once": _gradient_spike_once,
        "bad-batches": _bad_batches,
        "bad-batch-once": _bad_batch_once,
        "second-moment-lost": _second_moment_lost,
        "vanishing-gradients": _vanishing,
        "massive-activations": _massive_activations,
        "dead-relu": _dead_relu,
        "frozen-layer": _frozen_layer,
        "expert-collapse": _expert_collapse,
        "loss-scale-collapse": _loss_scale_collapse,
        "padding-only": _padding_only,
        "nothing-learned": _nothing_learned,
        "throughput-drop": _throughput_drop,
        "bit-flip": _bit_flip,
        "all-reduce-skipped": _all_reduce_skipped,
        "rank-learning-rate": _rank_learning_rate,
        "rank-nan": _rank_nan,
        "rank-bad-data": _rank_bad_data,
        "straggler": _straggler,
    }
)
