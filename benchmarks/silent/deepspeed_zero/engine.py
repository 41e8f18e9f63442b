"""A small transformer in an engine of DeepSpeed, on CPU ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import deepspeed
import torch

from benchmarks.silent import tasks
from benchmarks.silent.deepspeed_zero.layout import Settings
from benchmarks.silent.loop import Loop
from benchmarks.silent.models import TinyTransformer
from tests.frameworks.deepspeed.engines import start as start

STEPS = 32


@dataclasses.dataclass(kw_only=True)
class EngineLoop(Loop):
    """A training in which the engine accumulates, reduces, clips and steps.

    Attributes:
        share: What each micro step's loss is multiplied by before the engine is given it.
    """

    share: float = 1.0

    def _step(self, monitor: Any, step: int) -> float:
        self.before(step)
        losses = []
        for micro in range(self.micro_steps):
            loss = self.loss_of(self.model, self.batch(step, micro))
            monitor.record(loss=loss)
            losses.append(loss.item())
            self.model.backward(self.share * loss if self.share != 1.0 else loss)
            if micro == self.micro_steps - 1:
                self.between(step)
            self.model.step()
        self.after(step)
        return sum(losses) / len(losses)


def continued(model: Any, batch: Any) -> torch.Tensor:
    """Return the loss of a language model, in float32."""
    logits = model(batch[0]).float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def training(settings: Settings, *, batch: Callable[[int, int], Any] = tasks.words) -> EngineLoop:
    """Return the training of a small language model, with AdamW."""
    model = TinyTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configured(settings))
    return EngineLoop(
        model=engine,
        optimizer=None,
        batch=batch,
        loss_of=continued,
        steps=STEPS,
        micro_steps=settings.micro_steps,
    )


def configured(settings: Settings) -> dict[str, Any]:
    """Return DeepSpeed's own configuration."""
    zero: dict[str, Any] = {
        "stage": settings.stage,
        "overlap_comm": settings.overlap,
        "reduce_bucket_size": settings.bucket,
        "stage3_param_persistence_threshold": settings.persistent,
        "sub_group_size": settings.sub_group,
    }
    if settings.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": tasks.BATCH,
        "gradient_accumulation_steps": settings.accumulated or settings.micro_steps,
        "gradient_clipping": settings.clip,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000,
    }
    if settings.dtype != "fp32":
        config[settings.dtype] = {"enabled": True}
    if settings.dtype == "fp16":
        config["fp16"] |= {"initial_scale_power": 8}
    return config
