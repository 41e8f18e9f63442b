"""Whether the script clips gradients that the optimizer has used already."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from trainermon.core.catalogue import CLIPPED_LATE
from trainermon.core.values import Kind, SeriesKey
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.loop.loop_taps import LoopTap
from trainermon.monitor.taps.micro_steps import MicroSteps
from trainermon.monitor.taps.step_values import StepValues
from trainermon.monitor.taps.training import Training

_ROUNDING = 1e-3


class _UsedGradient(NamedTuple):
    gradient: Tensor
    num_writes: int


class _Shrunk(NamedTuple):
    left: Mapping[int, weakref.ref[Tensor]]
    ratio: Tensor | float


class LateClipping(LoopTap):
    """Finds gradients that became smaller after the optimizer's step has used them, and that were dropped then.

    A few small gradients (the probe of `StepValues`) are held from the step's end to the next forward. Where all of
    them were written to as often, before any backward, and their norm is less, though not zero, they were clipped for
    nothing. A limit that is not reached, or infinite, multiplies by 1. What is cleared in place is zero, and what is
    kept for the next backward is meant. No tensor is read unless it was written to; 2 µs a step.

    Args:
        training: Whose gradients; nothing is looked at where it does not tell writes (`counts_writes`).
        collector: Takes the row, which counts such steps.
        steps: Knows whether there was a backward.
        values: Knows the norm of the probe when the step began.
    """

    looks_for = "gradients that are clipped after the step"

    def __init__(self, training: Training, collector: Collector, steps: MicroSteps, values: StepValues) -> None:
        self._training, self._collector, self._steps, self._values = training, collector, steps, values
        self._used: dict[int, _UsedGradient] = {}
        self._norm: Tensor | float = 0.0
        self._shrunk: _Shrunk | None = None
        self._num_late: Tensor | float = 0.0

    def at_entry(self, step: int) -> None:
        """Count what was clipped late, now that it is known whether it was dropped; note what the step uses."""
        del step
        if self._shrunk is not None:
            held = self._training.parameters
            if all(held[i].tensor.grad is not left() for i, left in self._shrunk.left.items() if left() is not None):
                self._count(self._shrunk.ratio)
            self._shrunk = None
        found = self._values.used if self._training.counts_writes else None
        self._used = {}
        if found is not None:
            gradients, self._norm = found
            self._used = {i: _UsedGradient(gradient, gradient._version) for i, gradient in gradients.items()}

    def step_ended(self) -> None:
        """Forget what the optimizer itself has written to."""
        if any(used.gradient._version != used.num_writes for used in self._used.values()):
            self._used = {}

    def forward_begins(self) -> None:
        """Look whether anything was written to the gradients since the step; call it when a forward begins."""
        used, self._used = self._used, {}
        writes = {one.gradient._version - one.num_writes for one in used.values()}
        is_nothing = not isinstance(self._norm, Tensor) and not self._norm
        if is_nothing or not used or writes == {0} or len(writes) > 1 or self._steps.has_backward:
            return
        now = self._values.norm_of({i: one.gradient for i, one in used.items()})
        self._shrunk = _Shrunk({i: weakref.ref(one.gradient) for i, one in used.items()}, now / self._norm)

    def detach(self) -> None:
        """Release the gradients."""
        self._used, self._shrunk = {}, None

    def _count(self, ratio: Tensor | float) -> None:
        is_late = (ratio > 0.0) & (ratio < 1.0 - _ROUNDING)
        self._num_late = self._num_late + (is_late.double() if isinstance(is_late, Tensor) else float(is_late))
        series = self._collector.table.id_of(SeriesKey(Kind.STEP, CLIPPED_LATE))
        if isinstance(self._num_late, Tensor):
            self._collector.take((series,), (self._num_late,))
        else:
            self._collector.put(series, self._num_late)
