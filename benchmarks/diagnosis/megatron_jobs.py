"""Trainings of Megatron-Core's GPT on the CPU, in several layouts."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from benchmarks.diagnosis.jobs import Job, Script
from benchmarks.diagnosis.model import Change
from tests.frameworks.megatron import gpt
from tests.frameworks.megatron.gpt import Layout
from trainermon.monitor.frameworks.megatron import naming

LAYOUTS: Mapping[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2": {"distributed_optimizer": True},
    "tp2dp2": {"tp": 2},
}


RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def build(split: str, seed: int, *, experts: bool, recompute: bool = False) -> Job:
    """Return a fresh training; its weights do not depend on the seed."""
    options = LAYOUTS[split] | {"tied": False, "dropout": 0.1}
    if experts:
        options |= {"experts": 4, "sp": "tp" in options}
    layout = Layout(**options)
    gpt.initialise(layout)
    with _configured(RECOMPUTE if recompute else {}):
        chunks, optimizer = gpt.build(layout)
    (chunk,) = chunks
    renaming = naming.renaming_of(chunk.module, gpt.parallel_state.get_expert_model_parallel_rank())
    script = Script()
    number = itertools.count(100 * seed)

    def step(record: Callable[[float], None]) -> None:
        losses = _forward_backward(layout, chunks, next(number), script)
        if losses:  # this is the last stage of the pipeline
            record(sum(losses) / len(losses))
        optimizer.step()

    def moments_of(module: nn.Module) -> Mapping[str, Tensor]:
        return _moments_of(optimizer, module.weight)

    return Job(
        model=chunks,
        optimizer=optimizer,
        modules={naming.global_name(path, renaming): module for path, module in chunk.module.named_modules()},
        step=step,
        weight_of=lambda module: module.weight,  # type: ignore[return-value]
        moments_of=moments_of,
        own=_changed_addition,
        script=script,
        micro_steps=gpt.MICRO_BATCHES,
    )


@contextlib.contextmanager
def _configured(changes: Mapping[str, Any]) -> Iterator[None]:
    """Have models built with changes in their configuration."""
    make = gpt.transformer_config
    gpt.transformer_config = lambda layout: dataclasses.replace(make(layout), **changes)
    try:
        yield
    finally:
        gpt.transformer_config = make


def _forward_backward(layout: Layout, chunks: list[Any], number: int, script: Script) -> list[float]:
    """Run all micro batches of a step, and return their losses on this rank."""
    losses: list[float] = []

    def loss_of(found: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = script.loss(found.mean())
        losses.append(loss.item())
        return loss, {}

    def forward_step(batches: Iterator[tuple[Tensor, ...]], model: Any) -> Any:
        tokens, positions, labels, _ = next(batches)
        return model(tokens, positions, gpt.CAUSAL, labels=labels), loss_of

    for chunk in chunks:
        chunk.zero_grad_buffer()
    gpt.get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=gpt.micro_batches(layout, number),
        model=chunks[0],
        num_microbatches=gpt.MICRO_BATCHES,
        seq_length=gpt.SEQUENCE,
        micro_batch_size=gpt.BATCH,
        forward_only=False,
    )
    return losses


def _moments_of(optimizer: Any, weight: Any) -> Mapping[str, Tensor]:
    """Return what of the moments of a weight is on this rank."""
    for single in getattr(optimizer, "chained_optimizers", [optimizer]):
        places = getattr(
            single, "model_param_group_index_map", None
        )  # of a distributed optimizer: what it has a part of
        if places is None or weight in places:
            stepped = weight if places is None else _at(single.optimizer, *places[weight])
            found: Mapping[str, Tensor] = single.optimizer.state.get(stepped, {})
            if found:
                return found
    return {}


def _at(optimizer: Any, group: int, place: int) -> Any:
    return optimizer.param_groups[group]["params"][place]


@contextlib.contextmanager
def _changed_addition(layer: Any, change: Change) -> Iterator[None]:
    """Have `change` applied to the sum of a transformer layer's MLP and its residual."""
    addition = layer.mlp_bda
    layer.mlp_bda = lambda *options: lambda *args: change(addition(*options)(*args))
    try:
        yield
    finally:
        layer.mlp_bda = addition
