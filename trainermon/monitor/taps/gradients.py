"""Weight gradients: of each micro step, accumulated before reduction, and reduced but not yet clipped."""

from __future__ import annotations

import logging
import operator
import statistics
import time
from collections.abc import Sequence

from torch import Tensor, nn

from trainermon.core.catalogue import GRADIENT_AT_STEP
from trainermon.core.values import Kind, SeriesKey
from trainermon.hooks.guard import ContainedCall, FaultGuard
from trainermon.hooks.tensor_hooks import hook_accumulated
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.micro_steps import MicroSteps
from trainermon.monitor.taps.training import GradientVersion, TapHandle, Training

logger = logging.getLogger("trainermon")

NOT_CHOSEN = -1
REPLACED = 0.5  # for how often a gradient was written to: clipping is a whole number of writes
_NONE, _NEEDS_GRADIENT = type(None), operator.attrgetter("tensor.requires_grad")
CHANGED = (
    "the script changes gradients between the last backward and the optimizer's step otherwise than by clipping all: "
    "grad_reduced, and the norm that is made of it, show them as the backward left them, gradient_at_step as the "
    "optimizer uses them"
)
WORTH_A_HOOK_BYTES = 1 << 16
"""From which size on a gradient is read when it becomes final: a smaller one is read from memory in less time than its
hook takes, so it is read with the others, in one call at the end of the backward."""
REDUCER_WAIT = SeriesKey(Kind.COMM, "dp.reducer", "wait_seconds")
"""How long backwards of a step waited, after all gradients were there, for a reducer that waits inside of them."""


class GradientTaps:
    """Records the statistics of the gradients of chosen parameters, before and after their reduction.

    Where gradients are reduced over ranks, the framework reports what this rank accumulated just before that; elsewhere
    the unreduced gradient is the reduced one. A parameter without a gradient has no row.

    Args:
        training: Whose gradients.
        indices: Positions of the parameters in `training.parameters`.
        collector: Takes the rows.
        steps: Knows which micro step runs.
        guard: Contains errors of the hooks.

    Attributes:
        reduced: The numbers of the series of the reduced gradients.
    """

    def __init__(
        self,
        training: Training,
        indices: Sequence[int],
        collector: Collector,
        steps: MicroSteps,
        *,
        guard: FaultGuard,
    ) -> None:
        self._training = training
        self._indices = indices
        self._collector = collector
        self._steps = steps
        self._guard = guard
        self._handles: list[TapHandle] = []
        self._is_taken = False
        self._is_mixed = False
        self._warned: set[str] = set()
        table, parameters = collector.table, training.parameters
        self._reduced = [NOT_CHOSEN] * len(parameters)
        self._unreduced = [NOT_CHOSEN] * len(parameters)
        training.look_for_changes()  # finds out what the optimizer does not step
        self._without_series = {*indices}
        self._late = training.reduced_by_script
        for i in indices:
            self._unreduced[i] = table.id_of(parameters[i].key(Kind.GRAD_UNREDUCED), parameters[i].placement)
        self._takes_all = len(indices) == len(parameters)
        self._accumulated_s = self._waited_s = 0.0
        self._taken_when_final: set[int] = set()
        self._of_micro_step: dict[tuple[int, int], int] = {}
        self._versions: list[GradientVersion] = []
        self._missing: frozenset[int] | None = None

    @property
    def reduced(self) -> list[int]:
        """The numbers of the series of the reduced gradients: of parameters that the optimizer steps."""
        return [self._reduced[i] for i in self._indices if self._reduced[i] != NOT_CHOSEN]

    @property
    def just_read(self) -> Sequence[int]:
        """By parameter, the numbers of the series of reduced gradients whose rows this step has; empty: none yet."""
        return self._reduced if self._is_taken else ()

    @property
    def missing(self) -> frozenset[int] | None:
        """Which parameters have no gradient in this step, by position; None where none has one, or none was read."""
        return self._missing

    @property
    def series(self) -> list[int]:
        """The numbers of the series of the unreduced and the reduced gradients."""
        return [self._unreduced[i] for i in self._indices] + self.reduced

    def attach(self, *, per_micro_step: bool) -> None:
        """Hook gradients before they are reduced, and with `per_micro_step` those of each backward."""
        if self._training.reduces:
            see = self._accumulated_at if self._training.waits_in_backward else self._accumulated
            watching = self._training.watch_unreduced(self._guard, see)
            self._handles.extend(watching)
            if not watching and "unreduced" not in self._warned:
                self._warned.add("unreduced")
                logger.warning(
                    "%s reduces gradients in every backward: there are none that are accumulated and not yet reduced, "
                    "so grad_unreduced stays empty; monitor_mbs_grad shows those of each backward",
                    self._training.framework,
                )
        elif self._training.final_when_accumulated and not self._others_hook():
            self._handles.extend(self._watch_final())
        if per_micro_step:
            self._handles.extend(self._training.watch_micro_gradients(self._guard, self._added))

    def detach(self) -> None:
        """Remove all hooks on gradients."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def new_step(self) -> None:
        """Release what belongs to the step that has ended."""
        self._is_taken = self._is_mixed = False
        self._accumulated_s = self._waited_s = 0.0
        self._taken_when_final.clear()
        self._versions = []
        self._missing = None

    def backward_ended(self, gradients: Sequence[Tensor | None] | None) -> None:
        """Record the reduced gradients, before any clipping; None if this was not the step's last backward.

        Not where they are read at the entry of the optimizer step.
        """
        if self._accumulated_s and self._training.is_reduced_now():
            self._waited_s += time.perf_counter() - self._accumulated_s
            self._collector.put(self._collector.table.id_of(REDUCER_WAIT), self._waited_s)
        if gradients is not None:
            self._take_reduced(self._chosen(gradients, late=False) if self._late else gradients)
            self._versions = self._training.gradient_versions()
        elif self._training.is_reduced_now():
            self._is_mixed = True
            self._warn_once(
                "gradients are averaged over ranks before the step's last micro step (no no_sync(), or a step of fewer "
                "micro steps than grad_acc_steps), so an accumulated gradient of this rank alone does not exist: "
                "grad_unreduced is left out of such steps; monitor_mbs_grad shows each micro step's"
            )

    def complete(self, *, is_clipped: bool = True) -> None:
        """Record the gradients now, unless that was done at the end of the step's last backward.

        Where gradients were read now because `grad_acc_steps` is wrong, warn once. A gradient that was read before and
        that the script has changed since otherwise than clipping does gets a second row, and the log says so once: one
        that was replaced, or written to, but not as often as most. Where there is none of these, all that were
        written to, unless `is_clipped`: clipping may explain it.

        Gradients that only the script can reduce are always read now.
        """
        self._take_written(is_clipped=is_clipped)
        if self._is_taken:
            if self._late:
                self._take_reduced(self._chosen(self._training.reduced_gradients(), late=True))
            return
        if not self._take_reduced(self._training.reduced_gradients()):
            return
        if self._training.reads_at_entry or self._late.issuperset(self._indices):
            return
        self._warn_once(
            f"a step had {self._steps.backward} backward passes that were seen, but grad_acc_steps is "
            f"{self._steps.expected}: its gradients were read at the optimizer step, after any clipping; if as many "
            "are meant, look for zero_grad() or step() between them, else pass the right grad_acc_steps to set_monitor"
        )

    def _take_reduced(self, gradients: Sequence[Tensor | None]) -> bool:
        """Take those of the gradients that were not taken when they became final; return whether any is there."""
        if self._taken_when_final and self._others_hook():
            self._taken_when_final.clear()  # they may have changed it since
        if self._without_series:
            self._number_trained()
        gradients = self._of_trained(gradients)
        reduced, unreduced = self._reduced, self._unreduced
        missing: frozenset[int] = frozenset()
        if not self._takes_all or self._taken_when_final or _NONE in {*map(type, gradients)}:
            present = [i for i in self._indices if gradients[i] is not None and i not in self._taken_when_final]
            if len(present) + len(self._taken_when_final) < len(self._indices):
                missing = frozenset(i for i in self._indices if gradients[i] is None)
            if not present:
                self._is_taken = self._take_late() or bool(self._taken_when_final)
                return self._is_taken
            reduced, unreduced = [reduced[i] for i in present], [unreduced[i] for i in present]
            gradients = [gradients[i] for i in present]
        first = self._collector.take(reduced, gradients)
        self._is_taken = first >= 0
        self._missing = missing if self._missing is None else self._missing & missing
        self._take_late()
        if not self._training.reduces:
            self._collector.share_all(unreduced, first, gradients)
        return self._is_taken

    def _chosen(self, gradients: Sequence[Tensor | None], *, late: bool) -> list[Tensor | None]:
        """Return those that only the script can reduce, or the others; None in the places of the rest."""
        return [gradient if (i in self._late) is late else None for i, gradient in enumerate(gradients)]

    def _take_late(self) -> bool:
        """Take the gradients of what is trained only since the parameters were listed; nothing if some are left out.

        Returns whether there are any.
        """
        late = [held for held in self._training.late if self._takes_all and held.tensor.grad is not None]
        late = [held for held in late if held.tensor.requires_grad]
        for held in late:
            series = self._collector.table.id_of(held.key(Kind.GRAD_REDUCED), held.placement)
            self._collector.take((series,), (held.tensor.grad,))
        return bool(late)

    def _number_trained(self) -> None:
        """Give a series to the gradients of parameters that are trained for the first time.

        What is frozen, or stepped by another optimizer, has none, so that nobody misses its gradient.
        """
        for i in self._without_series - self._training.unstepped:
            parameter = self._training.parameters[i]
            if parameter.tensor.requires_grad:
                self._reduced[i] = self._collector.table.id_of(parameter.key(Kind.GRAD_REDUCED), parameter.owned)
        self._without_series = {i for i in self._without_series if self._reduced[i] == NOT_CHOSEN}

    def _of_trained(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the gradients without those that were left behind in parameters that are frozen now."""
        held = self._training.parameters
        if False not in map(_NEEDS_GRADIENT, held):
            return gradients
        return [gradient if held[i].tensor.requires_grad else None for i, gradient in enumerate(gradients)]

    def _take_written(self, *, is_clipped: bool) -> None:
        before, self._versions = self._versions, []
        if not before or not self._is_taken:
            return
        versions = zip(self._training.gradient_versions(), before, strict=True)
        writes = [new[1] - old[1] if new[0] is old[0] else REPLACED for new, old in versions]
        if not any(writes):
            return
        gradients = self._training.reduced_gradients()
        changed = self._changed(writes, gradients, is_clipped=is_clipped)
        if not changed:
            return
        table, parameters = self._collector.table, self._training.parameters
        series = [table.id_of(parameters[i].key(Kind.STATE, GRADIENT_AT_STEP), parameters[i].owned) for i in changed]
        self._collector.take(series, [gradients[i] for i in changed])
        if CHANGED not in self._warned:
            self._warned.add(CHANGED)
            self._collector.tell(CHANGED)

    def _changed(self, writes: Sequence[float], gradients: Sequence[Tensor | None], *, is_clipped: bool) -> list[int]:
        """Return which gradients were changed otherwise than by clipping, by how often each was written to."""
        sharers = self._training.gradient_sharers()
        passes = {i: writes[i] / sharers[i] for i in self._indices if gradients[i] is not None and i not in self._late}
        usual = statistics.mode(passes.values()) if passes else 0
        changed = [i for i, number in passes.items() if number % 1 or number not in (0, usual)]
        return changed if changed or is_clipped else [i for i, number in passes.items() if number]

    def _watch_final(self) -> list[TapHandle]:
        parameters = self._training.parameters
        return [
            hook_accumulated(parameters[i].tensor, self._guard.wrap(self._final, i))
            for i in self._indices
            if _dense_bytes(parameters[i].tensor) >= WORTH_A_HOOK_BYTES
        ]

    def _others_hook(self) -> bool:
        """Return whether the script has hooks of its own that may change a gradient after it was accumulated."""
        for i in self._indices:
            hooks = self._training.parameters[i].tensor._post_accumulate_grad_hooks or {}
            if any(not isinstance(hook, ContainedCall) for hook in hooks.values()):
                return True
        return False

    def _final(self, index: int, parameter: nn.Parameter) -> None:
        if self._steps.muted or parameter.grad is None or not self._is_last(index) or self._is_foreign(index):
            return
        if self._without_series:
            self._number_trained()
        row = self._collector.take((self._reduced[index],), (parameter.grad,))
        self._collector.share(self._unreduced[index], row, parameter.grad)
        if row >= 0:
            self._taken_when_final.add(index)

    def _is_foreign(self, index: int) -> bool:
        return index in self._training.unstepped

    def _is_last(self, index: int) -> bool:
        return self._steps.is_last(self._training.parameters[index].stage)

    def _accumulated_at(self, index: int, gradient: Tensor) -> None:
        self._accumulated_s = time.perf_counter()
        self._accumulated(index, gradient)

    def _accumulated(self, index: int, gradient: Tensor) -> None:
        series = self._unreduced[index]
        if (
            series == NOT_CHOSEN
            or self._is_mixed
            or self._steps.muted
            or self._is_foreign(index)
            or index in self._late
        ):
            return
        if self._training.unreduced_once or self._is_last(index):
            self._collector.take((series,), (gradient,))

    def _added(self, index: int, gradient: Tensor) -> None:
        if self._unreduced[index] == NOT_CHOSEN or self._steps.muted or self._is_foreign(index):
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


def _dense_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; `nbytes` is not defined where it is sparse."""
    return tensor.numel() * tensor.element_size()
