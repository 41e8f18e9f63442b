"""Parameters that require no gradient, and change all the same when the optimizer steps or between its steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainermon.core.catalogue import FROZEN_MOVED
from trainermon.core.schedule import DueSteps
from trainermon.core.values import Kind, Placement, SeriesKey
from trainermon.hooks.names import plain_name
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.loop.loop_taps import LoopTap
from trainermon.monitor.taps.training import Training

_MOST = 16  # parameters
_SAMPLE = 256  # elements of each


class _Watched(NamedTuple):
    key: SeriesKey
    placement: Placement
    parameter: nn.Parameter
    keeps_gradient: bool  # and the optimizer steps it


class FrozenMoves(LoopTap):
    """Tells of frozen parameters that go on moving: on how many looks in a row, a row of each.

    Two things move them that nobody means. The optimizer steps what has kept a gradient, if only zeros: momentum and
    weight decay go on. And the script multiplies all parameters by a factor below 1, as weight decay by hand does.
    Whatever else is written to them is meant: an average of other weights, running statistics, a code book.

    On the steps on which checksums are due 256 elements of up to 16 of them are looked at, before and after the step,
    and before the next one that is collected; those that have a gradient come first, others are spread over the model.
    Some 50 µs each; nothing waits for the device.

    Args:
        training: Whose parameters; nothing is looked at where the model does not keep them (`keeps_parameters`).
        collector: Takes the rows.
        due: On which steps.
    """

    looks_for = "frozen parameters that move"

    def __init__(self, training: Training, collector: Collector, due: DueSteps) -> None:
        self._training, self._collector, self._due = training, collector, due
        self._watched: list[_Watched] = []
        self._before: list[Tensor] = []
        self._after: list[Tensor] = []
        self._in_a_row: dict[SeriesKey, Tensor] = {}

    def at_entry(self, step: int) -> None:
        """Compare with what the last look has left, and look before this step, if it is due."""
        if self._after:
            self._compare()
        self._watched, self._before, self._after = [], [], []
        if self._training.keeps_parameters and not self._collector.muted and self._due.include(step):
            self._watched = self._chosen()
            self._before = [_sample(watched.parameter) for watched in self._watched]

    def step_ended(self) -> None:
        """Look after the step."""
        if self._before:
            self._after = [_sample(watched.parameter) for watched in self._watched]

    def _compare(self) -> None:
        series, values = [], []
        for watched, before, after in zip(self._watched, self._before, self._after, strict=True):
            key, placement, parameter, keeps_gradient = watched
            if parameter.requires_grad:
                continue
            moved = _is_shrunk(after, _sample(parameter), torch.finfo(parameter.dtype).eps)
            if keeps_gradient:
                moved |= (before != after).any()
            count = (self._in_a_row.get(key, 0.0) + moved.double()) * moved
            self._in_a_row[key] = count
            series.append(self._collector.table.id_of(key, placement))
            values.append(count)
        if series:
            self._collector.take(series, values)

    def _chosen(self) -> list[_Watched]:
        found = [*self._frozen()]
        kept = [watched for watched in found if watched.keeps_gradient]
        others = [watched for watched in found if not watched.keeps_gradient]
        return (kept[:_MOST] + others[:: max(1, len(others) // _MOST)])[:_MOST]

    def _frozen(self) -> Iterator[_Watched]:
        groups = getattr(self._training.optimizer, "param_groups", ())
        stepped = {id(parameter) for group in groups for parameter in group["params"]}
        usual = self._training.parameters[0].placement.replicated_over
        for stage, root in enumerate(self._training.roots):
            for name, p in root.named_parameters():
                if p.requires_grad or not p.is_floating_point() or not p.numel() or not p.is_contiguous():
                    continue
                dtype = str(p.dtype).removeprefix("torch.")
                placement = Placement(dtype=dtype, shape=tuple(p.shape), replicated_over=usual)
                key = SeriesKey(Kind.STATE, plain_name(name), FROZEN_MOVED, stage=stage)
                yield _Watched(key, placement, p, id(p) in stepped and p.grad is not None)


def _sample(parameter: nn.Parameter) -> Tensor:
    flat = parameter.detach().view(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)][:_SAMPLE].to(torch.float64, copy=True)


def _is_shrunk(before: Tensor, now: Tensor, unit: float) -> Tensor:
    """Return whether all elements were multiplied by one factor below 1, up to rounding; not where all are equal."""
    factor = (before * now).sum() / before.square().sum()
    is_one_factor = ((now - factor * before).abs() <= unit * before.abs()).all()
    return is_one_factor & (factor > 0.5) & (factor < 1.0 - 4.0 * unit) & (before.min() < before.max())
