"""Inputs and outputs of modules, and the gradients of both, without changing a bit of the run.

Gradients are seen by tensor hooks on the very tensors that flow: a full backward hook or an alias would change the
order in which gradients are added, that is, the run. An input's gradient is therefore that of the tensor, summed over
all its consumers.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainermon.core.values import Kind, Placement, SeriesKey
from trainermon.hooks.guard import FaultGuard
from trainermon.hooks.tensor_hooks import hook_gradient
from trainermon.hooks.tree import tensors_of
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.compiled_regions import register
from trainermon.monitor.taps.micro_steps import MAX_FORWARDS, MicroSteps, in_backward
from trainermon.monitor.taps.training import TapHandle, WatchedModule

logger = logging.getLogger("trainermon")

# A module's output is its parent's output and the next module's input: a short memory is enough not to read it again.
MEMORY = 4


class _TappedModule:
    """A module's series numbers, and how often it was called in which pass: forwards, recomputed forwards."""

    __slots__ = ("calls", "module", "passes", "series")

    def __init__(self, module: WatchedModule) -> None:
        self.module = module
        self.calls = [-1, -1]
        self.passes = [-1, -1]
        self.series: dict[tuple[Kind, str, str, int, int | None], int] = {}


class _SeenTensor:
    """A tensor that was looked at just now: its row, and the series that its gradient will have.

    It is not kept alive: the memory of an activation is for others as soon as it would be without a monitor.
    """

    __slots__ = ("gradient_series", "row", "tensor", "version")

    def __init__(self, tensor: Tensor, row: int = -1) -> None:
        self.tensor = weakref.ref(tensor)
        self.version = _version_of(tensor)
        self.row = row
        self.gradient_series: list[int] = []


class ModuleTaps:
    """Records the statistics of inputs and outputs of `modules` in training forwards, and of the gradients of both.

    Calls of one module within a micro step are told apart by number, also where the root itself is called several times
    (the first 64 times; the log says so once if there are more). Evaluation and recomputation are not counted. A tensor
    that cannot be read (quantized, on the meta device, inside vmap) has no row, and the log says so once.

    Attributes:
        reads_recomputed: Whether what modules return first in a recomputation is read, too.
        num_seen: Calls of modules seen since `attach`.
        called_outside: A module that trained while no forward of the model ran; "" if none did.
    """

    def __init__(
        self, modules: Sequence[WatchedModule], collector: Collector, steps: MicroSteps, guard: FaultGuard
    ) -> None:
        self._watched = [_TappedModule(module) for module in modules]
        self._collector = collector
        self._steps = steps
        self._guard = guard
        self._handles: list[TapHandle] = []
        self._leaf_handles: dict[tuple[int, int], list[RemovableHandle]] = {}
        self._seen: list[_SeenTensor] = []
        self._seen_gradients: list[_SeenTensor] = []
        self._unreadable: set[str] = set()
        self._forward = self._backward = True
        self.reads_recomputed = False
        self.num_seen = 0
        self.called_outside = ""
        self._several_micro_steps = self._is_crowd_told = False

    def attach(self, *, forward: bool, backward: bool, micro_steps: int) -> None:
        """Attach a hook before and after each module; `forward` and `backward` say what is recorded."""
        self._forward, self._backward, self._several_micro_steps = forward, backward, micro_steps > 1
        self.num_seen = 0
        for watched in self._watched:
            module = watched.module.module
            before = self._guard.wrap(self._before, watched)
            behind = self._guard.wrap(self._behind, watched)
            self._handles += register(module, before, behind)

    def detach(self) -> None:
        """Remove all hooks on modules."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.new_step()

    def forget_seen(self) -> None:
        """Forget the tensors that were read last, after a forward."""
        self._seen.clear()
        self._seen_gradients.clear()

    def reset(self) -> None:
        """Forget the tensors that were read last, and remove the hooks on leaves whose backward has ended."""
        self.forget_seen()
        ended = [key for key in self._leaf_handles if key[1] < self._steps.serial(key[0], recomputing=True)]
        for key in ended:
            for handle in self._leaf_handles.pop(key):
                handle.remove()

    def new_step(self) -> None:
        """Release all that belongs to the step that has ended."""
        self.forget_seen()
        for handles in self._leaf_handles.values():
            for handle in handles:
                handle.remove()
        self._leaf_handles.clear()

    def _before(
        self, watched: _TappedModule, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        recomputing = not self._steps.counting
        if self._is_passed_over(watched, recomputing=recomputing):
            return
        serial = self._steps.serial(watched.module.stage, recomputing=recomputing)
        if watched.passes[recomputing] != serial:
            watched.passes[recomputing], watched.calls[recomputing] = serial, -1
        watched.calls[recomputing] += 1
        self.num_seen += 1
        if len(args) == 1 and isinstance(args[0], Tensor):
            self._look(watched, "input", ".0", args[0], recomputing=recomputing)
        else:
            self._look_at_all(watched, "input", tensors_of(args), recomputing=recomputing)
        if kwargs:
            self._look_at_all(watched, "input", tensors_of(kwargs), recomputing=recomputing)

    def _behind(self, watched: _TappedModule, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        recomputing = not self._steps.counting
        if self._is_passed_over(watched, recomputing=recomputing):
            return
        if isinstance(output, Tensor):
            self._look(watched, "output", ".0", output, recomputing=recomputing)
        else:
            self._look_at_all(watched, "output", tensors_of(output), recomputing=recomputing)

    def _is_passed_over(self, watched: _TappedModule, *, recomputing: bool) -> bool:
        if recomputing and (self._steps.muted or not in_backward()):
            if torch.is_grad_enabled() and not self._steps.muted and watched.module.module.training:
                self.called_outside = self.called_outside or watched.module.name
            return True
        if not self._steps.is_crowded(watched.module.stage):
            return False
        if not self._is_crowd_told:
            self._is_crowd_told = True
            self._collector.tell(
                f"the model was called more than {MAX_FORWARDS} times before one backward: the activations of its "
                f"first {MAX_FORWARDS} calls are collected"
            )
        return True

    def _look_at_all(
        self, watched: _TappedModule, side: str, found: Iterable[tuple[str, Tensor]], *, recomputing: bool
    ) -> None:
        for path, tensor in found:
            self._look(watched, side, path, tensor, recomputing=recomputing)

    def _look(self, watched: _TappedModule, side: str, path: str, tensor: Tensor, *, recomputing: bool) -> None:
        call = watched.calls[recomputing]
        seen = _find(self._seen, tensor)
        if seen is None:
            seen = _SeenTensor(tensor)
            self._seen.append(seen)
            del self._seen[:-MEMORY]
        if self._forward and (not recomputing or self._reads_again(side, path, call)):
            kind = Kind.ACTV_RECOMPUTED if recomputing else Kind.ACTV
            series = self._number(watched, kind, (side, path, call), tensor, recomputing=recomputing)
            if seen.row < 0:
                seen.row = self._take(series, tensor)
            else:
                self._collector.share(series, seen.row, tensor)
        if not (self._backward and tensor.requires_grad and torch.is_grad_enabled()):
            return
        if seen.gradient_series or self._hook(watched, tensor, seen.gradient_series, recomputing=recomputing):
            number = self._number(watched, Kind.ACTV_GRAD, (side, path, call), tensor, recomputing=recomputing)
            seen.gradient_series.append(number)

    def _reads_again(self, side: str, path: str, call: int) -> bool:
        """Return whether a tensor of a recomputation is read; which call it repeats is known of the only one."""
        return self.reads_recomputed and side == "output" and path == ".0" and call == 0

    def _hook(self, watched: _TappedModule, tensor: Tensor, series: list[int], *, recomputing: bool) -> bool:
        """Have the gradient of a tensor recorded as `series`; False if torch does not tell the tensor's history.

        It does not of one of several views of what was written to since.
        """
        try:
            is_leaf = tensor.grad_fn is None
        except RuntimeError:
            return False
        hook = self._guard.wrap(self._gradient, series)
        if is_leaf:  # the hook of any other tensor goes with its graph
            handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
            self._keep_until_backward(watched.module.stage, handle, recomputing=recomputing)
        else:
            hook_gradient(tensor, hook)
        return True

    def _keep_until_backward(self, stage: int, handle: RemovableHandle, *, recomputing: bool) -> None:
        """Have the hook taken away when the backward of the micro step that runs has ended."""
        ended = self._steps.serial(stage, recomputing=True)
        ahead = 0 if recomputing else self._steps.micro_step(stage) - self._steps.micro_step(stage, recomputing=True)
        self._leaf_handles.setdefault((stage, ended + ahead), []).append(handle)

    def _gradient(self, series: list[int], gradient: Tensor | None) -> None:
        if gradient is None or self._steps.muted:  # None: another output of the same node was used, not this one
            return
        seen = _find(self._seen_gradients, gradient)
        if seen is None:
            seen = _SeenTensor(gradient, self._take(series[0], gradient))
            self._seen_gradients.append(seen)
            del self._seen_gradients[:-MEMORY]
        for number in series:
            self._collector.share(number, seen.row, gradient)

    def _take(self, series: int, tensor: Tensor) -> int:
        try:
            return self._collector.take((series,), (tensor,))
        except (TypeError, ValueError, RuntimeError) as error:  # what torch says of a tensor of an unusual kind
            key = self._collector.table.keys[series]
            name = f"{key.name}.{key.slot}"
            if name not in self._unreadable:
                self._unreadable.add(name)
                logger.warning("%s has no statistics: %s: %s", name, type(error).__name__, error)
            return -1

    def _number(
        self, watched: _TappedModule, kind: Kind, which: tuple[str, str, int], tensor: Tensor, *, recomputing: bool
    ) -> int:
        side, path, call = which
        stage = watched.module.stage
        micro_step = self._steps.micro_step(stage, recomputing=recomputing) if self._several_micro_steps else None
        short = (kind, side, path, call, micro_step)
        number = watched.series.get(short)
        if number is None:
            slot = side + (path or ".0")
            key = SeriesKey(kind, watched.module.name, slot, call, micro_step, stage)
            number = watched.series[short] = self._collector.table.id_of(key, _placement_of(tensor))
        return number


def _placement_of(tensor: Tensor) -> Placement | None:
    """Return a placement with shape and dtype alone; None where the shape is no fixed one.

    No other rank has this data: its elements count.
    """
    if tensor.is_nested:
        return None  # one with strides has no shape to ask for
    shape = tuple(tensor.shape)
    if any(type(length) is not int for length in shape):
        return None
    return Placement(dtype=str(tensor.dtype).removeprefix("torch."), shape=shape)


def _find(memory: list[_SeenTensor], tensor: Tensor) -> _SeenTensor | None:
    for seen in memory:
        if seen.tensor() is tensor:
            return seen if seen.version == _version_of(tensor) else None
    return None


def _version_of(tensor: Tensor) -> tuple[float, int]:
    """Return how often `tensor` was written to, and where its elements are, which `tensor.data = …` changes alone.

    NaN, equal to nothing, is the count of one that does not count (inference mode); one without memory of its own is at
    0. A write through `.data` into the same memory leaves no trace.
    """
    try:
        place = tensor.data_ptr()
    except RuntimeError:  # sparse, nested, fake
        place = 0
    # a new object each time: tuples hold the very same NaN to be equal to itself
    return float("nan") if tensor.is_inference() else tensor._version, place
