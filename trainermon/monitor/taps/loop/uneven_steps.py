"""Whether ranks may take different numbers of steps, so that they cannot be compared by the number of a step."""

from __future__ import annotations

import logging

from trainermon.core.catalogue import UNEVEN_STEPS
from trainermon.core.values import Kind, SeriesKey
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.loop.loop_taps import LoopTap
from trainermon.monitor.taps.training import Training

logger = logging.getLogger("trainermon")


class UnevenSteps(LoopTap):
    """Notes the steps under torch's `Join`, and says once in the log what follows. A look at two attributes a step.

    Args:
        training: Knows whether ranks may take different numbers of steps.
        collector: Takes the row.
    """

    looks_for = "ranks that take different numbers of steps"

    def __init__(self, training: Training, collector: Collector) -> None:
        self._training = training
        self._collector = collector
        self._is_told = False

    def at_entry(self, step: int) -> None:
        """Record whether the step is one under `Join`."""
        if not self._training.allows_uneven_steps():
            return
        self._collector.put(self._collector.table.id_of(SeriesKey(Kind.STEP, UNEVEN_STEPS)), 1.0)
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "the model trains under torch's Join, so that ranks may take different numbers of steps: from step %d "
                "on they are not compared",
                step,
            )
