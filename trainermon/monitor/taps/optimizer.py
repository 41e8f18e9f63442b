"""Parameters around the optimizer step, whatever the optimizer keeps of them, and what it makes of that."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainermon.core.values import Kind, Placement
from trainermon.monitor.taps.adam import UpdateFormulas, steppers, why_no_formula
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.pieces import take_in_pieces
from trainermon.monitor.taps.training import HeldParameter, OptimizerState, Training

logger = logging.getLogger("trainermon")

# First moments by the names that optimizers give them, the likelier first.
DIRECTIONS = ("exp_avg", "momentum_buffer")
_READABLE = (torch.strided, torch.sparse_coo)


class ParameterTaps:
    """Records the statistics of the parameters that the optimizer steps, before and after its step.

    Before it, those of the model too that the optimizer does not step themselves: both are the weights of the step.
    Nothing is taken over from the step before, since a write through `.data` in between is in no version counter.
    """

    def __init__(self, training: Training, indices: Sequence[int], collector: Collector) -> None:
        self._training = training
        self._indices = indices
        self._collector = collector
        self._series: dict[tuple[Kind, int], int] = {}
        self._taken: dict[Kind, tuple[Sequence[int], Sequence[int]]] = {}  # parameters of the last step, their series

    def at_entry(self) -> None:
        """Record the parameters before the optimizer's step, and the model's own where those are others."""
        self._take(Kind.PARAM_ORIGIN, self._training.values())
        self._take(Kind.PARAM_USED, self._training.used_weights())

    def at_exit(self) -> None:
        """Record the parameters after the optimizer's step."""
        self._take(Kind.PARAM_UPDATED, self._training.values())

    def _take(self, kind: Kind, values: Sequence[Tensor | None]) -> None:
        held = [index for index in self._indices if values[index] is not None]
        if not held:
            return
        before, series = self._taken.get(kind, ((), ()))
        if before != held:
            series = [self._number(kind, index, values[index]) for index in held]  # type: ignore[arg-type]
            self._taken[kind] = held, series
        self._collector.take(series, [values[index] for index in held])

    def _number(self, kind: Kind, index: int, value: Tensor) -> int:
        number = self._series.get((kind, index))
        if number is None:
            parameter = self._training.parameters[index]
            is_own = kind is Kind.PARAM_USED and value.numel() != parameter.owned.length
            placement = placement_of_own(parameter, value) if is_own else placement_of(parameter, value)
            number = self._collector.table.id_of(parameter.key(kind), placement)
            self._series[kind, index] = number
        return number


class StateTaps:
    """Records the statistics of the optimizer's state of each parameter, and of the update that follows from it.

    State is found by name and shape. A tensor with an element for each one of the parameter's is `EXP_AVG` or
    `EXP_AVG_SQ` if that is its name, else `STATE` with its name as slot, and merges over ranks as the parameter does. A
    smaller one (a row or column of factored moments) is `STATE` with its own shape; where the parameter is split over
    ranks it does not merge. Scalars (step counts) are left out, and so is, with a word in the log, what only a scale
    kept elsewhere makes readable: 8-bit states, float16 states of other parameters than float16 ones.
    """

    def __init__(self, training: Training, indices: Sequence[int], collector: Collector) -> None:
        self._training = training
        self._indices = indices
        self._collector = collector
        self._of_state: dict[tuple[int, str], int] = {}
        self._of_kind: dict[tuple[int, Kind], int] = {}
        self._idle: frozenset[int] = frozenset()
        self._told: set[str] = set()

    def at_entry(self) -> None:
        """Note which parameters have no gradient: the optimizer passes them over, and `take_updates` will, too."""
        gradients = self._training.reduced_gradients()
        self._idle = frozenset(index for index in self._indices if gradients[index] is None)

    def take_states(self) -> None:
        """Record the statistics of the state tensors; call it at the exit of the optimizer step.

        Scalars are left out, and states whose numbers need a scale that is kept elsewhere, as 8-bit ones.
        """
        series, tensors, numbers = [], [], self._of_state
        for index, found in self._found():
            for name, tensor in found.state.items():
                if not isinstance(tensor, Tensor):
                    continue
                number = numbers.get((index, name))
                if number is None:
                    number = numbers[index, name] = self._new_series(index, name, found)
                if number >= 0:
                    series.append(number)
                    tensors.append(tensor)
        self._collector.take(series, tensors)

    def take_updates(self) -> None:
        """Record the statistics of Adam's update and ratio of each parameter, computed from both moments.

        Only where the formula is known (`UpdateFormulas`). Call it at the exit of the step. A parameter that `at_entry`
        found without a gradient was not updated and has no row. Reads both moments once more; needs memory for a few
        pieces, see `take_in_pieces`.
        """
        formulas = UpdateFormulas(self._training.optimizer)
        for index, found in self._found():
            inputs = None if index in self._idle else formulas.inputs_of(found)
            if inputs is None or self._why_unreadable(found):
                continue
            formula, first, second, step = inputs
            moments = (_as_reals(first), _as_reals(second))
            series = (self._number(index, Kind.UPDATE, found), self._number(index, Kind.RATIO, found))
            take_in_pieces(
                self._collector, series, moments, lambda m, v, f=formula, g=found.group, t=step: f(m, v, g, t)
            )

    def take_direction(self) -> None:
        """Record per element 1 where gradient and first moment have the same sign, 0 where opposite, else 1/2.

        The mean of the row is msprobe's `((sign(g) * sign(m)).sum() / n + 1) / 2`. Meant for the entry of the step: the
        gradient is the one about to be used, the moment the one that the steps before have made. A parameter without
        a moment (first step, no momentum) has no row. Reads gradient and moment once more; memory as `take_updates`.
        """
        gradients = self._training.reduced_gradients()
        for index, found in self._found():
            name = next((name for name in DIRECTIONS if isinstance(found.state.get(name), Tensor)), None)
            gradient = gradients[index]
            if name is None or gradient is None or self._why_unreadable(found):
                continue
            moment: Tensor = found.state[name]
            if (
                gradient.layout != moment.layout
                or gradient.device != moment.device
                or gradient.numel() != moment.numel()
            ):
                self._tell_once(f"mg_direction: gradient and {name} differ in layout, size or device; it is left out")
                continue
            series = (self._number(index, Kind.MG_DIRECTION, found),)
            sign = -0.5 if found.group.get("maximize") else 0.5
            take_in_pieces(
                self._collector,
                series,
                (_as_reals(gradient.reshape(moment.shape)), _as_reals(moment)),
                lambda g, m, s=sign: (g.sign().mul_(m.sign()).float().mul_(s).add_(0.5),),
            )

    def _found(self) -> list[tuple[int, OptimizerState]]:
        if self._collector.muted:
            return []
        states = self._training.states()
        return [(index, found) for index in self._indices if (found := states[index]) is not None]

    def _number(self, index: int, kind: Kind, found: OptimizerState) -> int:
        number = self._of_kind.get((index, kind))
        if number is None:
            parameter = self._training.parameters[index]
            placement = dataclasses.replace(placement_of(parameter, found.value), dtype="float32")
            number = self._of_kind[index, kind] = self._collector.table.id_of(parameter.key(kind), placement)
        return number

    def _new_series(self, index: int, name: str, found: OptimizerState) -> int:
        """Return the series of a state tensor; -1 if it has none."""
        tensor: Tensor = found.state[name]
        if name == "step" or (tensor.dim() == 0 and found.value.dim() > 0):
            return -1
        reason = self._why_unreadable(found)
        if not reason and tensor.numel() > found.value.numel():
            reason = f"its state {name} has more elements than the parameter, so it belongs to several"
        if reason:
            self._tell_once(f"state of {type(self._training.optimizer).__name__} is left out: {reason}")
            return -1
        parameter = self._training.parameters[index]
        kind = {"exp_avg": Kind.EXP_AVG, "exp_avg_sq": Kind.EXP_AVG_SQ}.get(name, Kind.STATE)
        key = parameter.key(kind, slot=name if kind is Kind.STATE else "")
        return self._collector.table.id_of(key, _placement_of_state(parameter, tensor, found.value))

    def _why_unreadable(self, found: OptimizerState) -> str:
        for name, tensor in found.state.items():
            if not isinstance(tensor, Tensor) or (tensor.layout is torch.strided and not tensor.dim()):
                continue
            if tensor.layout not in _READABLE or tensor.is_meta:
                return f"its {name} is {tensor.layout} on {tensor.device}, which cannot be read"
            if not _is_readable(tensor, found.value):
                return f"its {name} is a {type(tensor).__name__} of {tensor.dtype}, with scales that are kept elsewhere"
        return ""

    def _tell_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            logger.warning(message)


def lacking(training: Training) -> dict[str, str]:
    """Return the keys of the configuration that ask for what the optimizer cannot give, each with the reason.

    Update and ratio need a formula that is known, moments and their direction an optimizer that keeps state.
    """
    found = {}
    reason = why_no_formula(training.optimizer)
    if reason:
        found["ur_distribution"] = reason
    inner = steppers(training.optimizer)
    if inner and all(type(one) is torch.optim.SGD and not _has_momentum(one) for one in inner):
        found |= dict.fromkeys(("mv_distribution", "mg_direction"), "SGD without momentum keeps no state")
    return found


def placement_of(parameter: HeldParameter, tensor: Tensor) -> Placement:
    """Return how a value or state `tensor` of `parameter` relates to the whole: as the parameter, with its own dtype.

    It has none of the gradient's scale.
    """
    return dataclasses.replace(parameter.owned, dtype=str(tensor.dtype).removeprefix("torch."), scale=1.0)


def placement_of_own(parameter: HeldParameter, tensor: Tensor) -> Placement:
    """Return how the model's own `tensor` of `parameter` relates to the whole: as its gradient does.

    Except for dtype and scale.
    """
    return dataclasses.replace(parameter.placement, dtype=str(tensor.dtype).removeprefix("torch."), scale=1.0)


def _placement_of_state(parameter: HeldParameter, tensor: Tensor, value: Tensor) -> Placement | None:
    whole = placement_of(parameter, tensor)
    if tensor.shape == value.shape:
        return whole
    is_split = whole.length is not None or bool(whole.partitioned_over)
    return None if is_split else dataclasses.replace(whole, shape=tuple(tensor.shape))


def _is_readable(tensor: Tensor, value: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, nn.Parameter) or hasattr(tensor, "placements")
    if tensor.dtype is torch.float16 and value.dtype is not torch.float16:
        return False  # so narrow a range is used with a scale only
    return is_plain and (tensor.is_complex() or tensor.is_floating_point()) and tensor.itemsize > 1


def _as_reals(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of reals, any other as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _has_momentum(optimizer: torch.optim.Optimizer) -> bool:
    return any(group["momentum"] for group in optimizer.param_groups)
