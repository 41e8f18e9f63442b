"""Weight gradients: of each micro step, accumulated before reduction, and reduced but not yet clipped."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.guard import Guard
from trainermon.monitor.taps.micro_steps import MicroSteps
from trainermon.monitor.taps.training import Handle, Training
from trainermon.monitor.values import Kind

logger = logging.getLogger("trainermon")

NOT_CHOSEN = -1


class GradientTaps:
    """Takes the gradients of the parameters that `indices` chooses.

    Where gradients are reduced over ranks, the framework reports what this rank accumulated just before that; elsewhere
    the unreduced gradient is the reduced one. A parameter without a gradient has no row.

    Args:
        training: Whose gradients.
        indices: Which of `training.parameters`.
        collector: Where rows go.
        steps: Which micro step runs.
        micro_steps: Backwards per step.
        guard: Contains the hooks.
    """

    def __init__(  # noqa: PLR0913  # what it reads from and writes to
        self,
        training: Training,
        indices: Sequence[int],
        collector: Collector,
        steps: MicroSteps,
        *,
        micro_steps: int,
        guard: Guard,
    ) -> None:
        self._training = training
        self._indices = indices
        self._collector = collector
        self._steps = steps
        self._num_micro_steps = micro_steps
        self._guard = guard
        self._handles: list[Handle] = []
        self._is_taken = False
        self._is_mixed = False
        self._warned: set[str] = set()
        table, parameters = collector.table, training.parameters
        self._reduced = [NOT_CHOSEN] * len(parameters)
        self._unreduced = [NOT_CHOSEN] * len(parameters)
        for i in indices:
            self._reduced[i] = table.id_of(parameters[i].key(Kind.GRAD_REDUCED), parameters[i].owned)
            self._unreduced[i] = table.id_of(parameters[i].key(Kind.GRAD_UNREDUCED), parameters[i].placement)
        self._of_micro_step: dict[tuple[int, int], int] = {}

    @property
    def reduced(self) -> list[int]:
        """The series of the reduced gradients."""
        return [self._reduced[i] for i in self._indices]

    def attach(self, *, per_micro_step: bool) -> None:
        """Have gradients reported before they are reduced, and with `per_micro_step` those of each backward."""
        if self._training.reduces:
            self._handles.extend(self._training.watch_unreduced(self._guard, self._accumulated))
        if per_micro_step:
            self._handles.extend(self._training.watch_micro_gradients(self._guard, self._added))

    def detach(self) -> None:
        """Take every hook away again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def new_step(self) -> None:
        """Forget what was taken for the last step."""
        self._is_taken = self._is_mixed = False

    def backward_ended(self) -> None:
        """Take the reduced gradients, before any clipping, if this backward was the last of the step."""
        if self._training.reads_at_entry:
            return
        if self._steps.backward >= self._num_micro_steps:
            self._take_reduced()
        elif self._training.is_reduced_now():
            self._is_mixed = True
            self._warn_once(
                "gradients are averaged over ranks in every micro step (no no_sync()), so an accumulated gradient of "
                "this rank alone does not exist: grad_unreduced is left out; monitor_mbs_grad shows each micro step's"
            )

    def complete(self) -> None:
        """Take the gradients now, unless they were taken at the end of the step's last backward."""
        if self._is_taken or not self._take_reduced() or self._training.reads_at_entry:
            return
        self._warn_once(
            f"a step had {self._steps.backward} backward passes that were seen, but grad_acc_steps is "
            f"{self._num_micro_steps}: its gradients were read at the optimizer step, after any clipping; pass the "
            "right grad_acc_steps to set_monitor"
        )

    def _take_reduced(self) -> bool:
        gradients = self._training.reduced_gradients()
        present = [i for i in self._indices if gradients[i] is not None]
        if not present:
            return False
        first = self._collector.take([self._reduced[i] for i in present], [gradients[i] for i in present])  # type: ignore[misc]
        self._is_taken = first >= 0
        if not self._training.reduces:
            for row, i in enumerate(present, start=first):
                self._collector.share(self._unreduced[i], row)
        return self._is_taken

    def _accumulated(self, index: int, gradient: Tensor) -> None:
        series = self._unreduced[index]
        if series == NOT_CHOSEN or self._is_mixed or self._collector.muted:
            return
        stage = self._training.parameters[index].stage
        is_last = self._steps.micro_step(stage, recomputing=True) + 1 >= self._num_micro_steps
        if is_last or self._training.unreduced_once:
            self._collector.take((series,), (gradient,))

    def _added(self, index: int, gradient: Tensor) -> None:
        if self._unreduced[index] == NOT_CHOSEN or self._collector.muted:
            return
        parameter = self._training.parameters[index]
        micro_step = self._steps.micro_step(parameter.stage, recomputing=True)
        series = self._of_micro_step.get((index, micro_step))
        if series is None:
            key = parameter.key(Kind.GRAD_UNREDUCED, micro_step=micro_step)
            series = self._collector.table.id_of(key, parameter.placement)
            self._of_micro_step[index, micro_step] = series
        self._collector.take((series,), (gradient,))

    def _warn_once(self, message: str) -> None:
        if message[:20] not in self._warned:
            self._warned.add(message[:20])
            logger.warning(message)
