"""How a Megatron training is laid out, and how a mended fault of a framework is put back; imports neither."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from benchmarks.silent.loop import Loop

HEAVY = "benchmarks.silent.megatron_core.gpt"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the model is spread over ranks, and what else can be chosen.

    Attributes:
        tp: Tensor parallel ranks.
        pp: Pipeline stages.
        vpp: Chunks of a stage.
        cp: Context parallel ranks.
        ep: Expert parallel ranks.
        sp: Sequence parallelism beside tensor parallelism.
        experts: Experts of a layer; 0: none.
        balance: Weight of the loss that balances them.
        layers: All layers.
        stages: Layers of each stage, where they are not alike.
        tied: Embedding and output layer share their weight.
        sharded: Whether the optimizer is the distributed one.
        overlap: Gradients are reduced during the backward pass.
        gather_early: Parameters are gathered during the forward pass.
        bucket: Elements of a bucket; None: all.
        bf16: bfloat16 with main copies, else float32.
        clip: The norm to which gradients are clipped.
        dropout: In hidden states.
        per_token: Whether each token counts alike, however they are spread.
        recompute: Layers that are computed again as one piece; 0: none.
        rope: Rotary embeddings instead of learnt positions.
        qk_norm: Norms of queries and keys.
        sinks: A learnable part of the denominator of each head's softmax.
        micro_batches: Of each step.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    sp: bool = False
    experts: int = 0
    balance: float = 0.0
    layers: int = 2
    stages: tuple[int, ...] = ()
    tied: bool = True
    sharded: bool = False
    overlap: bool = False
    gather_early: bool = False
    bucket: int | None = None
    bf16: bool = False
    clip: float = 1.0
    dropout: float = 0.0
    per_token: bool = False
    recompute: int = 0
    rope: bool = False
    qk_norm: bool = False
    sinks: bool = False
    micro_batches: int = 2

    @property
    def chunks(self) -> int:
        """How many parts the model's layers have."""
        return self.pp * self.vpp


def training(layout: Layout, **options: Any) -> Loop:
    """Return the training of a small GPT in Megatron-Core, spread over all ranks."""
    loop: Loop = program().training(layout, **options)
    return loop


def program() -> Any:
    """Return the module of that program; the CPU has taken a GPU's place."""
    return importlib.import_module(HEAVY)


def core(name: str) -> Any:
    """Return a module of Megatron-Core; the process group exists and the CPU has taken a GPU's place."""
    program()
    return importlib.import_module(f"megatron.core.{name}")


def substitute(name: str) -> Any:
    """Return a class that stands for one of Transformer Engine."""
    program()
    return getattr(importlib.import_module("tests.frameworks.megatron.substitutes"), name)


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put what `make` returns of an attribute in its place, for the rest of this process."""
    setattr(owner, name, make(getattr(owner, name)))
