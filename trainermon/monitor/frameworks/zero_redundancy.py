"""torch's ZeroRedundancyOptimizer: DistributedDataParallel whose optimizer steps a share of the parameters per rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from trainermon.core.errors import AttachError
from trainermon.core.values import Coordinates
from trainermon.monitor.frameworks import ddp, plain
from trainermon.monitor.taps.training import OptimizerState


class ZeroRedundancyTraining(ddp.DdpTraining):
    """How DDP with torch's ZeroRedundancyOptimizer is watched: each parameter is stepped by one rank, its owner.

    Reduced gradient, value and state are read on the owner alone.
    """

    framework = "zero_redundancy"
    optimizer: Any

    def follow(self, optimizer: Any) -> bool:
        """Return False: which parameters another one steps on this rank is not known."""
        del optimizer
        return False

    def reduced_gradients(self) -> list[Tensor | None]:
        """Return, by parameter, its `.grad` if this rank owns it, else None."""
        return self._owned(super().reduced_gradients())

    def values(self) -> list[Tensor | None]:
        """Return by parameter the parameter itself; None where another rank steps it."""
        return self._owned(super().values())

    def states(self) -> list[OptimizerState | None]:
        """Return by parameter what this rank's own optimizer keeps of it; None where another rank steps it."""
        return plain.states_of(self.optimizer.optim, self.parameters)

    def _owned(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        return [t if p.owned.length else None for t, p in zip(tensors, self.parameters, strict=True)]


def recognises(chunks: Sequence[nn.Module], optimizer: object) -> bool:
    """Return whether the optimizer is a ZeroRedundancyOptimizer of a model in DistributedDataParallel."""
    return plain.is_sharding(optimizer) and ddp.recognises(chunks, optimizer)


def describe(chunks: Sequence[nn.Module], optimizer: Any, coordinates: Coordinates) -> ZeroRedundancyTraining:
    """Return how the training of `chunks` with a ZeroRedundancyOptimizer is watched.

    Raises:
        AttachError: The optimizer runs inside of the backward (`overlap_with_ddp`).
    """
    if optimizer._overlap_with_ddp:
        raise AttachError(
            "optimizer: ZeroRedundancyOptimizer with overlap_with_ddp=True steps inside of the backward, where no step "
            "can be watched; set overlap_with_ddp=False"
        )
    whole = ddp.describe(chunks, optimizer, coordinates)
    owner_of, rank = optimizer._param_to_rank, optimizer.process_group.rank()
    parameters = []
    for parameter in whole.parameters:
        owner = owner_of.get(parameter.tensor, 0)
        length = parameter.tensor.numel() if owner == rank else 0
        shard = dataclasses.replace(
            parameter.placement, length=length, partitioned_over=("dp",), replicated_over=(), in_global_norm=True
        )
        parameters.append(dataclasses.replace(parameter, shard=shard))
    training = ZeroRedundancyTraining(
        model=whole.model, roots=whole.roots, modules=whole.modules, parameters=parameters, optimizer=optimizer
    )
    training.wrappers = whole.wrappers
    return training
