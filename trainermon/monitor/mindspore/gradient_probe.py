"""`GradientMonitor` for MindSpore: task grad_probe, for a comparison of two runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspore import nn

from trainermon.core.errors import AttachError
from trainermon.core.values import GradientLevel
from trainermon.dump.debugger_config import DebuggerConfig
from trainermon.hooks.containment import PlainFaultGuard
from trainermon.hooks.mindspore import hooks
from trainermon.monitor.gradient_probe.probe_files import ProbeFiles, probe_config
from trainermon.monitor.mindspore.gradient_readings import CellGradientReader
from trainermon.monitor.mindspore.place import find_coordinates
from trainermon.monitor.mindspore.training import CellTraining

logger = logging.getLogger("trainermon")


class GradientMonitor:
    """Writes what the optimizer is called with at each step into `<dump_path>/rank<R>` and `<dump_path>/signs`.

        GradientMonitor("config.json").monitor(net, optimizer)

    One call of the optimizer is one step, counted from 0. Training is not changed; a fault is logged once and ends the
    probe. In a step that is compiled as a whole nothing is seen.

    Args:
        config: A file of `PrecisionDebugger`, or a mapping of its keys, with task grad_probe (see `DebuggerConfig`).

    Raises:
        ConfigError: A key is unknown, or a value cannot be met.
    """

    def __init__(self, config: str | Path | Mapping[str, Any] | DebuggerConfig) -> None:
        self._config = probe_config(config)
        self._guard = PlainFaultGuard(lambda _message: self.stop())
        self._handles: list[hooks.HookHandle] = []
        self._step = 0

    def monitor(self, model: nn.Cell | Sequence[nn.Cell], optimizer: nn.Cell) -> None:
        """Start: the next call of the optimizer is step 0.

        Args:
            model: The model, or its virtual pipeline stages.
            optimizer: What is called with the gradients.

        Raises:
            AttachError: The model or the optimizer cannot be watched.
        """
        cells = list(model) if isinstance(model, list | tuple) else [model]
        if not cells or not all(isinstance(cell, nn.Cell) for cell in cells):
            raise AttachError(f"monitor: found {type(model).__name__}, expected a mindspore.nn.Cell, or a list of them")
        training, coordinates = CellTraining(cells, optimizer), find_coordinates({})
        if self._config.rank and coordinates.rank not in self._config.rank:
            return
        probe = self._config.grad_probe
        reader = CellGradientReader(
            training,
            params=probe.params,
            bounds=probe.bounds if probe.level is GradientLevel.L2 else (),
            signs=probe.level is not GradientLevel.L0,
            checksum=probe.level is GradientLevel.L0,
        )
        if not reader.names:
            logger.warning("grad_probe.param_list chooses none of the model's parameters: nothing will be written")
        see = self._guard.wrap(self._see, reader, ProbeFiles(self._config, coordinates))
        self._handles.append(hooks.before(optimizer, see))

    def stop(self) -> None:
        """Take the hook off; what was written stays. Does nothing the second time."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _see(self, reader: CellGradientReader, files: ProbeFiles, _optimizer: nn.Cell, args: Sequence[Any]) -> None:
        step, self._step = self._step, self._step + 1
        if self._config.chooses(step):
            reader.gradients = args[0]
            files.write(step, reader.read())
            reader.gradients = ()
