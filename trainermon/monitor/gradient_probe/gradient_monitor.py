"""`GradientMonitor`: task grad_probe, which writes numbers and signs of gradients for a comparison of two runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainermon.core.errors import AttachError
from trainermon.core.topology import find_coordinates
from trainermon.core.values import GradientLevel
from trainermon.dump.debugger_config import DebuggerConfig
from trainermon.hooks.guard import FaultGuard
from trainermon.monitor.frameworks import detect
from trainermon.monitor.gradient_probe.probe_files import ProbeFiles, probe_config
from trainermon.monitor.gradient_probe.readings import GradientReader
from trainermon.monitor.taps.training import StepOutcome, TapHandle, Training

logger = logging.getLogger("trainermon")

_ONE_OF_SEVERAL = (
    'GradientMonitor({"task": "grad_probe", "dump_path": "generator", …}).monitor(generator, its_optimizer)'
)


class GradientMonitor:
    """Writes what the optimizer is given, at each of its steps, into `<dump_path>/rank<R>` and `<dump_path>/signs`.

        GradientMonitor("config.json").monitor(model, optimizer)

    One step of the outer optimizer is one step, counted from 0. Each rank writes what its optimizer holds: all of a
    parameter, or its part of one that is sharded. Training is not changed; a fault is logged once and ends the probe.

    Args:
        config: A file of `PrecisionDebugger`, or a mapping of its keys, with task grad_probe (see `DebuggerConfig`).

    Raises:
        ConfigError: A key is unknown, or a value cannot be met.
    """

    def __init__(self, config: str | Path | Mapping[str, Any] | DebuggerConfig) -> None:
        self._config = probe_config(config)
        self._guard = FaultGuard(lambda _message: self.stop())
        self._handles: list[TapHandle] = []
        self._step = 0

    def monitor(self, model: nn.Module | Sequence[nn.Module], optimizer: Any = None) -> None:
        """Start: the next step of the optimizer is step 0.

        Args:
            model: The model as the training loop calls it, or its virtual pipeline stages.
            optimizer: The optimizer whose `step()` ends a training step; what it does not step is left out. None: the
                first torch optimizer that steps one of the model's parameters, and all of these; DeepSpeed and
                Megatron-Core need theirs named.

        Raises:
            AttachError: The model or the optimizer cannot be watched.
        """
        chunks = [model] if isinstance(model, nn.Module) else list(model)
        if not chunks or not all(isinstance(chunk, nn.Module) for chunk in chunks):
            raise AttachError(f"monitor: found {type(model).__name__}, expected a module, or a list of modules")
        if self._config.rank and find_coordinates().rank not in self._config.rank:
            return
        if optimizer is None:
            self._handles.append(_FirstStep(chunks, self._guard, self._attach).handle)
        else:
            self._attach(chunks, optimizer)

    def stop(self) -> None:
        """Take every hook off; what was written stays. Does nothing the second time."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _attach(self, chunks: Sequence[nn.Module], optimizer: Any, *, is_first: bool = False) -> None:
        coordinates = find_coordinates()
        training = detect(chunks, optimizer, coordinates, one_of_several=_ONE_OF_SEVERAL)
        training.shows_unstepped = is_first  # of several that step after one backward
        coordinates = training.coordinates or coordinates
        probe = self._config.grad_probe
        reader = GradientReader(
            training,
            coordinates,
            params=probe.params,
            bounds=probe.bounds if probe.level is GradientLevel.L2 else (),
            signs=probe.level is not GradientLevel.L0,
            checksum=probe.level is GradientLevel.L0,
        )
        if not reader.names:
            logger.warning("grad_probe.param_list chooses none of the model's parameters: nothing will be written")
        self._watch(training, reader, ProbeFiles(self._config, coordinates))

    def _watch(self, training: Training, reader: GradientReader, files: ProbeFiles) -> None:
        def entry() -> None:
            if self._config.chooses(self._step):
                files.write(self._step, reader.read())

        def leave(_outcome: StepOutcome) -> None:
            self._step += 1

        self._handles += training.watch_step(self._guard, entry=entry, exit=leave)


class _FirstStep:
    """Waits for the first torch optimizer that steps one of the model's parameters, and attaches to it."""

    def __init__(self, chunks: Sequence[nn.Module], guard: FaultGuard, attach: Any) -> None:
        self._chunks, self._attach = chunks, attach
        self._known = {id(parameter) for chunk in chunks for parameter in chunk.parameters()}
        self._found = False
        self.handle: TapHandle = register_optimizer_step_pre_hook(guard.wrap(self._before))

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Attach to `optimizer`, whose own hooks are called after this one, in the same step."""
        stepped = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if not self._found and any(id(parameter) in self._known for parameter in stepped):
            self._found = True
            self._attach(self._chunks, optimizer, is_first=True)
