"""Features of weight matrices: spectral norm and stable rank, and how alike the experts of a router are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainermon.core.values import STATISTICS
from trainermon.hooks.guard import FaultGuard
from trainermon.monitor.taps.features import formulas
from trainermon.monitor.taps.features.feature import Feature, matrix_of
from trainermon.monitor.taps.training import TapHandle
from trainermon.statistics.kernel import moments

SPECTRAL_NORM, STABLE_RANK = "spectral_norm", "stable_rank"
SIMILARITY = "router_weight_similarity"


class WeightFeature(Feature):
    """Base class of features of a weight matrix, which is read just before the forward, when it is gathered."""

    def attach(self, guard: FaultGuard) -> list[TapHandle]:
        """Hook the module before its forward; return the hook."""
        return [self.module.module.register_forward_pre_hook(guard.wrap(self._before))]

    def _before(self, module: nn.Module, _args: tuple[Any, ...]) -> None:
        if not self._is_due:
            return
        self._is_taken = True
        weight = matrix_of(module)
        if weight is None or not weight.numel():
            self._give_up("its weight is not on this rank when its forward begins")
        elif not weight.is_floating_point() or weight.itemsize == 1:
            self._give_up(f"its weight is {weight.dtype}")
        else:
            self._look(self._compute, weight)

    def _compute(self, weight: Tensor) -> None:
        raise NotImplementedError


class LinearFeature(WeightFeature):
    """Records, of a weight matrix, the spectral norm `s` and the stable rank `||W||_F^2 / s^2`.

    Source of the stable rank: Rudelson and Vershynin, "Sampling from Large Matrices", section 1. As `s` is approached
    from below, the stable rank is approached from above. A matrix of zeros has none (NaN).
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._norm = formulas.SpectralNorm()

    def _compute(self, weight: Tensor) -> None:
        norm = self._norm.of(weight)
        row = torch.empty((1, len(STATISTICS)), dtype=torch.float64, device=weight.device)
        moments((weight,), row)
        self._take(SPECTRAL_NORM, norm)
        self._take(STABLE_RANK, row[0, STATISTICS.index("sum_sq")] / norm.double().square())


class SimilarityFeature(WeightFeature):
    """Records the cosines between the weight vectors of a router's experts.

    Their mean is msprobe's `router_weight_similarity`.
    """

    def _compute(self, weight: Tensor) -> None:
        self._take(SIMILARITY, formulas.similarities(weight))
