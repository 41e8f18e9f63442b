"""Operations whose results are not unique: what can be judged is whether they make up what was taken apart.

Their factors must also have the form that the operation promises: orthonormal columns, a triangle, unit length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainermon.accuracy.calls import OperationCall

_FACTOR = 16.0


class _Residual(NamedTuple):
    """What is zero if the results are right, and whether it scales with the matrix."""

    left: Tensor
    is_scaled: bool = True


def _svd(matrix: Tensor, parts: Sequence[Tensor]) -> Iterator[_Residual]:
    """Yield those of the better of two readings: `linalg.svd` gives the right vectors as rows, `svd` as columns."""
    left, values, right = parts
    size = values.shape[-1]
    exact = torch.linalg.svdvals(matrix)
    yield _Residual(values - exact)
    if not bool(left.any()) and not bool(right.any()) and bool(exact.any()):
        return  # only the values were asked for
    scaled = left[..., :, :size] * values.unsqueeze(-2).to(left.dtype)
    readings = [rows for rows in (right, right.mH) if rows.shape[-2] >= size and rows.shape[-1] == matrix.shape[-1]]
    rows = min(readings, key=lambda rows: float((scaled @ rows[..., :size, :] - matrix).abs().max()))
    yield _Residual(scaled @ rows[..., :size, :] - matrix)
    yield _orthonormal(left)
    yield _orthonormal(rows.mH)


def _qr(matrix: Tensor, parts: Sequence[Tensor]) -> Iterator[_Residual]:
    yield _Residual(parts[0] @ parts[1] - matrix)
    yield _orthonormal(parts[0])
    yield _Residual(parts[1].tril(-1))


def _eigenvectors(matrix: Tensor, parts: Sequence[Tensor]) -> Iterator[_Residual]:
    values, vectors = parts
    yield _Residual(matrix.to(vectors.dtype) @ vectors - vectors * values.unsqueeze(-2).to(vectors.dtype))
    yield _Residual(vectors.norm(dim=-2) - 1, is_scaled=False)


def _orthonormal(columns: Tensor) -> _Residual:
    identity = torch.eye(columns.shape[-1], dtype=columns.dtype)
    return _Residual(columns.mH @ columns - identity, is_scaled=False)


Residuals = Callable[[Tensor, Sequence[Tensor]], Iterator[_Residual]]
RESIDUALS: Mapping[str, Residuals] = {
    "svd": _svd,
    "qr": _qr,
    "eig": _eigenvectors,
}
"""By the last part of the operation's name: what is zero if its results are right, in float64."""


def residual_error(residuals: Residuals, call: OperationCall, results: Sequence[Tensor]) -> float:
    """Return the size of the largest residual in units of what rounding may leave; infinite if there is none.

    `n` roundoffs of the norm of the matrix for each of its sides (Higham, 2002, theorem 19.4, with 16 as constant), and
    of 1 where factors must be orthonormal or of unit length.
    """
    matrix = next((tensor for tensor in call.tensors if tensor.is_floating_point() or tensor.is_complex()), None)
    if matrix is None or not matrix.numel():
        return 0.0
    wide = matrix.detach().to("cpu", torch.complex128 if matrix.is_complex() else torch.float64)
    unit = max(
        torch.finfo(part.dtype).eps for part in [*results, matrix] if part.is_floating_point() or part.is_complex()
    )
    size = wide.flatten(-2).norm(dim=-1).max() if wide.dim() > 1 else wide.abs().max()
    bound = _FACTOR * max(matrix.shape[-2:]) * unit
    try:
        errors = [
            float(found.left.abs().max())
            / (bound * (max(float(size), torch.finfo(matrix.dtype).tiny) if found.is_scaled else 1))
            for found in residuals(wide, [_widened(part) for part in results])
            if found.left.numel()
        ]
    except (RuntimeError, ValueError):
        return math.inf
    return max((error if math.isfinite(error) else math.inf for error in errors), default=0.0)


def _widened(part: Tensor) -> Tensor:
    part = part.detach().to("cpu")
    return part.to(torch.complex128) if part.is_complex() else part.double() if part.is_floating_point() else part
