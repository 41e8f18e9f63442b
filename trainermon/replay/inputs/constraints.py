"""What operations ask of their inputs beyond statistics: indices, labels, sorted rows, positive definite matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LOSSES = frozenset(["cross_entropy", "nll_loss", "nll_loss2d"])
_CHOLESKY = frozenset(["cholesky", "cholesky_ex", "linalg_cholesky", "linalg_cholesky_ex"])
_FACTORS = {"cholesky_inverse": (0, "input"), "cholesky_solve": (1, "input2")}
_SORTED = {"searchsorted": (0, "sorted_sequence"), "bucketize": (1, "boundaries")}
# Operation: place and name of the index, place and name of what it points into, and of the dimension.
_INDICES = {
    "embedding": ((0, "input"), (1, "weight"), None),
    "embedding_bag": ((0, "input"), (1, "weight"), None),
    "gather": ((2, "index"), (0, "input"), (1, "dim")),
    "index_select": ((2, "index"), (0, "input"), (1, "dim")),
    "take_along_dim": ((1, "indices"), (0, "input"), (2, "dim")),
    "scatter": ((2, "index"), (0, "input"), (1, "dim")),
    "scatter_add": ((2, "index"), (0, "input"), (1, "dim")),
    "scatter_reduce": ((2, "index"), (0, "input"), (1, "dim")),
    "index_add": ((2, "index"), (0, "input"), (1, "dim")),
    "index_copy": ((2, "index"), (0, "input"), (1, "dim")),
    "index_fill": ((2, "index"), (0, "input"), (1, "dim")),
}
# What is written twice to a place may be either.
_WRITE_ONCE = frozenset(["scatter", "index_copy"])
_DIVISORS = {
    "div": 1, "divide": 1, "true_divide": 1, "floor_divide": 1, "remainder": 1, "fmod": 1, "truediv": 1,
    "floordiv": 1, "mod": 1, "rtruediv": 0, "rdiv": 0, "rfloordiv": 0, "rmod": 0, "reciprocal": 0,
}  # fmt: skip
_IGNORED = -100


def constrain(name: str, args: list[Any], kwargs: dict[str, Any], rng: np.random.Generator) -> None:
    """Replace tensors among the arguments of the operation `name` by such as it accepts, if they are none.

    A tensor that is replaced keeps type and shape, and as much of its statistics as can be.
    """
    last = name.rpartition(".")[2].strip("_")
    call = _Arguments(args, kwargs)
    if last in _LOSSES:
        call.replace((1, "target"), lambda target: _labels(target, call, rng))
    if last in _CHOLESKY or name in ("linalg.cholesky", "linalg.cholesky_ex"):
        call.replace((0, "input"), _positive_definite)
    if last in _FACTORS:
        call.replace(_FACTORS[last], _factor)
    if last in _SORTED and call.get((4, "sorter")) is None:
        call.replace(_SORTED[last], lambda values: values.sort(-1).values)
    if last == "embedding_bag":
        call.replace((2, "offsets"), _offsets)
    if last in _INDICES:
        index, source, dim = _INDICES[last]
        call.replace(index, lambda found: _indices(found, call, source, dim, once=last in _WRITE_ONCE, rng=rng))
    if last == "binary_cross_entropy":
        call.replace((0, "input"), lambda shares: shares.clamp(0, 1))
    if last in _DIVISORS:
        place = _DIVISORS[last]
        call.replace((place, "other" if place else "input"), _without_zero)


class _Arguments:
    """The arguments of a call, by place or name."""

    def __init__(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs

    def get(self, where: tuple[int, str], default: Any = None) -> Any:
        place, name = where
        return self._args[place] if place < len(self._args) else self._kwargs.get(name, default)

    def replace(self, where: tuple[int, str], change: Callable[[Tensor], Tensor]) -> None:
        """Put what `change` makes of a tensor in its place; anything else stays."""
        found = self.get(where)
        if not isinstance(found, Tensor) or not found.numel():
            return
        target: Any = self._args if where[0] < len(self._args) else self._kwargs
        target[where[0] if where[0] < len(self._args) else where[1]] = change(found)


def _labels(target: Tensor, call: _Arguments, rng: np.random.Generator) -> Tensor:
    """Return labels below the number of classes; as many are to be ignored as the mean tells.

    Of labels drawn evenly from what is recorded the mean is half the largest.
    """
    scores = call.get((0, "input"))
    if target.is_floating_point() or not isinstance(scores, Tensor):
        return target
    classes = scores.shape[1] if scores.dim() > 1 else scores.shape[0]
    ignored = call.get((4, "ignore_index"), _IGNORED)
    labels = target.clamp(0, classes - 1)
    if not bool((target < 0).any()) or not isinstance(ignored, int):
        return labels
    high = max(1, min(classes - 1, int(target.max())))
    number = round(target.numel() * (high / 2 - float(target.double().mean())) / (high / 2 - ignored))
    number = min(max(number, 1), max(1, target.numel() - 1))
    drawn = rng.integers(0, high + 1, target.numel())
    drawn[: target.numel() - number][:1] = high
    drawn[target.numel() - number :] = ignored
    return torch.from_numpy(rng.permutation(drawn)).to(target.dtype).reshape(target.shape)


def _indices(  # noqa: PLR0913  # where three things stand in a call
    index: Tensor,
    call: _Arguments,
    source: tuple[int, str],
    dim: tuple[int, str] | None,
    *,
    once: bool,
    rng: np.random.Generator,
) -> Tensor:
    into = call.get(source)
    axis = call.get(dim, 0) if dim is not None else 0
    if index.is_floating_point() or not isinstance(into, Tensor) or not into.dim() or not isinstance(axis, int):
        return index
    size = into.shape[axis]
    along = axis if index.dim() == into.dim() else 0
    if once and index.dim() and index.shape[along] <= size:
        keys = torch.from_numpy(
            rng.random([size if at == along % index.dim() else n for at, n in enumerate(index.shape)])
        )
        chosen = keys.argsort(along).narrow(along, 0, index.shape[along])
        return chosen.to(index.dtype)
    return index.clamp(0, size - 1)


def _offsets(offsets: Tensor) -> Tensor:
    found = offsets.sort(-1).values
    return found - found[..., :1]


def _without_zero(values: Tensor) -> Tensor:
    """Return integers without zero; other numbers as they are: their zeros are counted."""
    return values if values.is_floating_point() or values.is_complex() else torch.where(values == 0, 1, values)


def _positive_definite(matrix: Tensor) -> Tensor:
    """Return A Aᵀ for a random A, made as large as the matrix was."""
    wide = matrix.to(torch.complex128 if matrix.is_complex() else torch.float64)
    size = wide.shape[-1]
    found = wide @ wide.mH / size
    scale = float(found.abs().amax()) or 1.0
    found = found / scale + torch.eye(size, dtype=torch.float64) / 4
    return (found * (float(wide.abs().amax()) / float(found.abs().amax()))).to(matrix.dtype)


def _factor(matrix: Tensor) -> Tensor:
    """Return a lower triangle with a positive diagonal that is not near zero."""
    diagonal = matrix.diagonal(dim1=-2, dim2=-1).abs()
    floor = float(matrix.abs().amax()) / 4
    return matrix.tril(-1) + torch.diag_embed(diagonal.clamp(min=floor if math.isfinite(floor) else 1.0))
