"""Steps that are made with the very tensors of the step before, as several epochs over one batch of rollouts are."""

from __future__ import annotations

from trainermon.core.catalogue import BATCH_REUSED
from trainermon.core.values import Kind, SeriesKey
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.loop.loop_taps import LoopTap
from trainermon.monitor.taps.micro_steps import MicroSteps


class ReusedBatch(LoopTap):
    """Files a row where every forward of a step was given the tensors that the one before was: the script kept them.

    What a loader yields twice by mistake are other tensors with the same numbers. Known are tensors that the model is
    given by position, and that nothing has written to. No tensor is read; 1 µs for each forward, 0.2 µs a step.

    Args:
        collector: Takes the row.
        steps: Knows what forwards were given.
    """

    looks_for = "steps with the batch of the step before"

    def __init__(self, collector: Collector, steps: MicroSteps) -> None:
        self._collector, self._steps = collector, steps

    def step_ended(self) -> None:
        """File the row."""
        if 0 < self._steps.num_given == self._steps.num_given_again:
            self._collector.put(self._collector.table.id_of(SeriesKey(Kind.STEP, BATCH_REUSED)), 1.0)
