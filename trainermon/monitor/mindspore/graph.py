"""Steps that MindSpore compiles: no hook of ours runs in them, so the graph itself keeps the rows of its gradients.

`WatchedOptimizer` takes the place of the optimizer in the script. In the compiled step it computes the moments of the
gradients, and of the parameters before the step, by operations of MindSpore, into one parameter; after the step that is
read like any other memory. A counter in the graph says how many steps there were since it was read last.
"""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt
from mindspore import Parameter, Tensor, nn, ops

from trainermon.core.config import MonitorConfig
from trainermon.core.errors import AttachError
from trainermon.core.values import STATISTICS

_HANDED_ON = (
    "parameters",
    "global_step",
    "learning_rate",
    "is_group",
    "is_group_lr",
    "dynamic_lr",
    "loss_scale",
    "defaults",
)


class WatchedOptimizer(nn.Cell):  # type: ignore[misc]  # MindSpore has no types
    """An optimizer that keeps the eight moments of each gradient that it is called with, compiled or not.

    It is called with the gradients as the optimizer is, returns what that returns, and changes no bit of it.

    Args:
        optimizer: The optimizer.
        with_parameters: Whether the moments of the parameters before the step are kept too.
    """

    def __init__(self, optimizer: nn.Cell, *, with_parameters: bool) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer
        for name in _HANDED_ON:
            if hasattr(optimizer, name):
                setattr(self, name, getattr(optimizer, name))
        self.with_parameters = with_parameters
        num_rows = len(self.parameters) * (1 + with_parameters)
        rows = np.zeros((num_rows, len(STATISTICS)))
        self.trainermon_rows = Parameter(Tensor(rows), name="trainermon_rows", requires_grad=False)
        self.trainermon_steps = Parameter(Tensor(0, mindspore.int32), name="trainermon_steps", requires_grad=False)

    def construct(self, gradients: Any) -> Any:
        """Keep the moments of the gradients, and call the optimizer with them."""
        rows: Any = ()
        for gradient in gradients:
            rows += (_row_of(gradient),)
        if self.with_parameters:
            for parameter in self.parameters:
                rows += (_row_of(parameter),)
        gradients = ops.depend(gradients, ops.assign(self.trainermon_rows, ops.stack(rows)))
        gradients = ops.depend(gradients, ops.assign_add(self.trainermon_steps, 1))
        return self.optimizer(gradients)

    def get_lr(self) -> Any:
        """Return what the optimizer says is the learning rate of the step."""
        return self.optimizer.get_lr()


def check_compiled(config: MonitorConfig, watched: WatchedOptimizer | None = None) -> None:
    """Raise an error if `config` asks for what nothing sees of a compiled step.

    Args:
        config: What is asked for.
        watched: What compiled steps call already, which keeps no more than it was made for.

    Raises:
        AttachError: It does.
    """
    if config.gradient_signs.level is not None or config.mg_direction:
        raise AttachError(
            "watch: gradient_signs.level is set or mg_direction is true, but the elements of gradients cannot be "
            "read in a compiled step: leave them out, or train in PyNative mode without watch"
        )
    for key in ("xy_distribution", "print_struct", "stack_info"):
        if getattr(config, key):
            raise AttachError(
                f"watch: {key} is true, but MindSpore calls no hook in what it compiles, so nothing is seen of the "
                f"cells of a compiled step: set {key} to false, or train in PyNative mode without watch"
            )
    if config.param_distribution and watched is not None and not watched.with_parameters:
        raise AttachError(
            "watch: param_distribution is true, but was false when the step was compiled, which so keeps nothing of "
            "the parameters before it: set it to false, or to true before the training begins"
        )


class RowsOfGraph:
    """Reads what a `WatchedOptimizer` has kept, after each step."""

    def __init__(self, optimizer: WatchedOptimizer) -> None:
        self._optimizer = optimizer
        self._num_read = int(optimizer.trainermon_steps.asnumpy())

    def new_steps(self) -> int:
        """Return how many steps there were since `read` was called last. Waits for the step."""
        return int(self._optimizer.trainermon_steps.asnumpy()) - self._num_read

    def read(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64] | None]:
        """Return the rows of the gradients and of the parameters before the newest step, float64 `[parameters, 8]`."""
        self._num_read = int(self._optimizer.trainermon_steps.asnumpy())
        rows = self._optimizer.trainermon_rows.asnumpy().copy()
        count = len(self._optimizer.parameters)
        return rows[:count], rows[count:] if self._optimizer.with_parameters else None


def _row_of(tensor: Any) -> Any:
    """Return the eight moments of a tensor, float64 `[8]`, by operations that a graph can hold."""
    values = ops.cast(tensor, mindspore.float64).reshape((-1,))
    nans = ops.cast(values != values, mindspore.float64)  # noqa: PLR0124  # the definition of NaN
    infs = ops.cast(ops.abs(values) == float("inf"), mindspore.float64)
    is_finite = nans + infs == 0
    kept = ops.select(is_finite, values, ops.zeros_like(values))
    return ops.stack(
        (
            ops.cast(values.size, mindspore.float64),
            ops.select(is_finite, values, ops.full_like(values, float("inf"))).min(),
            ops.select(is_finite, values, ops.full_like(values, float("-inf"))).max(),
            kept.sum(),
            (kept * kept).sum(),
            ops.cast(values == 0, mindspore.float64).sum(),
            nans.sum(),
            infs.sum(),
        )
    )
