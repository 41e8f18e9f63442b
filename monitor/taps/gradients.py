"""Weight gradients: of each micro step, accumulated before reduction, and reduced but not yet clipped."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.guard import Guard
from trainermon.monitor.taps.micro_steps import MicroSteps
from trainermon.monitor.values import Kind, Placement, SeriesKey

logger = logging.getLogger("trainermon")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Parameter:
    """A parameter as this rank holds it: its plain name, the tensor, and how it relates to the whole."""

    name: str
    tensor: nn.Parameter
    placement: Placement
    stage: int = 0

    def key(self, kind: Kind, micro_step: int | None = None) -> SeriesKey:
        """Return the key of this parameter's series of `kind`."""
        return SeriesKey(kind, self.name, micro_step=micro_step, stage=self.stage)


class GradientTaps:
    """Takes the gradients of `parameters`.

    With `is_reduced` (data parallel) a hook on each parameter sees its accumulated gradient just before the reducer
    does; without it the unreduced gradient is the reduced one, and no hook is needed. A parameter without a gradient
    has no row.
    """

    def __init__(
        self, parameters: Sequence[Parameter], collector: Collector, *, is_reduced: bool, micro_steps: int, guard: Guard
    ) -> None:
        self._parameters = parameters
        self._collector = collector
        self._is_reduced = is_reduced
        self._num_micro_steps = micro_steps
        self._guard = guard
        self._handles: list[RemovableHandle] = []
        self._taken_reduced = False
        self._warned = False
        table = collector.table
        self.reduced = [table.id_of(p.key(Kind.GRAD_REDUCED), p.placement) for p in parameters]
        self._unreduced = [table.id_of(p.key(Kind.GRAD_UNREDUCED), p.placement) for p in parameters]

    def attach(self, steps: MicroSteps, *, per_micro_step: bool) -> None:
        """Put a hook on each parameter where its gradient must be seen before the reducer."""
        for index, parameter in enumerate(self._parameters):
            if self._is_reduced:
                seen = functools.partial(self._accumulated, steps, index)
                handle = parameter.tensor.register_post_accumulate_grad_hook(self._guard.wrap(seen))  # type: ignore[no-untyped-call]
                self._handles.append(handle)
            if per_micro_step:
                hook = functools.partial(self._of_micro_step, steps, parameter)
                handle = parameter.tensor.register_hook(self._guard.wrap(hook))  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def detach(self) -> None:
        """Take every hook away again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def new_step(self) -> None:
        """Forget what was taken for the last step."""
        self._taken_reduced = False

    def backward_ended(self, backward: int) -> None:
        """Take the reduced gradients, before any clipping, if this backward (from 0) is the last of the step."""
        if backward + 1 >= self._num_micro_steps:
            self._take_reduced()

    def at_optimizer_entry(self, backwards: int) -> None:
        """Take the gradients now if no backward ended as the last one of the step: then they may be clipped already."""
        if self._taken_reduced:
            return
        self._take_reduced()
        if backwards and not self._warned:
            self._warned = True
            logger.warning(
                "a step had %d backward passes but grad_acc_steps is %d: its gradients were read at the optimizer "
                "step, after any clipping; pass the right grad_acc_steps to set_monitor",
                backwards,
                self._num_micro_steps,
            )

    def _take_reduced(self) -> None:
        present = [index for index, p in enumerate(self._parameters) if p.tensor.grad is not None]
        first = self._collector.take(
            [self.reduced[index] for index in present],
            [_dense(self._parameters[index].tensor.grad) for index in present],
        )
        self._taken_reduced = first >= 0
        if not self._is_reduced and first >= 0:
            for row, index in enumerate(present, start=first):
                self._collector.share(self._unreduced[index], row)

    def _accumulated(self, steps: MicroSteps, index: int, tensor: Tensor) -> None:
        if not self._collector.muted and steps.backward + 1 >= self._num_micro_steps:
            self._collector.take((self._unreduced[index],), (_dense(tensor.grad),))
        steps.arm()

    def _of_micro_step(self, steps: MicroSteps, parameter: Parameter, gradient: Tensor) -> None:
        if not self._collector.muted:
            key = parameter.key(Kind.GRAD_UNREDUCED, micro_step=steps.backward)
            self._collector.take((self._collector.table.id_of(key, parameter.placement),), (_dense(gradient),))


def _dense(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient
