"""Where a step's forwards and backwards begin and end, seen from the root module.

"Reduced" gradients are those at the end of the last backward, after whatever the framework's reducer does there and
before the user clips. The end is a callback that is queued from within a callback: it then runs behind those that the
reducer queued itself. The first one is queued from the gradient of the root's output, so that the nested backwards of
reentrant checkpointing are not taken for the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainermon.monitor.taps.guard import Guard
from trainermon.monitor.taps.tree import tensors_of


class MicroSteps:
    """Counts the forwards and backwards of the open step, and tells when a backward has ended.

    Attributes:
        forward: Index of the training forward that runs or ran last; -1 before the first of the step.
        backward: Index of the backward that runs, or of the next one.
        counting: Whether a training forward is running: train mode, grad mode on, not a replay.
        attached: Whether the hooks are in place.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        guard: Guard,
        *,
        on_forward_end: Callable[[], None],
        on_backward_end: Callable[[], None],
    ) -> None:
        self.forward = -1
        self.backward = 0
        self.counting = False
        self.attached = False
        self.muted = False
        self._armed = False
        self._roots = roots
        self._handles: list[RemovableHandle] = []
        self._on_forward_end = on_forward_end
        self._on_backward_end = on_backward_end
        self._before = guard.wrap(self._before_forward)
        self._after = guard.wrap(self._after_forward)
        self._arm = guard.wrap(self.arm)
        self._behind_reducer = guard.wrap(self._queue_behind_reducer)
        self._end = guard.wrap(self._end_of_backward)

    def attach(self) -> None:
        """Put the hooks in place; nothing if they are."""
        if self.attached:
            return
        first, last = self._roots[0], self._roots[-1]
        self._handles = [
            first.register_forward_pre_hook(self._before),
            last.register_forward_hook(self._after, always_call=True),
        ]
        self.attached = True

    def detach(self) -> None:
        """Take every hook away again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.attached = self.counting = self._armed = False

    def new_step(self) -> None:
        """Start counting from zero: an optimizer step has ended."""
        self.forward, self.backward = -1, 0
        self.counting = self._armed = False

    def arm(self, _gradient: Tensor | None = None) -> None:
        """Ask for a call at the end of the backward that is running now; nothing if one is due already."""
        if not self._armed and not self.muted:
            self._armed = True
            _queue_callback(self._behind_reducer)

    def _before_forward(self, module: nn.Module, _args: tuple[Any, ...]) -> None:
        self.counting = module.training and torch.is_grad_enabled() and not self.muted and not in_backward()
        if self.counting:
            self.forward += 1

    def _after_forward(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if self.counting:
            self.counting = False
            self._on_forward_end()
            for _, tensor in tensors_of(output):
                if tensor.requires_grad:
                    _ = tensor.grad_fn  # see ModuleTaps: without it register_hook may die of a segmentation fault
                    tensor.register_hook(self._arm)  # type: ignore[no-untyped-call]

    def _queue_behind_reducer(self) -> None:
        _queue_callback(self._end)

    def _end_of_backward(self) -> None:
        self._armed = False
        self._on_backward_end()
        self.backward += 1


def in_backward() -> bool:
    """Return whether this code runs inside a backward: then a forward is a recomputation. 70 ns."""
    return torch._C._current_graph_task_id() != -1


def _queue_callback(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)
