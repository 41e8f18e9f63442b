"""What exists between `set_monitor` and `close` for a model of MindSpore, beside files and agent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from mindspore import Tensor

from trainermon.core.config import MonitorConfig
from trainermon.core.config.schema import GradientSignsConfig
from trainermon.core.errors import AttachError
from trainermon.core.topology import RunIdentity
from trainermon.core.values import Coordinates
from trainermon.hooks.containment import PlainFaultGuard
from trainermon.monitor.gradient_probe.records import SignsReaderFactory
from trainermon.monitor.gradient_probe.run_signs import RunSigns
from trainermon.monitor.mindspore.dumps import CellDumps
from trainermon.monitor.mindspore.graph import check_compiled
from trainermon.monitor.mindspore.place import kept_settings
from trainermon.monitor.mindspore.step_loop import CellLoop, CellParts
from trainermon.monitor.mindspore.structure import FOLDER as STRUCTURE_FOLDER
from trainermon.monitor.mindspore.training import CellTraining
from trainermon.monitor.session.attached_rank import AttachedRank
from trainermon.statistics.mindspore.moments import MomentsOfTensors, is_readable


class AttachedCell(AttachedRank):
    """The monitor of one training of MindSpore on one rank: hooks, files and agent.

    Args:
        run: The run.
        coordinates: The rank's position in the job.
        config: The configuration.
        training: What is watched.
    """

    _loop: CellLoop | None

    def __init__(
        self, run: RunIdentity, coordinates: Coordinates, config: MonitorConfig, training: CellTraining
    ) -> None:
        super().__init__(run, coordinates, config, PlainFaultGuard)
        self._training = training
        self._attempt = run.attempt
        self._moments = MomentsOfTensors()
        self._dumps = CellDumps(training, coordinates, run.attempt, self._files.outbox, config.dump_source)

    def record(self, values: Mapping[str, Any]) -> None:
        """Record numbers of the step; raises nothing. Ends a compiled step that has run since the last call."""
        self._poll()
        super().record(values)

    def watch(self, optimizer: Any) -> Any:
        """Return what takes the optimizer's place in compiled steps; see `TrainerMon.watch`."""
        if optimizer is not self._training.optimizer:
            found = type(optimizer).__name__
            raise AttachError(f"watch: found another {found} than set_monitor was called with, expected that one")
        assert self._loop is not None
        check_compiled(self._config)
        return self._loop.watch(optimizer)

    def step_ended(self) -> None:
        """Look whether a compiled step has ended; raises nothing."""
        self._poll()

    def stop_in_child(self) -> None:
        """Stop monitoring in a forked child: the run, and its open dumps, are its parent's."""
        super().stop_in_child()
        if self._loop is not None:
            self._loop.orders.stop_in_child()

    def _poll(self) -> None:
        if self._loop is not None and os.getpid() == self._pid:
            self._guard.wrap(self._loop.poll)()

    def _make_loop(self, *, num_micro_steps: int, step: int) -> CellLoop:
        parts = CellParts(
            training=self._training,
            guard=self._guard,
            journal=self._files.journal,
            page=self._files.page,
            dumps=self._dumps,
            moments=self._moments,
            is_alone=self._coordinates.world_size == 1,
            structure=partial(self._files.outbox.parcel, f"{STRUCTURE_FOLDER}/rank{self._coordinates.rank}"),
            signs=self._signs,
        )
        return CellLoop(
            parts,
            self._config,
            step=step,
            num_micro_steps=num_micro_steps,
            between_steps=self._between_steps,
            has_news=self._has_news,
        )

    def _signs(self, make_reader: SignsReaderFactory, config: GradientSignsConfig) -> RunSigns:
        return RunSigns(make_reader, self._coordinates, self._files.outbox, self._attempt, config)

    def _described(self) -> CellTraining:
        return self._training

    def _environment(self) -> Mapping[str, Any]:
        return kept_settings()

    def _accelerator(self) -> Mapping[str, Any] | None:
        return None  # of Ascend devices nothing was run

    def _kernel(self) -> str:
        return self._moments.name

    def _checked(self, config: MonitorConfig) -> MonitorConfig:
        from trainermon.monitor.mindspore.opening import check_against_model

        if self._loop is not None and self._loop.watched is not None:
            check_compiled(config, self._loop.watched)
        return check_against_model(config, self._training, self._coordinates)

    def _number(self, value: object) -> Any:
        """Return a readable tensor, or a float."""
        if not isinstance(value, Tensor):
            return float(value)  # type: ignore[arg-type]
        if not is_readable(value):
            raise TypeError(f"a tensor of {value.dtype}")
        return value
