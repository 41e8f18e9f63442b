"""Trainings of the small GPT: plain, DistributedDataParallel, FSDP2 and DeepSpeed's ZeRO, all on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.diagnosis.model import BATCH, LENGTH, VOCABULARY, WIDTH, Change, Gpt, unchanged
from trainermon.monitor.taps.names import plain_name

MICRO_STEPS = 2
RATE, EPSILON, CLIP = 0.01, 1e-6, 100.0


@dataclasses.dataclass
class Script:
    """What the training script does beside the model: places for faults."""

    batch: Change = unchanged
    loss: Change = unchanged


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
    net = Gpt(recompute=recompute)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if split.startswith("zero"):
        job = _deepspeed(net, int(split[-1]))
    else:
        wrapped = {"plain": _plain, "ddp": DistributedDataParallel, "fsdp2": _fsdp2}[split](net)
        job = _torch(wrapped, net)
    torch.manual_seed(1000 * seed + rank)
    return job


def _plain(net: Gpt) -> nn.Module:
    return net


def _fsdp2(net: Gpt) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in net.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def _torch(model: nn.Module, net: nn.Module) -> Job:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPSILON)
    script = Script()

    def step(record: Callable[[float], None]) -> None:
        losses = []
        for _ in range(MICRO_STEPS):
            loss = loss_of(model, script)
            (loss / MICRO_STEPS).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        record(sum(losses) / MICRO_STEPS)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    def moments_of(module: nn.Module) -> Mapping[str, Tensor]:
        state = optimizer.state[module.weight]
        return {name: local(state[name]) for name in ("exp_avg", "exp_avg_sq")}

    return Job(
        model=model,
        optimizer=optimizer,
        modules=dict(net.named_modules()),
        step=step,
        weight_of=lambda module: local(module.weight),
        moments_of=moments_of,
        own=changed_own,
        script=script,
    )


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


def _deepspeed(net: Gpt, stage: int) -> Job:
    import deepspeed
    from deepspeed.utils import safe_get_local_optimizer_state

    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": MICRO_STEPS,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000,
    }
    inner = torch.optim.AdamW(net.parameters(), lr=RATE, eps=EPSILON)
    engine = deepspeed.initialize(model=net, optimizer=inner, config=config)[0]
    script = Script()

    def step(record: Callable[[float], None]) -> None:
        losses = []
        for micro_step in range(MICRO_STEPS):
            loss = loss_of(engine, script)
            engine.backward(loss)
            losses.append(loss.item())
            if micro_step == MICRO_STEPS - 1:
                record(sum(losses) / MICRO_STEPS)
            engine.step()

    def moments_of(module: Any) -> Mapping[str, Tensor]:
        names = ("exp_avg", "exp_avg_sq")
        if stage == 3:
            found = {name: safe_get_local_optimizer_state(module.weight, name) for name in names}
            return found if module.weight.ds_tensor.numel() else {}
        mapping = module.weight._hp_mapping
        return {} if mapping is None else {name: mapping.get_optim_state_fragment(name) for name in names}

    return Job(
        model=engine,
        optimizer=engine.optimizer,
        modules={plain_name(name): module for name, module in engine.module.named_modules()},
        step=step,
        weight_of=lambda module: getattr(module.weight, "ds_tensor", module.weight),  # type: ignore[return-value]
        moments_of=moments_of,
        own=changed_own,
        script=script,
    )
