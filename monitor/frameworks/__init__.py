"""How each training framework reduces, holds and steps its parameters: one small module per framework."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from trainermon.monitor.errors import AttachError
from trainermon.monitor.frameworks import ddp, plain
from trainermon.monitor.frameworks.training import Training
from trainermon.monitor.values import Coordinates

__all__ = ["Training", "detect"]


def detect(chunks: Sequence[nn.Module], optimizer: object, coordinates: Coordinates) -> Training:
    """Return the set-up of a model (one module, or its virtual pipeline stages in order) and its optimizer.

    The choice depends on what the model *is*, never on which packages are installed. What is not recognised is refused.

    Raises:
        AttachError: A kind of wrapper or optimizer that this version cannot watch correctly.
    """
    for chunk in chunks:
        _refuse_sharded(chunk)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise AttachError(
            f"optimizer: found {type(optimizer).__module__}.{type(optimizer).__qualname__}, expected a "
            "torch.optim.Optimizer; pass the optimizer whose step() ends a training step"
        )
    describe = ddp.describe if ddp.recognises(chunks) else plain.describe
    training = describe(chunks, optimizer, coordinates)
    if not training.parameters:
        raise AttachError("model: no parameter requires a gradient, so there is nothing to watch")
    return training


def _refuse_sharded(chunk: nn.Module) -> None:
    wrapper = next((type(m) for m in chunk.modules() if type(m).__name__ in _NOT_AVAILABLE), None)
    sharded = wrapper or next((type(p) for p in chunk.parameters() if hasattr(p, "placements")), None)
    if sharded is not None:
        raise AttachError(
            f"model: found {sharded.__module__}.{sharded.__qualname__}; this version watches plain modules and "
            "DistributedDataParallel, and would misread sharded parameters"
        )


_NOT_AVAILABLE = frozenset({"FullyShardedDataParallel", "DeepSpeedEngine", "PipelineEngine"})
