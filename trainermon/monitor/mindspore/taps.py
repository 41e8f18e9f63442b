"""What a due step takes: activations and their gradients, gradients of parameters, parameters, optimizer states."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from mindspore import Tensor

from trainermon.core.catalogue import EVAL_MODE_SERIES, LEARNING_RATE_SERIES, LOSS_SCALE_SERIES
from trainermon.core.config import MonitorConfig
from trainermon.core.values import Kind, SeriesKey
from trainermon.dump.mindspore.tensors import as_array
from trainermon.hooks.containment import PlainFaultGuard
from trainermon.hooks.mindspore import hooks
from trainermon.hooks.names import chosen
from trainermon.monitor.mindspore.micro_steps import CellSteps, is_differentiated
from trainermon.monitor.mindspore.rates import learning_rates
from trainermon.monitor.mindspore.training import CellParameter, CellTraining, WatchedCell, placement_of
from trainermon.monitor.mindspore.updates import UpdateTaps
from trainermon.monitor.taps.row_collector import RowCollector
from trainermon.statistics.mindspore.moments import Rows, is_readable

MEMORY = 4
"""A cell's output is its parent's output and the next cell's input: a short memory is enough not to read it again."""

MAX_CALLS = 64
"""Calls of a cell within a micro step that are collected."""


class _TappedCell:
    """A cell, and how often it was called in which micro step."""

    __slots__ = ("calls", "cell", "micro_step")

    def __init__(self, cell: WatchedCell) -> None:
        self.cell = cell
        self.micro_step = self.calls = -1


class _ReadTensor:
    """A tensor that was read just now: its row, and the series that its gradient will have."""

    __slots__ = ("gradient_series", "row", "tensor", "version")

    def __init__(self, tensor: Tensor, row: int) -> None:
        self.tensor = tensor
        self.version = tensor._version
        self.row = row
        self.gradient_series: list[int] = []


class ActivationTaps:
    """Records the statistics of inputs and outputs of cells in training forwards, and of the gradients of both.

    The gradient of an input is that of the tensor, summed over all that use it. Recomputed forwards are not counted.

    Attributes:
        num_seen: Calls of cells seen since `attach`.
    """

    def __init__(
        self, cells: Sequence[WatchedCell], collector: RowCollector, steps: CellSteps, guard: PlainFaultGuard
    ) -> None:
        self._watched = [_TappedCell(cell) for cell in cells]
        self._collector = collector
        self._steps = steps
        self._guard = guard
        self._handles: list[hooks.HookHandle] = []
        self._seen: list[_ReadTensor] = []
        self._forward = self._backward = self._several = True
        self.num_seen = 0

    def attach(self, *, forward: bool, backward: bool, micro_steps: int) -> None:
        """Hook each cell; `forward` and `backward` say what is recorded."""
        self._forward, self._backward, self._several = forward, backward, micro_steps > 1
        for watched in self._watched:
            self._handles.append(hooks.before(watched.cell.cell, self._guard.wrap(self._enters, watched)))
            self._handles.append(hooks.behind(watched.cell.cell, self._guard.wrap(self._leaves, watched)))

    def detach(self) -> None:
        """Remove all hooks on cells."""
        for handle in self._handles:
            handle.remove()
        self.new_step()
        self._handles.clear()

    def new_step(self) -> None:
        """Release what belongs to the step that has ended."""
        self._seen.clear()
        for watched in self._watched if self._handles else ():
            watched.micro_step = -1

    def forget_seen(self) -> None:
        """Release the tensors that were read last."""
        self._seen.clear()

    def _enters(self, watched: _TappedCell, cell: Any, args: tuple[Any, ...]) -> None:
        if not self._counts(watched, cell):
            return
        micro_step = self._steps.micro_step(watched.cell.stage)
        if watched.micro_step != micro_step:
            watched.micro_step, watched.calls = micro_step, -1
        watched.calls += 1
        self.num_seen += 1
        self._look_at(watched, "input", args)

    def _leaves(self, watched: _TappedCell, cell: Any, _args: Any, output: Any) -> None:
        if self._counts(watched, cell):
            self._look_at(watched, "output", output)

    def _counts(self, watched: _TappedCell, cell: Any) -> bool:
        is_counted = self._steps.counting and is_differentiated() and cell is watched.cell.cell
        return is_counted and watched.calls < MAX_CALLS

    def _look_at(self, watched: _TappedCell, side: str, value: Any) -> None:
        for path, tensor in tensors_of(value):
            if is_readable(tensor):
                self._look(watched, side + (path or ".0"), tensor)

    def _look(self, watched: _TappedCell, slot: str, tensor: Tensor) -> None:
        seen = next((each for each in self._seen if each.tensor is tensor and each.version == tensor._version), None)
        if seen is None:
            seen = _ReadTensor(tensor, -1)
            self._seen.append(seen)
            del self._seen[:-MEMORY]
        if self._forward:
            series = self._number(watched, Kind.ACTV, slot, tensor)
            if seen.row < 0:
                seen.row = self._collector.take((series,), (tensor,))
            else:
                self._collector.share(series, seen.row)
        if self._backward and tensor.is_floating_point():
            if not seen.gradient_series:
                hooks.on_gradient(tensor, self._guard.wrap(self._gradient, seen.gradient_series))
            seen.gradient_series.append(self._number(watched, Kind.ACTV_GRAD, slot, tensor))

    def _gradient(self, series: Sequence[int], gradient: Tensor) -> None:
        if self._handles and is_readable(gradient):
            row = self._collector.take((series[0],), (gradient,))
            for number in series[1:]:
                self._collector.share(number, row)

    def _number(self, watched: _TappedCell, kind: Kind, slot: str, tensor: Tensor) -> int:
        micro_step = watched.micro_step if self._several else None
        key = SeriesKey(kind, watched.cell.name, slot, watched.calls, micro_step, watched.cell.stage)
        return self._collector.table.id_of(key, placement_of(tensor))


class OptimizerTaps:
    """Records gradients, parameters and states around the optimizer's step, of chosen parameters.

    Args:
        training: Whose.
        config: Which.
        collector: Takes the rows.
        guard: Contains errors of the hooks of single backwards.
        is_alone: Whether no other rank holds a share of the gradients: what is reduced is also unreduced then.
        micro_steps: Backwards per step. Of several there is no unreduced gradient of the step, only of each backward.
    """

    def __init__(  # noqa: PLR0913  # what it watches, and whom it tells
        self,
        training: CellTraining,
        config: MonitorConfig,
        collector: RowCollector,
        guard: PlainFaultGuard,
        *,
        is_alone: bool,
        micro_steps: int,
    ) -> None:
        self._training = training
        self._config = config
        self._collector = collector
        self._guard = guard
        self._chosen = [i for i, p in enumerate(training.parameters) if chosen(p.name, config.targets, p.stage)]
        self._series: dict[tuple[Kind, str], list[int]] = {}
        self._unreduced = self._numbers(Kind.GRAD_UNREDUCED) if is_alone and config.wg_distribution else []
        self._reduced = self._numbers(Kind.GRAD_REDUCED) if config.wg_distribution else []
        self._keeps_local = config.wg_distribution and not is_alone and micro_steps == 1
        self._updates = UpdateTaps(training, self._chosen, collector) if config.ur_distribution else None
        self._handles: list[hooks.HookHandle] = []
        self._backwards: dict[int, int] = {}
        self._was_eval = False

    @property
    def gradients(self) -> list[int]:
        """The numbers of the series of the reduced gradients."""
        return self._reduced

    def attach(self) -> None:
        """Hook the gradients of single backwards, if they are asked for, or are reduced before the optimizer's call."""
        if self._config.monitor_mbs_grad or self._keeps_local:
            for i in self._chosen:
                parameter = self._training.parameters[i]
                self._handles.append(hooks.on_gradient(parameter.tensor, self._guard.wrap(self._added, parameter)))

    def detach(self) -> None:
        """Remove all hooks on parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def new_step(self) -> None:
        """Begin to count the backwards of a new step."""
        self._backwards.clear()

    def before_step(self, gradients: Sequence[Any]) -> None:
        """Record what the optimizer was called with, and the parameters that it is about to change."""
        if self._config.wg_distribution:
            self._take_gradients(gradients)
        if self._config.mg_direction:
            self._take_directions(gradients)
        if self._config.param_distribution:
            self._take_all(Kind.PARAM_ORIGIN, [each.tensor for each in self._training.parameters])

    def put_rows(self, gradients: Rows, parameters: Rows | None) -> None:
        """Record rows that a compiled step has kept: of its gradients, and of the parameters before it."""
        if self._config.wg_distribution:
            rows = gradients[self._chosen]
            self._collector.repeat(self._reduced, rows)
            self._collector.repeat(self._unreduced, rows[: len(self._unreduced)])
        if self._config.param_distribution and parameters is not None:
            self._collector.repeat(self._numbers(Kind.PARAM_ORIGIN), parameters[self._chosen])

    def after_step(self) -> None:
        """Record the parameters, states and updates that the optimizer's step has made, and the numbers of the step."""
        if self._config.param_distribution:
            self._take_all(Kind.PARAM_UPDATED, [each.tensor for each in self._training.parameters])
        if self._config.mv_distribution:
            for state in self._training.states():
                self._take_all(state.kind, state.tensors, state.slot)
        if self._updates is not None:
            self._updates.take()
        self.take_numbers()

    def take_numbers(self) -> None:
        """Record learning rates, loss scale and whether the model was in evaluation mode."""
        for group, rate in enumerate(learning_rates(self._training.optimizer)):
            if rate is None:
                continue
            series = self._collector.table.id_of(SeriesKey(Kind.STEP, LEARNING_RATE_SERIES, str(group)))
            if isinstance(rate, Tensor):
                self._collector.take((series,), (rate,))
            else:
                self._collector.put(series, float(rate))
        is_eval = not any(root.training for root in self._training.roots)
        self._was_eval |= is_eval
        numbers = {
            LOSS_SCALE_SERIES: self._training.loss_scale(),
            EVAL_MODE_SERIES: float(is_eval) if self._was_eval else None,
        }
        for name, number in numbers.items():
            if number is not None:
                self._collector.put(self._collector.table.id_of(SeriesKey(Kind.STEP, name)), number)

    def _take_gradients(self, gradients: Sequence[Any]) -> None:
        found = [gradients[i] for i in self._chosen] if len(self._chosen) < len(gradients) else gradients
        series, unreduced = self._reduced, self._unreduced
        if not all(isinstance(gradient, Tensor) for gradient in found):  # None, or one of rows only
            there = [n for n, gradient in enumerate(found) if isinstance(gradient, Tensor)]
            found, series = [found[n] for n in there], [series[n] for n in there]
            unreduced = [unreduced[n] for n in there] if unreduced else []
        if found:
            first = self._collector.take(series, found)
            for row, number in enumerate(unreduced, start=first):
                self._collector.share(number, row)

    def _take_directions(self, gradients: Sequence[Any]) -> None:
        """Record per element 1 where gradient and first moment have the same sign, 0 where opposite, else 1/2.

        The moment is the one that the steps before have made; one that is all zeros, as at first, has no row.
        """
        moments = self._training.first_moments()
        for i, number in zip(self._chosen, self._numbers(Kind.MG_DIRECTION), strict=True):
            if isinstance(gradients[i], Tensor) and (moment := as_array(moments[i])).any():
                self._collector.repeat([number], direction_row(as_array(gradients[i]), moment)[None])

    def _take_all(self, kind: Kind, tensors: Sequence[Any], slot: str = "") -> None:
        series = self._series.get((kind, slot))
        if series is None:
            series = self._series[kind, slot] = self._numbers(kind, slot, tensors)
        self._collector.take(series, [tensors[i] for i in self._chosen])

    def _numbers(self, kind: Kind, slot: str = "", tensors: Sequence[Any] | None = None) -> list[int]:
        parameters, table = self._training.parameters, self._collector.table
        return [
            table.id_of(
                parameters[i].key(kind, slot), parameters[i].owned if tensors is None else placement_of(tensors[i])
            )
            for i in self._chosen
        ]

    def _added(self, parameter: CellParameter, gradient: Tensor) -> None:
        micro_step = self._backwards.get(id(parameter), 0)
        self._backwards[id(parameter)] = micro_step + 1
        numbers = [None] * self._keeps_local + [micro_step] * self._config.monitor_mbs_grad
        keys = [parameter.key(Kind.GRAD_UNREDUCED, micro_step=number) for number in numbers]
        first, *others = [self._collector.table.id_of(key, parameter.owned) for key in keys]
        row = self._collector.take((first,), (gradient,))
        for series in others:
            self._collector.share(series, row)


def direction_row(gradient: npt.NDArray[Any], moment: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the eight moments of (sign(gradient) · sign(moment) + 1) / 2, float64 `[8]`; a NaN in either is one."""
    products = np.sign(gradient).astype(np.float32) * np.sign(moment).astype(np.float32)
    nans = int(np.isnan(products).sum())
    same, opposite = int((products > 0).sum()), int((products < 0).sum())
    even = products.size - nans - same - opposite
    values = [value for value, count in ((0.0, opposite), (0.5, even), (1.0, same)) if count] or [math.inf, -math.inf]
    return np.array([products.size, values[0], values[-1], same + even / 2, same + even / 4, opposite, nans, 0.0])


def tensors_of(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in what a cell takes or returns, each with its path (`.0`, `.1.key`); "" for a lone tensor."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_of(item, f"{path}.{key}")
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from tensors_of(item, f"{path}.{index}")
