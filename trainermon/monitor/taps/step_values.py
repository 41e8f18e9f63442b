"""What there is one number of per step: norm, clipping, loss scale, skipped or not, rates and settings of groups."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from trainermon.core.catalogue import (
    BACKWARDS_MISSING_SERIES,
    CLIP_RATIO_SERIES,
    EVAL_MODE_SERIES,
    GLOBAL_NORM_SERIES,
    GROUP_SETTINGS,
    LEARNING_RATE_SERIES,
    LOSS_SCALE_SERIES,
    SKIPPED_SERIES,
)
from trainermon.core.values import STATISTICS, Kind, SeriesKey
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.training import StepOutcome, Training
from trainermon.statistics.kernel import write
from trainermon.statistics.rows import host_rows

# How many of the smallest gradients show how the script clips; several, because one may be zero throughout.
NUM_PROBES = 4
_ROUNDING = 0.01  # a gradient in bfloat16 that is multiplied by a factor below 1 may come out as much larger

_TRAINS = operator.attrgetter("training")
_SQUARES, _NANS = STATISTICS.index("sum_sq"), STATISTICS.index("nans")


class StepValues:
    """Records the numbers of a step from the framework, the optimizer, and one gradient (the probe).

    A number that is a tensor is taken where it is; nothing waits for the device, nothing is communicated. What the
    framework does not tell has no row.

    The clip ratio, what clipping multiplied the gradients by, is `min(1, max_norm / (norm + 1e-6))` where the framework
    tells both, as torch, Megatron and DeepSpeed clip by norm. Where the script clips by itself, a few small gradients
    are the probe: their norm at the entry of the optimizer step over their norm at the end of the backward before; NaN
    if they are all zero. With a loss scaler in the script, what unscales the gradients cannot be told from what clips
    them: then there is no row.

    Attributes:
        is_clipped: Whether clipping may explain what the probe has become, as far as the host knows.
        used: The gradients of the probe that the step uses, by parameter, and their norm; None where not known.
    """

    def __init__(self, training: Training, collector: Collector) -> None:
        self._training = training
        self._collector = collector
        all_of_them = range(len(training.parameters))
        clipped_alone = [i for i in all_of_them if i not in training.reduced_by_script] or all_of_them
        self._by_size = sorted(clipped_alone, key=lambda index: training.parameters[index].tensor.numel())
        self._probe: tuple[dict[int, Tensor], Tensor | float] | None = None
        self._device = training.device
        self._is_on_host = self._device.type == "cpu"
        self._rows = torch.empty((NUM_PROBES, len(STATISTICS)), dtype=torch.float64, device="cpu")
        self._rows_on_host = self._rows.numpy()
        self._ratio: Tensor | float | None = None
        self._was_eval = False
        self._num_missing: int | None = None
        self._settings = GroupSettings()
        self.is_clipped = True
        self.used: tuple[dict[int, Tensor], Tensor | float] | None = None
        self._series: dict[tuple[str, str], int] = {}

    def at_backward_end(self, gradients: Sequence[Tensor | None], series: Sequence[int] = ()) -> None:
        """Compute the norm of a few small gradients (the probe) before the script may clip.

        The last call in a step counts.

        Args:
            gradients: By parameter its reduced gradient.
            series: By parameter the series of its gradient, where all were read just now: then their rows tell.
        """
        found = self._find(self._by_size, gradients)
        read = self._collector.norm([series[i] for i in found]) if series and self._is_on_host else None
        self._probe = (found, self.norm_of(found) if read is None else read) if found else None

    def at_entry(self, *, is_scaled: bool, num_missing: int = 0) -> None:
        """Compute that norm again at the entry of the optimizer step, to measure by what factor the script has clipped.

        Not where `is_scaled`: a loss scaler has changed the gradients too. `num_missing`: how many backwards fewer
        there were than the script has said.
        """
        self._ratio, self.is_clipped, self.used = None, True, None
        if num_missing > 0 or self._num_missing is not None:
            self._num_missing = max(0, num_missing)
        if self._probe is not None and not is_scaled:
            found, before = self._probe
            gradients = self._training.reduced_gradients()
            is_same = all(map(operator.is_, map(gradients.__getitem__, found), found.values()))
            now = found if is_same else self._find([*found], gradients)
            if now.keys() == found.keys():
                after = self.norm_of(now)
                self.used = now, after
                self._ratio, self.is_clipped = _quotient(after, before), _may_be_clipped(after, before)
        self._probe = None

    def at_exit(self, outcome: StepOutcome) -> None:
        """Record gradient norm, clip ratio, loss scale and settings of the step that ended with `outcome`."""
        if outcome.grad_norm is not None:
            self._file(GLOBAL_NORM_SERIES, outcome.grad_norm)
        ratio = _clip_ratio(outcome) if outcome.max_norm else self._ratio
        if ratio is not None:
            self._file(CLIP_RATIO_SERIES, ratio)
        if outcome.loss_scale is not None:
            self._file(LOSS_SCALE_SERIES, outcome.loss_scale)
        if outcome.skipped is not None:
            self._file(SKIPPED_SERIES, float(outcome.skipped))
        for group, rate in enumerate(self._training.learning_rates()):
            self._file(LEARNING_RATE_SERIES, rate, slot=str(group))
        for name, group, value in self._settings.changed(self._training.settings()):
            self._file(name, value, slot=str(group))
        is_eval = not any(map(_TRAINS, self._training.roots))
        self._was_eval |= is_eval
        if self._was_eval:
            self._file(EVAL_MODE_SERIES, float(is_eval))
        if self._num_missing is not None:
            self._file(BACKWARDS_MISSING_SERIES, self._num_missing)
        self._ratio = None

    def new_step(self) -> None:
        """Drop the probe of a step that was abandoned."""
        self._probe = self._ratio = None

    def _find(self, indices: Sequence[int], gradients: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """Return, by index, those of the first few of `indices` that have a gradient on the model's device."""
        device = self._device
        found: dict[int, Tensor] = {}
        for index in indices:
            gradient = gradients[index]
            if gradient is None or gradient.layout is not torch.strided or not gradient.numel():
                continue
            if gradient.device == device:
                found[index] = gradient
                if len(found) == NUM_PROBES:
                    break
        return found

    def norm_of(self, found: dict[int, Tensor]) -> Tensor | float:
        """Return the norm of all these gradients together; a number where they are on the host."""
        tensors = [*found.values()]
        if self._is_on_host:
            write(tensors, self._rows, 0)
            return host_rows.norm(self._rows_on_host, self._rows.data_ptr(), range(len(tensors)))
        rows = torch.empty((len(tensors), len(STATISTICS)), dtype=torch.float64, device=self._device)
        write(tensors, rows, 0)
        square, nans = rows[:, _SQUARES].sum(), rows[:, _NANS].sum()
        return torch.where(nans > 0, torch.nan, square).sqrt()

    def _file(self, name: str, value: Tensor | float, slot: str = "") -> None:
        series = self._series.get((name, slot))
        if series is None:
            series = self._series[name, slot] = self._collector.table.id_of(SeriesKey(Kind.STEP, name, slot))
        if isinstance(value, Tensor):
            self._collector.take((series,), (value,))
        else:
            self._collector.put(series, value)


class GroupSettings:
    """Tells of each group weight decay, betas, epsilon and momentum.

    Only what is new: all in the first step, afterwards what is no longer what it was. No tensor is read; what is one
    has no row. 1 µs a group.
    """

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._known: dict[tuple[str, int], float] = {}

    def changed(self, groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, float]]:
        """Return name of the series, number of the group and value of each setting that has changed."""
        held = [group.get(key) for group in groups for key in _KEYS]
        if len(held) == len(self._held) and all(map(operator.is_, held, self._held)):
            return []
        self._held = held
        found = {(name, number): value for number, group in enumerate(groups) for name, value in _numbers_of(group)}
        before, self._known = self._known, found
        return [(*place, value) for place, value in found.items() if before.get(place) != value]


def _quotient(now: Tensor | float, before: Tensor | float) -> Tensor | float:
    """Return `now / before`, NaN for 0 / 0, as IEEE 754 and torch have it."""
    return now / before if isinstance(before, Tensor) or before else now * math.inf


def _may_be_clipped(now: Tensor | float, before: Tensor | float) -> bool:
    """Return whether clipping may have made `now` of `before`; True where only the device knows."""
    if isinstance(now, Tensor) or isinstance(before, Tensor) or not math.isfinite(before):
        return True
    return now <= before * (1 + _ROUNDING)


def _clip_ratio(outcome: StepOutcome) -> Tensor | float | None:
    """Return the factor of `torch.nn.utils.clip_grad_norm_`; None where norm or limit is not known."""
    norm, limit = outcome.grad_norm, outcome.max_norm
    if norm is None or limit is None:
        return None
    if isinstance(norm, Tensor):
        return (limit / (norm + 1e-6)).clamp(max=1.0)
    return min(1.0, limit / (norm + 1e-6))


_KEYS = tuple(dict.fromkeys(key for key, _ in GROUP_SETTINGS.values()))


def _numbers_of(group: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, (key, place) in GROUP_SETTINGS.items():
        value = group.get(key)
        if place is not None:
            value = value[place] if isinstance(value, tuple | list) and len(value) > place else None
        if isinstance(value, Real):
            yield name, float(value)
