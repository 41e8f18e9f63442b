"""What MindSpore's optimizers of the Adam family make of their two moments, element by element."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from mindspore import nn
from mindspore.experimental import optim

from trainermon.core.errors import ConfigError
from trainermon.core.values import Kind
from trainermon.dump.mindspore.tensors import as_array
from trainermon.monitor.mindspore.training import CellTraining
from trainermon.monitor.taps.row_collector import RowCollector
from trainermon.statistics.mindspore.moments import MomentsOfTensors, Rows

PIECE = 1 << 17
"""Elements that are taken at a time, as in a session of torch: their copies stay in the cache."""


@dataclasses.dataclass(frozen=True, slots=True)
class UpdateFormula:
    """One step's `update = rectifier * m_hat / (root_hat + eps)` and `ratio = m_hat / root_hat`.

    `m_hat = mean * first` and `root_hat = root * sqrt(second)`. Learning rate and weight decay are not part of them.

    Attributes:
        mean: The correction of the first moment.
        root: That of the root of the second one.
        eps: What is added to the corrected root.
        rectifier: RAdam's; None: its variance is intractable, and the update is `m_hat`.
    """

    mean: float
    root: float
    eps: float
    rectifier: float | None = 1.0

    def apply(self, first: npt.NDArray[Any], second: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return update and ratio of a piece of the moments, in float32 or more.

        The ratio is 0 where the update is, and infinite where only the second moment is 0.
        """
        dtype = np.promote_types(first.dtype, np.float32).type
        mean, root = first.astype(dtype) * dtype(self.mean), np.sqrt(second.astype(dtype)) * dtype(self.root)
        with np.errstate(divide="ignore", invalid="ignore"):
            update = mean if self.rectifier is None else mean / (root + dtype(self.eps)) * dtype(self.rectifier)
            ratio = mean / root
        ratio[update == 0] = 0
        return update, ratio


Formula = Callable[[float, float, float, int], UpdateFormula]


def adamw(beta1: float, beta2: float, eps: float, step: int) -> UpdateFormula:
    """Return the formula of Adam (Kingma and Ba, algorithm 1), as `mindspore.experimental.optim.AdamW` has it."""
    return UpdateFormula(1 / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step), eps)


def adam(beta1: float, beta2: float, eps: float, step: int) -> UpdateFormula:
    """Return the formula of the operation Adam, whose eps stands inside the correction of the second moment."""
    plain = adamw(beta1, beta2, eps, step)
    return dataclasses.replace(plain, eps=eps * plain.root)


def uncorrected(_beta1: float, _beta2: float, eps: float, _step: int) -> UpdateFormula:
    """Return the formula of `AdamWeightDecay`, which corrects no bias."""
    return UpdateFormula(1.0, 1.0, eps)


def radam(beta1: float, beta2: float, eps: float, step: int) -> UpdateFormula:
    """Return the formula of RAdam (Liu et al., algorithm 2); eps stands inside the correction."""
    limit = 2 / (1 - beta2) - 1
    rho = limit - 2 * step * beta2**step / (1 - beta2**step)
    squared = (rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho)
    return dataclasses.replace(adam(beta1, beta2, eps, step), rectifier=math.sqrt(squared) if rho > 5 else None)


# The class whose `construct` it is -> what that does with the moments. NAdam's update also needs the gradient.
_FORMULAS: Mapping[type, Formula] = MappingProxyType(
    {nn.Adam: adam, nn.AdamWeightDecay: uncorrected, optim.Adam: adam, optim.AdamW: adamw, optim.RAdam: radam}
)
_STEPS = ("state_step", "step_t", "global_step")  # where an optimizer counts its steps, the most exact first
_LARGEST = MappingProxyType({nn.Adam: "vhat", optim.AdamW: "max_exp_avg_sq"})  # the running maximum of amsgrad


class UpdateTaps:
    """Records the statistics of update and ratio of chosen parameters, from the moments that the step has made.

    Args:
        training: What is watched; `check_formula` has passed.
        indices: The chosen parameters.
        collector: Where rows go.
    """

    def __init__(self, training: CellTraining, indices: Sequence[int], collector: RowCollector) -> None:
        self._training = training
        self._indices = indices
        self._collector = collector
        self._moments = MomentsOfTensors()

    def take(self) -> None:
        """Record the rows of the step that has ended; call it at its exit. Waits for it; reads both moments."""
        optimizer = self._training.optimizer
        author = _author(optimizer)
        formulas = [_FORMULAS[author](*numbers) for numbers in _numbers_of(optimizer)]
        found = {state.slot or state.kind: state.tensors for state in self._training.states()}
        firsts, seconds = found[Kind.EXP_AVG], found[Kind.EXP_AVG_SQ]
        maxima = found.get(_LARGEST.get(author, ""), seconds)
        for i in self._indices:
            group = _group_of(optimizer, i)
            second = maxima if _is_amsgrad(optimizer, group) else seconds
            rows = self._rows(formulas[group], as_array(firsts[i]), as_array(second[i]))
            self._collector.repeat([self._number(i, kind) for kind in (Kind.UPDATE, Kind.RATIO)], rows)

    def _rows(self, formula: UpdateFormula, first: npt.NDArray[Any], second: npt.NDArray[Any]) -> Rows:
        """Return the eight moments of update and ratio, float64 `[2, 8]`, computed piece by piece."""
        first, second = first.reshape(-1), second.reshape(-1)
        begins = range(0, max(first.size, 1), PIECE)
        rows = np.empty((len(begins), 2, 8))
        for row, begin in zip(rows, begins, strict=True):
            self._moments.write_arrays(formula.apply(first[begin : begin + PIECE], second[begin : begin + PIECE]), row)
        merged: Rows = rows.sum(axis=0)
        merged[:, 1], merged[:, 2] = rows[:, :, 1].min(axis=0), rows[:, :, 2].max(axis=0)
        return merged

    def _number(self, index: int, kind: Kind) -> int:
        parameter = self._training.parameters[index]
        return self._collector.table.id_of(parameter.key(kind), dataclasses.replace(parameter.owned, dtype="float32"))


def check_formula(optimizer: Any) -> None:
    """Raise an error unless the update formula of the optimizer is known.

    Raises:
        ConfigError: It is not.
    """
    author = _author(optimizer)
    if author not in _FORMULAS:
        known = ", ".join(f"{each.__module__.split('.optim')[0]}.{each.__name__}" for each in _FORMULAS)
        found = f"{author.__module__}.{author.__name__}"
        raise ConfigError(
            f"ur_distribution is true but no formula is known for {found}, only for {known}: set it to false"
        )
    for option in ("use_nesterov", "use_lazy"):
        if getattr(optimizer, option, False):
            raise ConfigError(
                f"ur_distribution is true, but with {option} {author.__name__} needs the gradient for its step, and "
                "the moments alone do not tell the update: set it to false"
            )


def _author(optimizer: Any) -> type:
    """Return the class that wrote `construct`: a subclass with one of its own is another optimizer."""
    return next(each for each in type(optimizer).__mro__ if "construct" in vars(each))


def _numbers_of(optimizer: Any) -> Iterator[tuple[float, float, float, int]]:
    """Yield both betas, eps and the number of steps, of each parameter group."""
    step = int(next(getattr(optimizer, name) for name in _STEPS if hasattr(optimizer, name)).asnumpy().reshape(-1)[0])
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        yield _decimal(optimizer.beta1), _decimal(optimizer.beta2), _decimal(optimizer.eps), step
    else:
        for group in groups:
            yield *map(float, group["betas"]), float(group["eps"]), step  # type: ignore[misc]  # two betas


def _decimal(held: Any) -> float:
    """Return the number that the script wrote, of which float32 holds the nearest: 1 - 0.999 would be 1e-5 off."""
    return float(str(np.float32(held.asnumpy().reshape(-1)[0])))


def _group_of(optimizer: Any, index: int) -> int:
    starts = getattr(optimizer, "group_start_id", (0,))
    return max(group for group, start in enumerate(starts) if start <= index)


def _is_amsgrad(optimizer: Any, group: int) -> bool:
    groups = getattr(optimizer, "param_groups", None)
    return bool(getattr(optimizer, "use_amsgrad", False) if groups is None else groups[group].get("amsgrad"))
