"""Trainable parameters that lie in the same memory without being one parameter."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from trainermon.core.catalogue import SHARES_MEMORY
from trainermon.core.values import Kind
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.loop.loop_taps import LoopTap
from trainermon.monitor.taps.training import Training


class SharedMemory(LoopTap):
    """Tells, in the first step, which parameters begin where another one does: ties that were made by `.data`.

    Each has a gradient of its own, and the optimizer steps the same numbers once for each. Where there are some, each
    parameter has a row, 1 for them and 0 for the others. No tensor is read; 1 µs a parameter, once.

    Args:
        training: Whose parameters.
        collector: Takes the rows.
    """

    looks_for = "parameters that share memory"

    def __init__(self, training: Training, collector: Collector) -> None:
        self._training, self._collector = training, collector
        self._is_done = False

    def step_ended(self) -> None:
        """Look where the parameters lie."""
        if self._is_done:
            return
        self._is_done = True
        places = [_place(parameter.tensor) for parameter in self._training.parameters]
        apart = {id(held.tensor): place for held, place in zip(self._training.parameters, places, strict=True)}
        shared = {place for place, number in Counter(apart.values()).items() if place is not None and number > 1}
        for parameter, place in zip(self._training.parameters, places, strict=True) if shared else ():
            series = self._collector.table.id_of(parameter.key(Kind.STATE, SHARES_MEMORY), parameter.placement)
            self._collector.put(series, float(place in shared))


def _place(parameter: Tensor) -> tuple[str, int] | None:
    """Return device and address of a trainable parameter; None where this rank has nothing of it, or it has none."""
    own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    if not parameter.requires_grad or own.layout is not torch.strided or own.is_meta or not own.numel():
        return None
    if type(own) not in (Tensor, nn.Parameter):
        return None
    return str(own.device), own.data_ptr()
