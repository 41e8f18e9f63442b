"""Where a step's forwards and backwards begin and end, seen from the root module and from the parameters.

"Reduced" gradients are those at the end of the last backward, after whatever the framework's reducer does there and
before the user clips. The end is a callback that is queued from within a callback: it then runs behind those that the
reducer queued itself. The first one is queued from the gradient of the root's output, so that the nested backwards of
reentrant checkpointing are not taken for the end, or from a parameter where the root was not entered by a call. Only a
backward that reached a parameter's `.grad` counts: `torch.autograd.grad` does not.

A micro step is what ends with a backward. All forwards before it belong to it: a discriminator sees real and fake
samples, a siamese net two views. In a pipeline each forward is a micro step of its own: they pass in order, but several
may be under way at a time. Every virtual pipeline stage counts for itself.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainermon.hooks.guard import FaultGuard
from trainermon.hooks.tensor_hooks import hook_gradient
from trainermon.hooks.tracing import is_traced
from trainermon.hooks.tree import tensors_of
from trainermon.monitor.taps.training import TapHandle, Training

# Forwards before one backward that are looked at: a root that is called for every token would make series without end.
MAX_FORWARDS = 64
_ENGINE = torch.autograd.Variable._execution_engine
_BACKWARD = operator.attrgetter("backward")


class _StageProgress:
    """How far one virtual pipeline stage is in the open step, and how many passes it has made in all.

    `forward` is the micro step of the last forward, `pending` how many forwards of it there were, `forwards` a number
    that is different for each micro step of the run.
    """

    __slots__ = ("backward", "backwards", "depth", "forward", "forwards", "pending")

    def __init__(self) -> None:
        self.forwards = self.backwards = 0
        self.new_step()

    def new_step(self) -> None:
        self.forward, self.backward, self.depth, self.pending = -1, 0, 0, 0

    def forward_begins(self, *, is_pipelined: bool) -> None:
        if is_pipelined or not self.pending:
            self.forwards += 1
            self.pending = 0
        self.forward = self.forward + 1 if is_pipelined else self.backward
        self.pending += 1

    def backward_ended(self) -> None:
        self.backward += 1
        self.backwards += 1
        self.pending = 0


class MicroSteps:
    """Counts the forwards and backwards (micro steps) of the open step, and calls back when one begins or has ended.

    Attributes:
        counting: Whether a training forward is running: train mode, grad mode on, not a replay.
        attached: Whether the hooks are in place.
        replaying: Whether a replay runs, in which nothing counts.
        stepping: Whether the optimizer's own step runs, in which nothing counts either.
        expected: How many backwards the open step has: every step's number, unless `expect` said otherwise.
        backward: Number of backwards of the open step that every stage has done.
        has_backward: Whether a backward of the open step has ended, in any stage.
        num_given, num_given_again: How many forwards of the open step were given tensors, by position, and how many of
            them the very ones that the forward before was, as in several steps with one batch.
        in_float16: Whether the last forward ran under float16 autocast, where a loss scaler skips steps by design.
    """

    def __init__(  # noqa: PLR0913  # what it watches, and whom it tells
        self,
        training: Training,
        guard: FaultGuard,
        *,
        num_expected: int,
        on_forward_begin: Callable[[], None],
        on_forward_mode: Callable[[bool], None],
        on_forward_end: Callable[[int, Any], None],
        on_backward_end: Callable[[], None],
    ) -> None:
        self.counting = False
        self.attached = False
        self.backward, self.has_backward = 0, False
        self.replaying = self.stepping = self.in_float16 = False
        self.expected = self._num_expected = num_expected
        self.num_given = self.num_given_again = 0
        self._given: list[tuple[weakref.ref[Tensor], int]] = []  # to the last forward: tensors, and writes to each
        self._training = training
        self._device_type = training.device.type
        self._guard = guard
        self._stages = [_StageProgress() for _ in training.roots]
        self._armed = False
        self._reached: set[int] = set()
        self._handles: list[TapHandle] = []
        self._awaiting: list[TapHandle] = []
        self._has_come = False
        self._on_forward_begin = on_forward_begin
        self._on_forward_mode = on_forward_mode
        self._on_forward_end = on_forward_end
        self._on_backward_end = on_backward_end
        self._arm_hook = guard.wrap(self._arm)
        self._behind_reducer = guard.wrap(self._queue_behind_reducer)
        self._end = guard.wrap(self._end_of_backward)

    @property
    def muted(self) -> bool:
        """Whether forwards and backwards are not counted now."""
        return self.replaying or self.stepping

    @property
    def is_complete(self) -> bool:
        """Whether the backward that has just ended was the step's last one."""
        told = self._training.tells_last()
        return self.backward >= self.expected if told is None else told

    def is_last(self, stage: int) -> bool:
        """Return whether the backward that runs in `stage` is the step's last one."""
        told = self._training.tells_last()
        return self._stages[stage].backward + 1 >= self.expected if told is None else told

    def expect(self, number: int) -> None:
        """Set that the open step has `number` backwards, and those after it as many as usual."""
        self.expected = number

    def micro_step(self, stage: int, *, recomputing: bool = False) -> int:
        """Return the number of the micro step of the forward that runs or ran last in `stage`.

        `recomputing`: of the backward that recomputes it, instead.
        """
        found = self._stages[stage]
        return found.backward if recomputing else found.forward

    def serial(self, stage: int, *, recomputing: bool = False) -> int:
        """Return a number that is different for each micro step of `stage`, or for each backward, of the whole run."""
        found = self._stages[stage]
        return found.backwards if recomputing else found.forwards

    def is_crowded(self, stage: int) -> bool:
        """Return whether the micro step has had more than 64 forwards, so that further ones are not recorded."""
        return self._stages[stage].pending > MAX_FORWARDS

    @property
    def has_begun(self) -> bool:
        """Whether a forward or a backward of the open step was seen."""
        return (
            bool(self._reached)
            or self._has_come
            or any(stage.forward >= 0 or stage.backward > 0 for stage in self._stages)
        )

    def await_forward(self) -> bool:
        """Have `has_begun` tell of the next forward of the open step, of which nothing is watched; return whether so.

        It is not where steps are watched, nor where a root was compiled in place: it takes no hooks.
        """
        roots = self._training.roots
        if self.attached or any(root._compiled_call_impl is not None for root in roots):
            return False
        if not self._awaiting:
            self._awaiting.extend(root.register_forward_pre_hook(self._guard.wrap(self._comes)) for root in roots)
        return True

    @property
    def is_thrown_away(self) -> bool:
        """Whether the script has thrown the gradients of the open step away without an optimizer step."""
        return self.has_backward and self._training.gradients_are_gone()

    def attach(self) -> None:
        """Hook the forwards and backwards of the model's roots, unless that is done."""
        if self.attached:
            return
        self.attached = True
        self._handles.extend(self._training.watch_accumulation(self._guard, self._accumulated))
        for stage, root in enumerate(self._training.roots):
            if root._compiled_call_impl is not None:
                continue  # hooks on a module that was compiled in place would be compiled into it
            before = self._guard.wrap(self._before_forward, stage)
            after = self._guard.wrap(self._after_forward, stage)
            self._handles.append(root.register_forward_pre_hook(before))
            self._handles.append(root.register_forward_hook(after, always_call=True))

    def detach(self) -> None:
        """Remove all hooks on forwards and backwards."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.attached = False
        self.new_step()

    def new_step(self) -> None:
        """Reset the counts: an optimizer step has ended."""
        for stage in self._stages:
            stage.new_step()
        self.expected = self._num_expected
        self.backward = 0
        self.counting = self.has_backward = self._armed = self._has_come = False
        self.num_given = self.num_given_again = 0
        self._reached.clear()
        for handle in self._awaiting:
            handle.remove()
        self._awaiting.clear()

    def _comes(self, module: nn.Module, _args: tuple[Any, ...]) -> None:
        self._has_come |= module.training and torch.is_grad_enabled() and not self.muted and not in_backward()

    def _before_forward(self, stage: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.stepping and not self._training.is_stepping():
            self.stepping = False  # an exception ended the step, and the script goes on
        if self.replaying or self.stepping or in_backward() or is_traced():
            self.counting = False
            return
        found = self._stages[stage]
        found.depth += 1
        if found.depth > 1:
            return  # a root that calls itself, as Lightning's modules do under DDP, makes one forward
        if self._armed:
            self._forget_failed()
        self._on_forward_begin()
        self.in_float16 = _is_float16(self._device_type)
        self.counting = module.training and torch.is_grad_enabled()
        self._on_forward_mode(self.counting)
        if self.counting:
            self._note_given(args)
            found.forward_begins(is_pipelined=self._training.is_pipelined)

    def _note_given(self, args: tuple[Any, ...]) -> None:
        # torch makes one weak reference of a tensor, so that the same one is the same tensor
        given = [(weakref.ref(t), 0 if t.is_inference() else t._version) for t in args if isinstance(t, Tensor)]
        if given:
            is_again = len(given) == len(self._given) and all(
                new is old and num_writes == before
                for (new, num_writes), (old, before) in zip(given, self._given, strict=True)
            )
            self.num_given += 1
            self.num_given_again += is_again
        self._given = given

    def _after_forward(self, stage: int, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        found = self._stages[stage]
        found.depth = max(0, found.depth - 1)
        if self.counting and not found.depth:
            self.counting = False
            self._on_forward_end(stage, output)
            for tensor in (output,) if type(output) is Tensor else [tensor for _, tensor in tensors_of(output)]:
                if tensor.grad_fn is not None:
                    hook_gradient(tensor, self._arm_hook)

    def _forget_failed(self) -> None:
        """Forget a backward that ended by an exception: it never came to its end, and its forwards have none."""
        self._armed = False
        self._reached.clear()
        for stage in self._stages:
            stage.pending = 0

    def _accumulated(self, stage: int) -> None:
        if stage not in self._reached and not self.muted:
            self._reached.add(stage)
            self._arm()

    def _arm(self, _gradient: Tensor | None = None) -> None:
        """Ask for a call at the end of the backward that is running now; nothing if one is due already."""
        if not (self._armed or self.replaying or self.stepping):
            self._armed = True
            _ENGINE.queue_callback(self._behind_reducer)

    def _queue_behind_reducer(self) -> None:
        _ENGINE.queue_callback(self._end)

    def _end_of_backward(self) -> None:
        self._armed = False
        if self._reached:
            for stage in self._reached:
                self._stages[stage].backward_ended()
            self._reached.clear()
            self.backward, self.has_backward = min(map(_BACKWARD, self._stages)), True
            self._on_backward_end()


def in_backward() -> bool:
    """Return whether this code runs inside a backward: then a forward is a recomputation. 70 ns."""
    return torch._C._current_graph_task_id() != -1


def _is_float16(device_type: str) -> bool:
    if device_type == "cpu" and not torch._C._is_any_autocast_enabled():  # which takes a third of what follows
        return False
    return torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) is torch.float16
