"""Which learning rates the optimizer of a training takes: constants, or what its schedules return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Tensor, nn
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

_LIBRARIES = ("mindspore.", "mindformers.")


def learning_rates(optimizer: Any) -> list[Tensor | float | None]:
    """Return the rate of each group, in their order, in the step that the optimizer has just made; None if not known.

    A schedule is asked once more, for the number of that step. That is done of schedules of MindSpore and MindFormers,
    which are functions of it; another may count its calls, so it is left alone.

    Tensors have one element, float32. No wait for the device; a schedule costs the operations that it consists of.

    Args:
        optimizer: Of `mindspore.nn`, `mindspore.experimental.optim` or `mindspore.mint.optim`.
    """
    return [_of_last_step(rate, optimizer) for rate in _rates(optimizer)]


def _rates(optimizer: Any) -> Sequence[Any]:
    groups = getattr(optimizer, "param_groups", None)  # of mindspore.experimental.optim and mindspore.mint.optim
    if groups is not None:
        return [group.get("lr") for group in groups]
    rates = getattr(optimizer, "learning_rate", None)
    if not isinstance(rates, tuple | list | nn.CellList):
        return [rates]
    return list({id(rate): rate for rate in rates}.values())


def _of_last_step(rate: Any, optimizer: Any) -> Tensor | float | None:
    if isinstance(rate, LearningRateSchedule):
        if not all(type(cell).__module__.startswith(_LIBRARIES) for _, cell in rate.cells_and_names()):
            return None
        rate = rate(optimizer.global_step - 1).reshape(())  # an optimizer counts on as soon as it has its rate
    return rate if isinstance(rate, Tensor | float) else None
