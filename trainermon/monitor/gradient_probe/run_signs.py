"""The signs of a run's gradients, as files of the run directory, for `TrainerMon` (`gradient_signs`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from trainermon.core.config.schema import GradientSignsConfig
from trainermon.core.gradient_signs import FOLDER, SignsHeader, signs_name, write_signs
from trainermon.core.outbox import Outbox
from trainermon.core.values import Coordinates, GradientLevel
from trainermon.monitor.gradient_probe.records import GradientReading, SignsReaderFactory, infinite_in

logger = logging.getLogger("trainermon")


class RunSigns:
    """Sends a file of signs to the run directory at the entry of each optimizer step that is due.

    Args:
        make_reader: Makes what reads the gradients of a step.
        coordinates: Where this rank stands.
        outbox: What takes the files to the run directory.
        attempt: The run's attempt; the last one of a step counts.
        config: What is written; without a level nothing is.
    """

    def __init__(
        self,
        make_reader: SignsReaderFactory,
        coordinates: Coordinates,
        outbox: Outbox,
        attempt: int,
        config: GradientSignsConfig,
    ) -> None:
        self._outbox, self._attempt = outbox, attempt
        self._coordinates, self._config = coordinates, config
        self._num_written = self._num_skipped = 0
        self._bounds = config.bounds if config.level is GradientLevel.L2 else ()
        self._reader = None
        if config.level is not None:
            self._reader = make_reader(params=config.params, bounds=self._bounds)

    def at_entry(self, step: int) -> None:
        """Write the signs of `step` on the node, if they are due; on an accelerator this waits for the device.

        Where a quarter of the node's room is not enough the step is left out, with one warning.
        """
        config = self._config
        if self._reader is None or step % config.step_interval or self._num_written >= config.max_steps:
            return
        readings = self._reader.read()
        wanted = 16 * sum(reading.part.num_words for reading in readings)
        if not readings or self._outbox.room(wanted) < wanted:
            self._skip(step, wanted)
            return
        self._send(step, readings)
        self._num_written += 1

    def _send(self, step: int, readings: Sequence[GradientReading]) -> None:
        place = self._coordinates
        name = signs_name(step, place.rank)
        parcel = self._outbox.parcel(f"{FOLDER}/attempt{self._attempt}/{name.removesuffix('.bits')}")
        header = SignsHeader(
            step=step,
            rank=place.rank,
            world_size=place.world_size,
            bounds=self._bounds,
            infinite=infinite_in(readings),
        )
        write_signs(parcel.content / name, header, [reading.written for reading in readings])
        parcel.send()

    def _skip(self, step: int, wanted: int) -> None:
        if wanted and not self._num_skipped:
            logger.warning(
                "gradient_signs: step %d is left out: its %d MiB do not fit a quarter of the room on the node; choose "
                "fewer parameters (gradient_signs.params) or a larger step_interval",
                step,
                wanted >> 20,
            )
        self._num_skipped += bool(wanted)
