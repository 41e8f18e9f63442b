"""Weight gradients: of each micro step, accumulated before reduction, and reduced but not yet clipped."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence

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

    Where gradients are reduced (data parallel) a hook on each parameter sees its accumulated gradient just before the
    reducer does; elsewhere the unreduced gradient is the reduced one. A parameter without a gradient has no row.

    Args:
        parameters: Whose gradients.
        collector: Where rows go.
        reduces_now: Whether a backward that ends now was reduced; None where nothing is reduced.
        micro_steps: Backwards per step.
        guard: Contains the hooks.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        collector: Collector,
        *,
        reduces_now: Callable[[], bool] | None,
        micro_steps: int,
        guard: Guard,
    ) -> None:
        self._parameters = parameters
        self._collector = collector
        self._reduces_now = reduces_now
        self._num_micro_steps = micro_steps
        self._guard = guard
        self._handles: list[RemovableHandle] = []
        self._taken_reduced = False
        self._mixed = False
        self._warned: set[str] = set()
        table = collector.table
        self.reduced = [table.id_of(p.key(Kind.GRAD_REDUCED), p.placement) for p in parameters]
        self._unreduced = [table.id_of(p.key(Kind.GRAD_UNREDUCED), p.placement) for p in parameters]

    def attach(self, steps: MicroSteps, *, per_micro_step: bool) -> None:
        """Put a hook on each parameter where its gradient must be seen before the reducer."""
        for index, parameter in enumerate(self._parameters):
            if self._reduces_now is not None:
                seen = self._guard.wrap(functools.partial(self._accumulated, steps, index))
                handle = parameter.tensor.register_post_accumulate_grad_hook(seen)  # type: ignore[no-untyped-call]
                self._handles.append(handle)
            if per_micro_step:
                hook = self._guard.wrap(functools.partial(self._of_micro_step, steps, parameter))
                self._handles.append(parameter.tensor.register_hook(hook))  # type: ignore[no-untyped-call]

    def detach(self) -> None:
        """Take every hook away again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def new_step(self) -> None:
        """Forget what was taken for the last step."""
        self._taken_reduced = self._mixed = False

    def backward_ended(self, backward: int) -> None:
        """Take the reduced gradients, before any clipping, if this backward (from 0) is the last of the step."""
        if backward + 1 >= self._num_micro_steps:
            self._take_reduced()
        elif self._reduces_now is not None and self._reduces_now():
            self._mixed = True
            self._warn_once(
                "gradients are averaged over ranks in every micro step (no no_sync()), so an accumulated gradient of "
                "this rank alone does not exist: grad_unreduced is left out; monitor_mbs_grad shows each micro step's"
            )

    def complete(self, backwards: int) -> None:
        """Take the gradients now if no backward ended as the last one of the step: then they may be clipped already."""
        if not self._taken_reduced and self._take_reduced():
            self._warn_once(
                f"a step had {backwards} backward passes that were seen, but grad_acc_steps is "
                f"{self._num_micro_steps}: its gradients were read at the optimizer step, after any clipping; pass the "
                "right grad_acc_steps to set_monitor"
            )

    def are_gone(self) -> bool:
        """Return whether no parameter has a gradient: `zero_grad` was called. Usually looks at one parameter only."""
        return all(parameter.tensor.grad is None for parameter in self._parameters)

    def _take_reduced(self) -> bool:
        present = [index for index, p in enumerate(self._parameters) if p.tensor.grad is not None]
        if not present:
            return False
        gradients = [self._parameters[index].tensor.grad for index in present]
        first = self._collector.take([self.reduced[index] for index in present], gradients)  # type: ignore[arg-type]
        self._taken_reduced = first >= 0
        if self._reduces_now is None:
            for row, index in enumerate(present, start=first):
                self._collector.share(self._unreduced[index], row)
        return self._taken_reduced

    def _accumulated(self, steps: MicroSteps, index: int, tensor: Tensor) -> None:
        if not self._mixed and steps.backward + 1 >= self._num_micro_steps and tensor.grad is not None:
            self._collector.take((self._unreduced[index],), (tensor.grad,))

    def _of_micro_step(self, steps: MicroSteps, parameter: Parameter, gradient: Tensor | None) -> None:
        if gradient is not None and not self._collector.muted:
            key = parameter.key(Kind.GRAD_UNREDUCED, micro_step=steps.backward)
            self._collector.take((self._collector.table.id_of(key, parameter.placement),), (gradient,))

    def _warn_once(self, message: str) -> None:
        if message[:20] not in self._warned:
            self._warned.add(message[:20])
            logger.warning(message)
