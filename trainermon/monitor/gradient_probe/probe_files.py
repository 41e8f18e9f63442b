"""Where a gradient probe writes, and what its configuration is, whatever framework trains."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainermon.core.config.reading import read_mapping
from trainermon.core.gradient_signs import SignsHeader, signs_path, write_signs
from trainermon.core.values import Coordinates, GradientLevel
from trainermon.dump.debugger_config import GRAD_PROBE, DebuggerConfig, read_debugger_config
from trainermon.monitor.gradient_probe.records import GradientReading, infinite_in
from trainermon.monitor.gradient_probe.summary_csv import write_booleans, write_summary

logger = logging.getLogger("trainermon")


class ProbeFiles:
    """Writes what was read of a step into `<dump_path>/rank<R>` and `<dump_path>/signs`.

    Args:
        config: What is written, and where.
        coordinates: Where this rank stands.
    """

    def __init__(self, config: DebuggerConfig, coordinates: Coordinates) -> None:
        self._probe, self._folder = config.grad_probe, Path(config.dump_path)
        self._coordinates = coordinates

    def write(self, step: int, readings: Sequence[GradientReading]) -> None:
        """Write the files of a step.

        Raises:
            OSError: One cannot be written.
        """
        probe, rank = self._probe, self._coordinates.rank
        ranked = self._folder / f"rank{rank}"
        write_summary(ranked / f"grad_summary_{step}.csv", readings, probe.level, probe.bounds)
        signed = [reading for reading in readings if reading.signs is not None]
        if not signed:
            return
        header = SignsHeader(
            step=step,
            rank=rank,
            world_size=self._coordinates.world_size,
            bounds=probe.bounds if probe.level is GradientLevel.L2 else (),
            infinite=infinite_in(signed),
        )
        write_signs(signs_path(self._folder, step, rank), header, [reading.written for reading in signed])
        if probe.sign_format == "npy":
            write_booleans(ranked / f"step{step}", signed)


def probe_config(config: str | Path | Mapping[str, Any] | DebuggerConfig) -> DebuggerConfig:
    """Return the configuration of a probe, read from a file or a mapping; what has no effect is told in the log.

    Raises:
        ConfigError: A key is unknown, or a value cannot be met.
    """
    if isinstance(config, DebuggerConfig):
        return config
    source = config if isinstance(config, Mapping) else read_mapping(Path(config))
    found, notes = read_debugger_config(source, task=GRAD_PROBE)
    for note in notes:
        logger.warning("%s", note)
    return found
