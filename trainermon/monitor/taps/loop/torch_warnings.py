"""What torch itself warns of once, in a line of the log that is easily overlooked, and that makes a training wrong."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from trainermon.core.catalogue import TORCH_WARNED_SERIES
from trainermon.core.values import Kind, SeriesKey
from trainermon.hooks.guard import FaultGuard
from trainermon.hooks.patch import Patch
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.loop.loop_taps import LoopTap
from trainermon.monitor.taps.micro_steps import MicroSteps

_SHAPE, _SCHEDULE = "target_of_another_shape", "schedule_before_step"

WARNED: Mapping[str, str] = MappingProxyType(
    {
        _SHAPE: "that is different to the input size",
        "nothing_is_clipped": "no gradient clipping will occur",
        "samples_of_each_worker": "samples have been fetched. For multiprocessing data-loading",
        "zero_grad_of_a_copy": "from a module created with nn.DataParallel() has no effect",
        _SCHEDULE: "Detected call of `lr_scheduler.step()` before `optimizer.step()`",
    }
)
"""By the slot of its row, what a warning of torch contains that tells of a mistake, whatever the model."""


class TorchWarnings(LoopTap):
    """Files a row for each kind of warning in `WARNED`, on the step that it comes in.

    The loss of a validation, without gradients, is no matter of the training. Nothing is known of what the script's
    filters leave out, of what was warned of before the monitor was there, and of steps that are not collected: torch
    says most of it once. Without a warning it costs nothing.

    Args:
        collector: Takes the rows.
        steps: Knows whether the script scales its loss: then a step that a schedule waits for may have been skipped.
    """

    looks_for = "what torch warns of"

    def __init__(self, collector: Collector, steps: MicroSteps) -> None:
        self._collector, self._steps = collector, steps
        self._patch: Patch | None = None
        self._seen: set[str] = set()

    def attach(self, guard: FaultGuard) -> None:
        """Listen to what Python shows of warnings; they are shown as before."""
        self._patch = Patch(warnings, "showwarning", before=guard.wrap(self._heard))

    def detach(self) -> None:
        """Listen no longer."""
        if self._patch is not None:
            self._patch.remove()
            self._patch = None

    def step_ended(self) -> None:
        """File what was warned of."""
        if self._seen:
            for slot in sorted(self._seen - ({_SCHEDULE} if self._steps.in_float16 else set())):
                key = SeriesKey(Kind.STEP, TORCH_WARNED_SERIES, slot=slot)
                self._collector.put(self._collector.table.id_of(key), 1.0)
            self._seen.clear()

    def _heard(self, shown: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        text = str(shown[0] if shown else named.get("message", ""))
        found = {slot for slot, part in WARNED.items() if part in text}
        self._seen |= found if torch.is_grad_enabled() else found - {_SHAPE}
