"""Operations whose results are not unique: what can be judged is whether they make up what was taken apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from trainermon.accuracy.calls import OperationCall

_FACTOR = 16.0


def _svd(matrix: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Return the smaller residual of two readings: `linalg.svd` gives the right vectors as rows, `svd` as columns."""
    left, values, right = parts
    size = values.shape[-1]
    scaled = left[..., :, :size] * values.unsqueeze(-2).to(left.dtype)
    readings = [rows for rows in (right, right.mH) if rows.shape[-2] >= size and rows.shape[-1] == matrix.shape[-1]]
    return min((scaled @ rows[..., :size, :] - matrix for rows in readings), key=lambda left: float(left.abs().max()))


def _qr(matrix: Tensor, parts: Sequence[Tensor]) -> Tensor:
    return parts[0] @ parts[1] - matrix


def _eigenvectors(matrix: Tensor, parts: Sequence[Tensor]) -> Tensor:
    values, vectors = parts
    return matrix.to(vectors.dtype) @ vectors - vectors * values.unsqueeze(-2).to(vectors.dtype)


Residual = Callable[[Tensor, Sequence[Tensor]], Tensor]
RESIDUALS: Mapping[str, Residual] = {
    "svd": _svd,
    "qr": _qr,
    "eig": _eigenvectors,
}
"""By the last part of the operation's name: what is zero if its results are right, in float64."""


def residual_error(residual: Residual, call: OperationCall, results: Sequence[Tensor]) -> float:
    """Return the size of the residual in units of what rounding may leave; infinite if there is none.

    `n` roundoffs of the norm of the matrix for each of its sides (Higham, 2002, theorem 19.4, with 16 as constant).
    """
    matrix = next((tensor for tensor in call.tensors if tensor.is_floating_point() or tensor.is_complex()), None)
    if matrix is None or not matrix.numel():
        return 0.0
    wide = torch.complex128 if matrix.is_complex() else torch.float64
    try:
        left = residual(matrix.to("cpu", wide), [_widened(part) for part in results])
    except (RuntimeError, ValueError):
        return math.inf
    unit = max(
        torch.finfo(part.dtype).eps for part in [*results, matrix] if part.is_floating_point() or part.is_complex()
    )
    size = matrix.to("cpu", wide).flatten(-2).norm(dim=-1).max() if matrix.dim() > 1 else matrix.abs().max()
    error = float(left.abs().max()) if left.numel() else 0.0
    bound = _FACTOR * max(matrix.shape[-2:]) * unit * max(float(size), torch.finfo(matrix.dtype).tiny)
    return error / bound if math.isfinite(error) else math.inf


def _widened(part: Tensor) -> Tensor:
    part = part.detach().to("cpu")
    return part.to(torch.complex128) if part.is_complex() else part.double() if part.is_floating_point() else part
