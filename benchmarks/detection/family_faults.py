"""What breaks in a run of any family: one function per fault, called on every step from the first bad one on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks.detection.family_cases import BAD_RANK
from benchmarks.families.family import Batch

if TYPE_CHECKING:
    from benchmarks.detection.family_training import FamilyJob

SPIKE_STEPS = 8
Change = Callable[[Tensor], Tensor]


class Site:
    """A module in the middle of the model, whose output or its gradient a fault may change."""

    change: Change | None = None
    change_gradient: Change | None = None

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        module.register_forward_hook(self._pass)

    def _pass(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        if self.change is None and self.change_gradient is None:
            return None
        if isinstance(output, tuple):
            return (self._changed(output[0]), *output[1:])
        return self._changed(output)

    def _changed(self, x: Tensor) -> Tensor:
        x = self.change(x) if self.change else x
        if self.change_gradient and x.requires_grad:
            x = x * 1.0
            x.register_hook(self.change_gradient)
        return x


def sites_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that hold a matrix themselves, but for embeddings: their rows are trained now and then."""
    return [
        module
        for module in model.modules()
        if not isinstance(module, nn.Embedding) and any(p.dim() > 1 for p in module.parameters(recurse=False))
    ]


def apply(job: FamilyJob, name: str, age: int) -> None:
    """Do what a fault does `age` steps after its beginning."""
    ACTIONS[name](job, age)


def spoilt(batch: Batch, generator: torch.Generator, *, share: float = 1.0) -> Batch:
    """Return the batch with a share of its labels drawn anew, of numbers with as much noise."""
    name = next(name for name in ("targets", "labels", "clean", "images") if name in batch)
    labels = batch[name]
    if labels.is_floating_point():
        noise = 3.0 * labels.std() * torch.randn(labels.shape, generator=generator)
        return batch | {name: torch.where(torch.rand(labels.shape, generator=generator) < share, noise, labels)}
    drawn = torch.randint(int(labels.max()) + 1, labels.shape, generator=generator)
    is_spoilt = (torch.rand(labels.shape, generator=generator) < share) & (labels >= 0)
    return batch | {name: torch.where(is_spoilt, drawn, labels)}


def _weight(job: FamilyJob) -> Tensor:
    return next(p for p in job.site.module.parameters(recurse=False) if p.dim() > 1).detach()


@torch.no_grad()
def _weight_nan(job: FamilyJob, age: int) -> None:
    if age == 0:
        _weight(job).view(-1)[3] = torch.nan


def _with_one(value: float) -> Change:
    def change(x: Tensor) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        x.view(-1)[7] = value
        return x

    return change


def _gradient_inf(job: FamilyJob, age: int) -> None:
    job.site.change_gradient = _with_one(torch.inf) if age == 0 else None


def _activation_nan(job: FamilyJob, age: int) -> None:
    job.site.change = _with_one(torch.nan) if age == 0 else None


def _rate(factor: float) -> Callable[[FamilyJob, int], None]:
    def fault(job: FamilyJob, _age: int) -> None:
        job.rate_factor = factor

    return fault


def _gradients(job: FamilyJob, _age: int) -> None:
    job.loss_factor = 50.0


def _gradient_once(job: FamilyJob, age: int) -> None:
    job.loss_factor = 100.0 if age == 0 else 1.0


def _labels(num_steps: float, share: float = 1.0) -> Callable[[FamilyJob, int], None]:
    def fault(job: FamilyJob, age: int) -> None:
        job.spoilt_share = share if age < num_steps else 0.0

    return fault


@torch.no_grad()
def _second_moment_lost(job: FamilyJob, age: int) -> None:
    if age == 0:
        for state in job.optimizer.state.values():
            state["exp_avg_sq"] *= 1e-4


def _weight_decay(job: FamilyJob, _age: int) -> None:
    job.optimizer.param_groups[0]["weight_decay"] = 30.0  # 0.01 by default


def _growing(job: FamilyJob, age: int) -> None:
    factor = 1.06**age
    job.site.change = lambda x: x * factor


def _massive(job: FamilyJob, _age: int) -> None:
    def change(x: Tensor) -> Tensor:
        scale = torch.ones_like(x)
        scale[..., 3] = 300.0
        return x * scale

    job.site.change = change


def _vanishing(job: FamilyJob, age: int) -> None:
    factor = 0.7**age
    job.site.change_gradient = lambda gradient: gradient * factor


def _frozen_layer(job: FamilyJob, _age: int) -> None:
    job.site.change_gradient = lambda gradient: gradient * 0.0


def _dead_module(job: FamilyJob, _age: int) -> None:
    job.site.change = lambda x: x * 0.0


def _same_batch(job: FamilyJob, _age: int) -> None:
    job.is_repeating = True


def _eval_mode(job: FamilyJob, age: int) -> None:
    if age == 0:
        job.model.eval()


@torch.no_grad()
def _bit_flip(job: FamilyJob, age: int) -> None:
    if age == 0 and job.rank == BAD_RANK:
        _weight(job).view(torch.int32).view(-1)[5] ^= 1 << (job.case.number % 20)


def _all_reduce_skipped(job: FamilyJob, _age: int) -> None:
    job.unreduced = True


def _rank_learning_rate(job: FamilyJob, _age: int) -> None:
    job.rate_factor = 1.01 if job.rank == BAD_RANK else 1.0


def _rank_nan(job: FamilyJob, age: int) -> None:
    job.site.change_gradient = _with_one(torch.nan) if age == 0 and job.rank == BAD_RANK else None


def _rank_bad_labels(job: FamilyJob, _age: int) -> None:
    job.spoilt_share = 1.0 if job.rank == BAD_RANK else 0.0


ACTIONS: Mapping[str, Callable[[FamilyJob, int], None]] = MappingProxyType(
    {
        "weight-nan": _weight_nan,
        "gradient-inf": _gradient_inf,
        "activation-nan": _activation_nan,
        "learning-rate-x100": _rate(100.0),
        "learning-rate-zero": _rate(0.0),
        "gradients-x50": _gradients,
        "gradient-once-x100": _gradient_once,
        "bad-batches": _labels(SPIKE_STEPS),
        "bad-batch-once": _labels(1),
        "noisy-labels": _labels(torch.inf, share=0.4),
        "second-moment-lost": _second_moment_lost,
        "weight-decay-x3000": _weight_decay,
        "growing-activations": _growing,
        "massive-activations": _massive,
        "vanishing-gradients": _vanishing,
        "frozen-layer": _frozen_layer,
        "dead-module": _dead_module,
        "same-batch": _same_batch,
        "eval-mode": _eval_mode,
        "bit-flip": _bit_flip,
        "all-reduce-skipped": _all_reduce_skipped,
        "rank-learning-rate": _rank_learning_rate,
        "rank-nan": _rank_nan,
        "rank-bad-labels": _rank_bad_labels,
    }
)
