"""Whether the optimizer steps once more with gradients that it has stepped with already."""

from __future__ import annotations

from trainermon.core.catalogue import STEP_REPEATED
from trainermon.core.values import Kind, SeriesKey
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.loop.loop_taps import LoopTap
from trainermon.monitor.taps.micro_steps import MicroSteps
from trainermon.monitor.taps.training import Training

_NUM_PROBES = 8


class RepeatedSteps(LoopTap):
    """Finds steps in which there was no backward, and whose gradients are the very tensors that the last step has left.

    torch counts the writes to a tensor: nothing has cleared or changed them since. Eight parameters show it, spread
    over the model. Only a step that follows one with a backward is told: where no backward is ever seen, as in a CUDA
    graph that is replayed, nothing is known. No tensor is read; 2 µs a step.

    Args:
        training: Whose gradients; nothing is looked at where it does not tell writes (`counts_writes`).
        collector: Takes the row, which counts them.
        steps: Knows whether there was a backward.
    """

    looks_for = "steps that are done twice"

    def __init__(self, training: Training, collector: Collector, steps: MicroSteps) -> None:
        self._collector = collector
        self._steps = steps
        parameters = training.parameters if training.counts_writes else ()
        self._probes = [p.tensor for p in parameters[:: max(1, len(parameters) // _NUM_PROBES)]]
        self._left: list[tuple[int, int]] = []  # identity and writes of each probe's gradient
        self._had_backward = False
        self._num_repeated = 0

    def at_entry(self, step: int) -> None:
        """Compare the gradients with those that the last step has left."""
        del step
        has_backward = self._steps.has_backward
        if self._had_backward and not has_backward and self._left == self._now():
            self._num_repeated += 1
            series = self._collector.table.id_of(SeriesKey(Kind.STEP, STEP_REPEATED))
            self._collector.put(series, float(self._num_repeated))
        self._had_backward = has_backward

    def step_ended(self) -> None:
        """Note what the step has left; nothing without a gradient."""
        now = self._now()
        self._left = now if any(number for number, _ in now) else []

    def _now(self) -> list[tuple[int, int]]:
        found = [p.grad for p in self._probes]
        return [(0, 0) if gradient is None else (id(gradient), gradient._version) for gradient in found]
