"""Where the forwards and backwards of a step begin and end, as far as Python sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore.graph.api import _pynative_executor

from trainermon.hooks.containment import PlainFaultGuard
from trainermon.hooks.mindspore import hooks
from trainermon.monitor.mindspore.training import CellTraining

is_differentiated: Callable[[], bool] = _pynative_executor.requires_grad
"""Returns whether the forward that runs will have a backward. A cell's `training` says nothing of that: it is False
until `set_train`, which many scripts do without. Private; 0.3 µs."""


class CellSteps:
    """Counts the training forwards and the backwards of the open step.

    MindSpore says nothing of a backward; the hook of one parameter is called once in each.

    Args:
        training: What is watched.
        guard: Contains errors of the hooks.
        num_expected: Backwards per optimizer step.
        on_forward: Called with whether the model is in training mode, before each forward.
        on_output: Called with stage and output after each training forward.

    Attributes:
        expected: Backwards of the open step.
        backward: Backwards seen in it.
        counting: Whether a training forward runs: what is called outside of one is recomputation, or the script's.
    """

    def __init__(
        self,
        training: CellTraining,
        guard: PlainFaultGuard,
        *,
        num_expected: int,
        on_forward: Callable[[bool], None],
        on_output: Callable[[int, Any], None],
    ) -> None:
        self._training = training
        self._guard = guard
        self._num_usual = num_expected
        self._on_forward = on_forward
        self._on_output = on_output
        self._forwards = 0
        self._handles: list[hooks.HookHandle] = []
        self.expected = num_expected
        self.backward = 0
        self.counting = False

    def attach(self) -> None:
        """Hook the roots and one parameter."""
        for stage, root in enumerate(self._training.roots):
            self._handles.append(hooks.before(root, self._guard.wrap(self._begins)))
            self._handles.append(hooks.behind(root, self._guard.wrap(self._ends, stage)))
        first = self._training.parameters[0].tensor
        self._handles.append(hooks.on_gradient(first, self._guard.wrap(self._backward_reached)))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.counting = False

    def new_step(self) -> None:
        """Begin to count anew."""
        self._forwards = self.backward = 0
        self.expected = self._num_usual

    def micro_step(self, stage: int) -> int:
        """Return the number of the micro step whose forward runs."""
        del stage
        return min(self.backward, self.expected - 1)

    @property
    def has_begun(self) -> bool:
        """Whether a forward or a backward of the open step was seen."""
        return self._forwards > 0 or self.backward > 0

    def await_forward(self) -> bool:
        """Return False: the roots are hooked on all steps, or not at all."""
        return False

    @property
    def is_thrown_away(self) -> bool:
        """Whether all backwards of the step have ended, and another forward begins without an optimizer step."""
        return self.backward >= self.expected

    def _begins(self, cell: Any, _args: Any) -> None:
        self.counting = is_differentiated()
        self._on_forward(self.counting or cell.training)
        self._forwards += self.counting

    def _ends(self, stage: int, _cell: Any, _args: Any, output: Any) -> None:
        if self.counting:
            self._on_output(stage, output)
        self.counting = False

    def _backward_reached(self, _gradient: Any) -> None:
        self.backward += 1
