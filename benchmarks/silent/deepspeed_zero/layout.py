"""What a training in DeepSpeed is given; imports none of it."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from benchmarks.silent.loop import Loop

HEAVY = "benchmarks.silent.deepspeed_zero.engine"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What can be chosen of an engine.

    Attributes:
        stage: Of ZeRO.
        dtype: `fp32`, `bf16` or `fp16`.
        micro_steps: Batches that the script gives the engine in each step.
        accumulated: How many of them the engine is told to accumulate; 0: all.
        clip: The norm to which gradients are clipped.
        overlap: Gradients are reduced during the backward pass.
        bucket: Elements that are reduced at once.
        persistent: Parameters up to this size are not gathered anew for each use, at stage 3.
        sub_group: Elements that are updated at once, at stage 3.
        offload: The optimizer is kept on the CPU, as one would beside a GPU.
    """

    stage: int
    dtype: str = "fp32"
    micro_steps: int = 2
    accumulated: int = 0
    clip: float = 1.0
    overlap: bool = False
    bucket: int = 100_000
    persistent: int = 20
    sub_group: int = 1_000_000
    offload: bool = False


def training(settings: Settings, **options: Any) -> Loop:
    """Return the training of a small language model by an engine of DeepSpeed."""
    loop: Loop = importlib.import_module(HEAVY).training(settings, **options)
    return loop


def runtime(name: str) -> Any:
    """Return a module of DeepSpeed's runtime."""
    importlib.import_module(HEAVY)
    return importlib.import_module(f"deepspeed.runtime.{name}")
