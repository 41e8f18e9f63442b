"""Where a step's forwards and backwards begin and end, seen from the root module and from the parameters.

"Reduced" gradients are those at the end of the last backward, after whatever the framework's reducer does there and
before the user clips. The end is a callback that is queued from within a callback: it then runs behind those that the
reducer queued itself. The first one is queued from the gradient of the root's output, so that the nested backwards of
reentrant checkpointing are not taken for the end, or from a parameter where the root was not entered by a call. Only a
backward that reached a parameter's `.grad` counts: `torch.autograd.grad` does not.
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
    """Counts the forwards and backwards of the open step, and tells when one begins or has ended.

    Attributes:
        forward: Index of the training forward that runs or ran last; -1 before the first of the step.
        backward: Index of the backward that runs, or of the next one.
        counting: Whether a training forward is running: train mode, grad mode on, not a replay.
        attached: Whether the hooks are in place.
        muted: Whether a replay runs, in which nothing counts.
        in_float16: Whether the last forward ran under float16 autocast, where a loss scaler skips steps by design.
    """

    def __init__(  # noqa: PLR0913  # whom it tells of what
        self,
        roots: Sequence[nn.Module],
        parameters: Sequence[nn.Parameter],
        guard: Guard,
        *,
        on_forward_begin: Callable[[], None],
        on_forward_end: Callable[[], None],
        on_backward_end: Callable[[], None],
    ) -> None:
        self.forward = -1
        self.backward = 0
        self.counting = False
        self.attached = False
        self.muted = self.in_float16 = False
        self._device_type = parameters[0].device.type
        self._armed = False
        self._has_accumulated = False
        self._roots = roots
        self._parameters = parameters
        self._handles: list[RemovableHandle] = []
        self._on_forward_begin = on_forward_begin
        self._on_forward_end = on_forward_end
        self._on_backward_end = on_backward_end
        self._before = guard.wrap(self._before_forward)
        self._after = guard.wrap(self._after_forward)
        self._arm_hook = guard.wrap(self._arm)
        self._accumulated_hook = guard.wrap(self._accumulated)
        self._behind_reducer = guard.wrap(self._queue_behind_reducer)
        self._end = guard.wrap(self._end_of_backward)

    @property
    def has_begun(self) -> bool:
        """Whether a forward or a backward of the open step was seen."""
        return self.forward >= 0 or self.backward > 0 or self._has_accumulated

    def attach(self) -> None:
        """Put the hooks in place; nothing if they are."""
        if self.attached:
            return
        self.attached = True
        for parameter in self._parameters:
            handle = parameter.register_post_accumulate_grad_hook(self._accumulated_hook)  # type: ignore[no-untyped-call]
            self._handles.append(handle)
        first, last = self._roots[0], self._roots[-1]
        if first._compiled_call_impl is None and last._compiled_call_impl is None:
            # hooks on a module that was compiled in place would be compiled into it
            self._handles.append(first.register_forward_pre_hook(self._before))
            self._handles.append(last.register_forward_hook(self._after, always_call=True))

    def detach(self) -> None:
        """Take every hook away again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.attached = False
        self.new_step()

    def new_step(self) -> None:
        """Start counting from zero: an optimizer step has ended."""
        self.forward, self.backward = -1, 0
        self.counting = self._armed = self._has_accumulated = False

    def _before_forward(self, module: nn.Module, _args: tuple[Any, ...]) -> None:
        if self.muted or in_backward():
            self.counting = False
            return
        self._armed = False  # a backward that ended by an exception never came to its end
        self._on_forward_begin()
        self.in_float16 = _is_float16(self._device_type)
        self.counting = module.training and torch.is_grad_enabled()
        self.forward += self.counting

    def _after_forward(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if self.counting:
            self.counting = False
            self._on_forward_end()
            for _, tensor in tensors_of(output):
                # reading grad_fn also keeps register_hook from dying of a segmentation fault, see ModuleTaps
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._arm_hook)  # type: ignore[no-untyped-call]

    def _accumulated(self, _parameter: Tensor) -> None:
        if not self.muted:
            self._has_accumulated = True
            self._arm()

    def _arm(self, _gradient: Tensor | None = None) -> None:
        """Ask for a call at the end of the backward that is running now; nothing if one is due already."""
        if not self._armed and not self.muted:
            self._armed = True
            _queue_callback(self._behind_reducer)

    def _queue_behind_reducer(self) -> None:
        _queue_callback(self._end)

    def _end_of_backward(self) -> None:
        self._armed = False
        if self._has_accumulated:
            self._has_accumulated = False
            self._on_backward_end()
            self.backward += 1


def in_backward() -> bool:
    """Return whether this code runs inside a backward: then a forward is a recomputation. 70 ns."""
    return torch._C._current_graph_task_id() != -1


def _is_float16(device_type: str) -> bool:
    return torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) is torch.float16


def _queue_callback(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)
