"""What every feature has in common: it looks at one module, once per step, and no fault of it leaves it."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainermon.core.values import Kind, SeriesKey
from trainermon.hooks.guard import FaultGuard
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.micro_steps import MicroSteps
from trainermon.monitor.taps.training import TapHandle, WatchedModule

logger = logging.getLogger("trainermon")


class Feature(abc.ABC):
    """Base class of features: numbers computed of one module in a step, beyond its tensors' statistics.

    It is taken in the module's first training forward of a step, neither in evaluation nor in recomputation. Where it
    cannot be computed the log says so once and the feature is not taken any more.
    """

    def __init__(self, module: WatchedModule, collector: Collector, steps: MicroSteps) -> None:
        self.module = module
        self._collector = collector
        self._steps = steps
        self._is_taken = self._is_off = False
        self._series: dict[str, int] = {}

    @abc.abstractmethod
    def attach(self, guard: FaultGuard) -> list[TapHandle]:
        """Hook the module; return handles that remove the hooks."""

    def detach(self) -> None:  # noqa: B027  # most features have nothing open
        """Drop what was seen of a forward that runs now."""

    def new_step(self) -> None:
        """Drop what was seen in the last step."""
        self._is_taken = False

    def at_exit(self) -> None:  # noqa: B027  # most features are complete by then
        """Record what is known only at the end of the step; here nothing."""

    @property
    def _is_due(self) -> bool:
        return self._counts and not self._is_taken

    @property
    def _counts(self) -> bool:
        return self._steps.counting and not self._is_off and not self._collector.muted

    def _look(self, compute: Callable[..., Any], tensor: Tensor, *rest: Any) -> None:
        """Call `compute(tensor, *rest)` without gradients and autocast; give the feature up if that is not possible."""
        try:
            # an autocast that is on would have float32 products computed in half precision
            with torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
                compute(tensor.detach(), *rest)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, reason: str) -> None:
        if not self._is_off:
            self._is_off = True
            logger.warning("%s of %s is not taken: %s", type(self).__name__, self.module.name, reason)

    def _take(self, name: str, tensor: Tensor) -> None:
        self._collector.take((self._number(name),), (tensor,))

    def _number(self, name: str) -> int:
        number = self._series.get(name)
        if number is None:
            key = SeriesKey(Kind.FEATURE, self.module.name, name, stage=self.module.stage)
            number = self._series[name] = self._collector.table.id_of(key)
        return number


def _held(module: nn.Module, name: str) -> Any:
    """Return what `module` holds under `name`, and run no code of its own."""
    for holder in (module._parameters, module._buffers, module._modules, vars(module)):
        if name in holder:
            return holder[name]
    return None


def matrix_of(module: nn.Module) -> Tensor | None:
    """Return the weight matrix of a module (`weight`, `wg`, or that of a module `wg`) as it is now, on this rank.

    None if it has none, or one that is computed whenever it is asked for (a parametrization: asking may draw random
    numbers or move a power iteration on); of a DTensor, the local shard. Where a framework has taken it apart it may be
    empty.
    """
    found = _held(module, "weight")
    if not isinstance(found, Tensor):
        found = _held(module, "wg")
        found = _held(found, "weight") if isinstance(found, nn.Module) else found
    if not isinstance(found, Tensor):
        return None
    shape = getattr(found, "ds_shape", found.shape)  # what ZeRO-3 has taken apart keeps its shape there
    if len(shape) != 2:
        return None
    local: Tensor = found.to_local() if hasattr(found, "to_local") else found
    return local
