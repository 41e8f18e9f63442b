"""DeepSpeed: an engine steps for the script; ZeRO splits optimizer, gradients and parameters over the ranks.

`holders` and `zero` read what each kind of optimizer holds, `step` what came of a step, `names` says where a parameter
stands in the whole model, `checks` refuses what is not known. Nothing here imports DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from trainermon.core.errors import AttachError
from trainermon.core.values import Coordinates
from trainermon.monitor.frameworks.deepspeed import checks, names
from trainermon.monitor.frameworks.deepspeed.holders import FusedHolder, OptimizerHolder, WholeHolder
from trainermon.monitor.frameworks.deepspeed.training import DeepSpeedTraining
from trainermon.monitor.frameworks.deepspeed.zero import Bf16Holder, Stage3Holder, Stage12Holder
from trainermon.monitor.taps.training import Training

__all__ = ["DeepSpeedTraining", "describe", "recognises"]

# Class of `engine.optimizer` -> who reads it. At stage 0 in float32 it is a torch optimizer of any class.
HOLDERS: Mapping[str, Callable[[Any], OptimizerHolder]] = MappingProxyType(
    {
        "DeepSpeedZeroOptimizer": Stage12Holder,
        "DeepSpeedZeroOptimizer_Stage3": Stage3Holder,
        "BF16_Optimizer": Bf16Holder,
        "FP16_Optimizer": FusedHolder,
        "FP16_UnfusedOptimizer": WholeHolder,
    }
)


def recognises(chunks: Sequence[nn.Module], optimizer: object) -> bool:
    """Return whether DeepSpeed trains this model."""
    return checks.is_of_deepspeed(chunks, optimizer)


def describe(chunks: Sequence[nn.Module], optimizer: object, coordinates: Coordinates) -> Training:
    """Return how the training of a DeepSpeed engine and its optimizer is watched.

    Raises:
        AttachError: Something that is not watched; see `checks`.
    """
    engine = checks.find_engine(chunks[0]) if len(chunks) == 1 else None
    if engine is None:
        raise AttachError(f"model: DeepSpeed trains it, but this is not its engine; {checks.HINT}")
    checks.check(engine, optimizer)
    holder = _holder_of(engine)
    training = DeepSpeedTraining(
        model=chunks[0],
        roots=(engine.module,),
        modules=names.modules_of(engine),
        parameters=names.parameters_of(engine, holder),
        optimizer=engine.optimizer,
    )
    training.take_over(engine, holder)
    training.coordinates = names.coordinates_of(engine, coordinates)
    return training


def _holder_of(engine: Any) -> OptimizerHolder:
    name = type(engine.optimizer).__name__
    is_torch = isinstance(engine.optimizer, torch.optim.Optimizer) and engine.zero_optimization_stage() == 0
    kind = WholeHolder if is_torch else HOLDERS.get(name)
    if kind is None:
        raise AttachError(f"deepspeed: found the optimizer {name}, expected one of {', '.join(HOLDERS)}")
    return kind(engine)
