"""What exists between `set_monitor` and `close` for a model of torch: step loop, dumps, replays, witness."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainermon.core.config import MonitorConfig
from trainermon.core.topology import RunIdentity
from trainermon.core.values import Coordinates
from trainermon.hooks.guard import FaultGuard
from trainermon.monitor.environment.accelerator import describe_accelerator
from trainermon.monitor.environment.kept_settings import kept_settings
from trainermon.monitor.gradient_probe.readings import GradientReader
from trainermon.monitor.gradient_probe.run_signs import RunSigns
from trainermon.monitor.session.attached_rank import AttachedRank
from trainermon.monitor.session.checks import check_against_model
from trainermon.monitor.session.dump_origin import DumpOrigin
from trainermon.monitor.session.dumps import RankDumps
from trainermon.monitor.session.step_loop import RankParts, StepLoop
from trainermon.monitor.session.structure import FOLDER as STRUCTURE_FOLDER
from trainermon.monitor.session.witness import RankWitness
from trainermon.monitor.taps.training import Training
from trainermon.statistics.kernel import kernel_name

_READABLE = (torch.strided, torch.sparse_coo)


class AttachedTraining(AttachedRank):
    """The monitor of one training of torch on one rank: hooks, files and agent.

    Args:
        run: The run.
        coordinates: The rank's position in the job.
        config: The configuration.
        training: How the framework's model and optimizer are watched.
        groups: Process groups by purpose, as the user gave them.
    """

    _guard: FaultGuard

    def __init__(
        self,
        run: RunIdentity,
        coordinates: Coordinates,
        config: MonitorConfig,
        training: Training,
        groups: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(run, coordinates, config, FaultGuard)
        origin = DumpOrigin(run, coordinates, training, self._files.outbox, config.dump_source)
        self._parts = RankParts(
            training=training,
            groups=groups or {},
            guard=self._guard,
            journal=self._files.journal,
            page=self._files.page,
            dumps=RankDumps(origin, journal=self._files.journal, page=self._files.page),
            structure=partial(self._files.outbox.parcel, f"{STRUCTURE_FOLDER}/rank{coordinates.rank}"),
            signs=partial(
                RunSigns, partial(GradientReader, training, coordinates), coordinates, self._files.outbox, run.attempt
            ),
        )
        self._witness = RankWitness(self._files.directory, coordinates.rank, config.hang, self._parts.groups)

    def stop_in_child(self) -> None:
        """Stop monitoring in a forked child: the run, and its open dumps, are its parent's."""
        super().stop_in_child()
        self._parts.dumps.ordered.stop_in_child()
        self._witness.stop_in_child()

    def _make_loop(self, *, num_micro_steps: int, step: int) -> StepLoop:
        return StepLoop(
            self._parts,
            self._config,
            step=step,
            num_micro_steps=num_micro_steps,
            between_steps=self._between_steps,
            has_news=self._has_news,
        )

    def _described(self) -> Training:
        return self._parts.training

    def _environment(self) -> Mapping[str, Any]:
        return kept_settings(self._parts.training.roots, self._parts.training.optimizer)

    def _accelerator(self) -> Mapping[str, Any] | None:
        return describe_accelerator(parameter.tensor for parameter in self._parts.training.parameters)

    def _kernel(self) -> str:
        return kernel_name(self._parts.training.device)

    def _checked(self, config: MonitorConfig) -> MonitorConfig:
        return check_against_model(config, self._parts.training, self._coordinates)

    def _number(self, value: object) -> Tensor | float:
        """Return a readable tensor, or a float."""
        if not isinstance(value, Tensor):
            return float(value)  # type: ignore[arg-type]
        if value.device.type == "meta" or value.layout not in _READABLE or value.is_quantized or value.is_nested:
            raise TypeError(f"a tensor that is {value.layout}, {value.dtype}, on {value.device}")
        return value

    def _has_news(self) -> bool:
        return self._witness.has_news or super()._has_news()

    def _between_steps(self, step: int) -> None:
        self._witness.notice_groups()
        super()._between_steps(step)

    def _poll_commands(self, step: int, epoch: int) -> None:
        self._parts.dumps.poll_commands(step, epoch)
        super()._poll_commands(step, epoch)

    def _close_files(self) -> None:
        self._witness.close()
        super()._close_files()
