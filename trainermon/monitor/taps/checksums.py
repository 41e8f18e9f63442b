"""Checksums of the parameters that several ranks hold copies of, so that readers can compare the copies by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainermon.core.schedule import DueSteps
from trainermon.core.values import Kind, Placement
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.optimizer import placement_of, placement_of_own
from trainermon.monitor.taps.training import Training
from trainermon.statistics.checksums import checksums, rows_of

MAIN_COPY = "main"
"""Slot of what the optimizer steps in the place of the model's own parameter, where each rank holds all of it."""


class _ParameterCopy(NamedTuple):
    slot: str
    tensor: Tensor
    placement: Placement


class ChecksumTaps:
    """Takes a checksum of every replicated parameter at the entry of the optimizer step.

    At that moment the forward has used the model's own parameters, so whatever gathers them has done so. What is split
    over ranks (the shards of FSDP and of ZeRO, the state of a distributed optimizer) has no copy, and no checksum.

    Args:
        training: Whose parameters.
        indices: Which of them.
        collector: Where the rows go.
        due: On which steps.
    """

    def __init__(self, training: Training, indices: Sequence[int], collector: Collector, due: DueSteps) -> None:
        self._training = training
        self._indices = indices if training.holds_replicas else ()
        self._collector = collector
        self._due = due
        self._series: dict[tuple[int, str], int] = {}

    def at_entry(self, step: int) -> None:
        """Compute and record the checksums of parameters, if they are due on `step`.

        Called when the optimizer step begins.
        """
        if not self._indices or self._collector.muted or not self._due.include(step):
            return
        series, tensors = [], []
        for index, copy in self._copies():
            series.append(self._number(index, copy))
            tensors.append(copy.tensor)
        if series:
            self._collector.repeat(series, rows_of(checksums(tensors)))

    def _copies(self) -> Iterator[tuple[int, _ParameterCopy]]:
        values = self._training.values()
        for index in self._indices:
            parameter, value = self._training.parameters[index], values[index]
            tensor = parameter.tensor
            if parameter.placement.replicated_over and _is_whole(tensor):
                yield index, _ParameterCopy("", tensor, placement_of_own(parameter, tensor))
            if value is None or value is tensor or not parameter.owned.replicated_over or _is_cut(parameter.owned):
                continue
            if value.layout is torch.strided and value.data_ptr() != tensor.data_ptr():
                yield index, _ParameterCopy(MAIN_COPY, value, placement_of(parameter, value))

    def _number(self, index: int, copy: _ParameterCopy) -> int:
        number = self._series.get((index, copy.slot))
        if number is None:
            key = self._training.parameters[index].key(Kind.CHECKSUM, slot=copy.slot)
            number = self._series[index, copy.slot] = self._collector.table.id_of(key, copy.placement)
        return number


def _is_whole(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and tensor.layout is torch.strided and not hasattr(tensor, "placements")


def _is_cut(placement: Placement) -> bool:
    """Return whether ranks hold ranges of the parameter, of which only some may be copies of one another."""
    return bool(set(placement.partitioned_over) & set(placement.replicated_over)) or placement.length is not None
