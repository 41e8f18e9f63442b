"""Trainings of the small GPT and of the families: plain, DDP, FSDP2 and DeepSpeed's ZeRO, all on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.diagnosis.model import BATCH, LENGTH, VOCABULARY, WIDTH, Change, Gpt, unchanged
from trainermon.hooks.names import plain_name

MICRO_STEPS = 2
RATE, EPSILON, CLIP = 0.01, 1e-6, 100.0


@dataclasses.dataclass
class Script:
    """What the training script does beside the model: places for faults.

    Attributes:
        batch: Applied to what the model is given.
        loss: Applied to the loss.
        reduced: Called with each parameter and its gradient right after DDP has reduced it.
        between: Called after the step's last backward, before gradients are clipped.
    """

    batch: Change = unchanged
    loss: Change = unchanged
    reduced: Callable[[nn.Parameter, Tensor], None] | None = None
    between: Callable[[], None] = lambda: None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained.

    Attributes:
        loss_of: Returns the loss of a fresh batch.
        after: Called with the model after each step, but for DeepSpeed's.
    """

    loss_of: Callable[[Callable[..., Any], Script], Tensor]
    rate: float = RATE
    micro_steps: int = MICRO_STEPS
    after: Callable[[Any], None] = lambda _: None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A training.

    Attributes:
        model: For `set_monitor`, as is `optimizer`.
        modules: Every module of this rank's, by its name in a diagnosis.
        step: Trains one step, calling its argument with the loss before the optimizer's step.
        weight_of: Returns the weight of a module, of which this rank alone holds what is returned.
        moments_of: Returns by name what the optimizer holds of that weight on this rank; empty if nothing.
        own: Changes a value of a module's own code as long as the context lasts.
        script: Where else a fault can be.
    """

    model: Any
    optimizer: Any
    modules: Mapping[str, nn.Module]
    step: Callable[[Callable[[float], None]], None]
    weight_of: Callable[[nn.Module], Tensor]
    moments_of: Callable[[nn.Module], Mapping[str, Tensor]]
    own: Callable[[nn.Module, Change], contextlib.AbstractContextManager[None]]
    script: Script
    micro_steps: int = MICRO_STEPS


def build(split: str, seed: int, *, recompute: bool = False) -> Job:
    """Return a fresh training of one of the splits that are not Megatron's."""
    torch.manual_seed(seed)
    job = trained(split, Gpt(recompute=recompute), Recipe(loss_of=loss_of))
    torch.manual_seed(1000 * seed + rank_of_job())
    return job


def rank_of_job() -> int:
    """Return this process's rank, 0 without a job."""
    return dist.get_rank() if dist.is_initialized() else 0


def trained(split: str, net: nn.Module, recipe: Recipe) -> Job:
    """Return the training of `net` in one of the splits that are not Megatron's."""
    if split.startswith("zero"):
        return _deepspeed(net, int(split[-1]), recipe)
    model = {"plain": _plain, "ddp": _ddp, "fsdp2": _fsdp2}[split](net)
    return _torch(model, net, recipe)


def weight_of(module: nn.Module) -> nn.Parameter:
    """Return the first parameter that is a module's own."""
    return next(module.parameters(recurse=False))


def _plain(net: nn.Module) -> nn.Module:
    return net


def _ddp(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net)


def _fsdp2(net: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    lists = {name: found for name, found in net.named_modules() if isinstance(found, nn.ModuleList)}
    for name, found in lists.items():
        if not any(name.startswith(f"{other}.") for other in lists):
            for block in found:
                fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def _torch(model: nn.Module, net: nn.Module, recipe: Recipe) -> Job:
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, eps=EPSILON)
    script, micro_steps = Script(), recipe.micro_steps

    def step(record: Callable[[float], None]) -> None:
        losses = []
        for _ in range(micro_steps):
            loss = recipe.loss_of(model, script)
            (loss / micro_steps).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        record(sum(losses) / micro_steps)
        script.between()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        recipe.after(model)

    def moments_of(module: nn.Module) -> Mapping[str, Tensor]:
        state = optimizer.state[weight_of(module)]
        return {name: local(state[name]) for name in ("exp_avg", "exp_avg_sq")}

    return Job(
        model=model,
        optimizer=optimizer,
        modules=dict(net.named_modules()),
        step=step,
        weight_of=lambda module: local(weight_of(module)),
        moments_of=moments_of,
        own=changed_own,
        script=script,
        micro_steps=micro_steps,
    )


def watch_reduction(job: Job) -> None:
    """Have `job.script.reduced` called, which takes a communication hook."""
    job.model.register_comm_hook(job.script, lambda script, bucket: _reduce(script, bucket))  # its types are looked at


def _reduce(script: Script, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce as DistributedDataParallel does by itself; `script.reduced` sees what came of it."""
    future = allreduce_hook(dist.group.WORLD, bucket)

    def seen(done: torch.futures.Future[Tensor]) -> Tensor:
        whole: Tensor = done.value()
        if script.reduced is not None:
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                script.reduced(parameter, gradient)  # type: ignore[arg-type]
        return whole

    return future.then(seen)


def loss_of(model: Callable[..., Tensor], script: Script) -> Tensor:
    """Return the loss of a fresh batch."""
    text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
    logits = model(text[:, :-1], script.batch(0.1 * torch.randn(BATCH, LENGTH, WIDTH)))
    loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    return script.loss(loss)


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor that may be a DTensor."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


@contextlib.contextmanager
def changed_own(module: Any, change: Change) -> Any:
    """Have `change` applied to a value of the module's own code."""
    module.own = change
    try:
        yield
    finally:
        module.own = unchanged


def _deepspeed(net: nn.Module, stage: int, recipe: Recipe) -> Job:
    import deepspeed
    from deepspeed.utils import safe_get_local_optimizer_state

    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": recipe.micro_steps,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000,
    }
    inner = torch.optim.AdamW(net.parameters(), lr=recipe.rate, eps=EPSILON)
    engine = deepspeed.initialize(model=net, optimizer=inner, config=config)[0]
    script, micro_steps = Script(), recipe.micro_steps

    def step(record: Callable[[float], None]) -> None:
        losses = []
        for micro_step in range(micro_steps):
            loss = recipe.loss_of(engine, script)
            engine.backward(loss)
            losses.append(loss.item())
            if micro_step == micro_steps - 1:
                record(sum(losses) / micro_steps)
            engine.step()

    def moments_of(module: Any) -> Mapping[str, Tensor]:
        names = ("exp_avg", "exp_avg_sq")
        if stage == 3:
            found = {name: safe_get_local_optimizer_state(weight_of(module), name) for name in names}
            return found if weight_of(module).ds_tensor.numel() else {}
        mapping = weight_of(module)._hp_mapping
        return {} if mapping is None else {name: mapping.get_optim_state_fragment(name) for name in names}

    return Job(
        model=engine,
        optimizer=engine.optimizer,
        modules={plain_name(name): module for name, module in engine.module.named_modules()},
        step=step,
        weight_of=lambda module: getattr(weight_of(module), "ds_tensor", weight_of(module)),
        moments_of=moments_of,
        own=changed_own,
        script=script,
        micro_steps=micro_steps,
    )
