"""What a training of MindSpore is: cells, parameters in the optimizer's order, and what the optimizer keeps of each.

MindSpore's gradients are no attribute of a parameter: they exist only as the tuple that the optimizer is called with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import mindspore
from mindspore import ParameterTuple, Tensor, nn

from trainermon.core.errors import AttachError
from trainermon.core.values import Kind, Placement, SeriesKey, well_formed

# Moments of Adam by the names that MindSpore's optimizers give them; other state goes by its own name.
_STATE_KINDS = MappingProxyType(
    {
        "moment1": Kind.EXP_AVG,
        "moments1": Kind.EXP_AVG,
        "exp_avg": Kind.EXP_AVG,
        "moment2": Kind.EXP_AVG_SQ,
        "moments2": Kind.EXP_AVG_SQ,
        "exp_avg_sq": Kind.EXP_AVG_SQ,
    }
)
_MOMENTA = ("moments", "accum")  # of Momentum and of SGD
_RECOMPUTING = "_recompute_cell"  # what `Cell.recompute` puts into a cell: it is no cell of the script's
_FLOATS = frozenset({mindspore.float32, mindspore.float16, mindspore.bfloat16, mindspore.float64})


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class WatchedCell:
    """A cell to watch.

    Attributes:
        name: Its name in the whole model.
        cell: The cell.
        stage: Its virtual pipeline stage.
    """

    name: str
    cell: nn.Cell
    stage: int = 0


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CellParameter:
    """A parameter that the optimizer steps.

    Attributes:
        name: MindSpore's own (`layer.weight`, `norm.gamma`).
        tensor: The parameter.
        stage: Virtual pipeline stage.
    """

    name: str
    tensor: Any
    stage: int = 0

    @property
    def owned(self) -> Placement:
        """How the parameter relates to the whole one: a rank holds all of it."""
        return placement_of(self.tensor)

    def key(self, kind: Kind, slot: str = "", micro_step: int | None = None) -> SeriesKey:
        """Return the key of this parameter's series of `kind`."""
        return SeriesKey(kind, self.name, slot, micro_step=micro_step, stage=self.stage)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StateOfParameters:
    """One kind of state that an optimizer keeps for each parameter.

    Attributes:
        kind: What its series are.
        slot: Its name, where the kind does not say it.
        tensors: One tensor for each parameter of the optimizer, in its order.
    """

    kind: Kind
    slot: str
    tensors: tuple[Any, ...]


class CellTraining:
    """A model of MindSpore and its optimizer.

    Args:
        roots: The model, or its virtual pipeline stages.
        optimizer: What is called with the gradients.

    Attributes:
        framework: Its name, for people.
        roots: The model's stages.
        optimizer: The optimizer.
        modules: Every cell below the roots.
        parameters: Every parameter that the optimizer steps, in the order of its gradients.

    Raises:
        AttachError: The optimizer is none of MindSpore's, or has no parameter.
    """

    framework = "mindspore"

    def __init__(self, roots: Sequence[nn.Cell], optimizer: Any) -> None:
        self.roots = tuple(roots)
        self.optimizer = optimizer
        self.modules = [
            WatchedCell(well_formed(name), cell, stage)
            for stage, root in enumerate(self.roots)
            for name, cell in root.cells_and_names()
            if name and name.rpartition(".")[2] != _RECOMPUTING
        ]
        stages = {id(p): stage for stage, root in enumerate(self.roots) for p in root.get_parameters()}
        self.parameters = [
            CellParameter(well_formed(parameter.name), parameter, stages.get(id(parameter), 0))
            for parameter in _parameters_of(optimizer)
        ]
        if not self.parameters:
            raise AttachError("optimizer: it steps no parameter, so there is nothing to watch")

    def states(self) -> list[StateOfParameters]:
        """Return what the optimizer keeps for each parameter, besides the parameters themselves."""
        own = {id(parameter.tensor) for parameter in self.parameters}
        return [
            StateOfParameters(_STATE_KINDS.get(name, Kind.STATE), "" if name in _STATE_KINDS else name, tuple(value))
            for name, value in vars(self.optimizer).items()
            if isinstance(value, ParameterTuple)
            and len(value) == len(self.parameters)
            and not any(id(tensor) in own for tensor in value)
        ]

    def first_moments(self) -> tuple[Any, ...]:
        """Return the first moment, or the momentum, of each parameter; () if the optimizer keeps none."""
        found = {state.slot or state.kind: state.tensors for state in self.states()}
        return next((found[name] for name in (Kind.EXP_AVG, *_MOMENTA) if name in found), ())

    def loss_scale(self) -> float | None:
        """Return what the optimizer divides gradients by, where that is not 1."""
        scale = getattr(self.optimizer, "loss_scale", None)
        return float(scale) if isinstance(scale, int | float) and scale != 1 else None

    def loss_of(self, output: Any) -> Tensor | None:
        """Return the loss in what the model returned, a single number; None if there is none."""
        found = output[0] if isinstance(output, tuple | list) and output else output
        is_loss = isinstance(found, Tensor) and found.size == 1 and found.dtype in _FLOATS
        return found if is_loss else None


def placement_of(tensor: Any) -> Placement:
    """Return a placement with dtype and shape alone: this rank holds all of the tensor."""
    return Placement(dtype=str(tensor.dtype).lower(), shape=tuple(tensor.shape))


def _parameters_of(optimizer: Any) -> Sequence[Any]:
    parameters = getattr(optimizer, "parameters", None)
    if not isinstance(optimizer, nn.Cell) or not isinstance(parameters, tuple | list):
        raise AttachError(
            f"optimizer: found {type(optimizer).__name__}, expected one of mindspore.nn, mindspore.experimental.optim "
            "or mindspore.mint.optim, which is called with the gradients"
        )
    return parameters
