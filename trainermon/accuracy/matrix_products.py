"""Which calls are products of matrices, and of which: `linear`, `matmul`, `baddbmm`, `einsum` and others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from trainermon.accuracy.calls import OperationCall, plain

_Layout = Callable[[Tensor], Tensor]
_BATCHED, _MATRIX = 3, 2


class Operand(NamedTuple):
    """A tensor of a call.

    Attributes:
        number: Its number among the call's tensors.
        laid_out: Gives it, or its gradient, as a batch of matrices.
    """

    number: int
    laid_out: _Layout


class MatrixProduct(NamedTuple):
    """A batch of products of `left` (batch × rows × terms) and the transpose of `right` (batch × columns × terms).

    `inside` is the type it is computed in where that is coarser than float32 by intention.
    """

    left: Tensor
    right: Tensor
    factor: float = 1.0
    inside: torch.dtype | None = None

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Batch × rows × columns."""
        return (*self.left.shape[:2], self.right.shape[1])


class ProductForm(NamedTuple):
    """How the tensors of a call make up its result: `left` times the transpose of `right`, plus `added`.

    Attributes:
        left: Laid out as batch × rows × terms.
        right: Laid out as batch × columns × terms.
        result: Lays out the result as batch × rows × columns.
        added: A bias, or matrices, laid out as anything that broadcasts to that; None: nothing is added.
        alpha: The factor of the product.
        beta: The factor of what is added.
    """

    left: Operand
    right: Operand
    result: _Layout
    added: Operand | None = None
    alpha: float = 1.0
    beta: float = 1.0

    def product(self, call: OperationCall) -> MatrixProduct:
        """Return the product in a call of this form."""
        left, right = (one.laid_out(plain(call.tensors[one.number])) for one in (self.left, self.right))
        return MatrixProduct(left, right, self.alpha)

    def gradient(self, call: OperationCall, given: Tensor, number: int) -> MatrixProduct | None:
        """Return the product that the gradient of the tensor `number` is, laid out as that is, for that of the result.

        None: it is none.
        """
        result, product = self.result(plain(given)), self.product(call)
        if number == self.left.number:
            return MatrixProduct(result, product.right.mT, self.alpha)
        if number == self.right.number:
            return MatrixProduct(result.mT, product.left.mT, self.alpha)
        is_bias = self.added is not None and number == self.added.number and call.tensors[number].dim() == 1
        if is_bias and result.shape[0] == 1:
            ones = torch.ones((), dtype=result.dtype).expand(1, 1, result.shape[1])
            return MatrixProduct(ones, result.mT, self.beta)
        return None

    def layout_of(self, number: int) -> _Layout:
        """Return how the tensor `number` is laid out."""
        return {one.number: one.laid_out for one in (self.left, self.right, self.added) if one is not None}[number]


def multiplications(left: Tensor, right: Tensor) -> int:
    """Return how many multiplications a product of laid out matrices takes."""
    return left.numel() * right.shape[1]


def form_of(name: str, call: OperationCall) -> ProductForm | None:
    """Return the form of a call of the operation `name`; None if it is no product of matrices."""
    make = _FORMS.get(name.rpartition(".")[2])
    tensors = call.tensors
    if make is None or not all(one.is_floating_point() for one in tensors):
        return None
    return make(call, tensors)


def is_product(name: str) -> bool:
    """Return whether calls of the operation `name` may be products of matrices."""
    return name.rpartition(".")[2] in _FORMS


def _linear(_call: OperationCall, tensors: Sequence[Tensor]) -> ProductForm | None:
    if not 2 <= len(tensors) <= 3 or tensors[0].dim() < _MATRIX or tensors[1].dim() != _MATRIX:
        return None
    added = Operand(2, _in_batch) if len(tensors) > _MATRIX else None
    return ProductForm(Operand(0, _rows), Operand(1, _in_batch), _rows, added)


def _matmul(_call: OperationCall, tensors: Sequence[Tensor]) -> ProductForm | None:
    if len(tensors) != 2 or min(one.dim() for one in tensors) < _MATRIX:
        return None
    left, right = tensors
    if right.dim() == _MATRIX:
        return ProductForm(Operand(0, _rows), Operand(1, _turned), _rows)
    if left.shape[:-2] != right.shape[:-2]:
        return None
    return ProductForm(Operand(0, _in_batch), Operand(1, _turned), _in_batch)


def _addmm(call: OperationCall, tensors: Sequence[Tensor]) -> ProductForm | None:
    numbers = {name: call.kwargs.get(name, 1) for name in ("alpha", "beta")}
    if len(tensors) != 3 or len(call.args) != 3 or not all(isinstance(one, int | float) for one in numbers.values()):
        return None
    return ProductForm(Operand(1, _in_batch), Operand(2, _turned), _in_batch, Operand(0, _in_batch), **numbers)


def _einsum(call: OperationCall, tensors: Sequence[Tensor]) -> ProductForm | None:
    equation = call.args[0] if call.args else None
    if not isinstance(equation, str) or len(tensors) != 2 or "." in equation:
        return None
    taken, arrow, made = equation.replace(" ", "").partition("->")
    labels = [*taken.split(","), made]
    if not arrow or len(labels) != 3 or any(len(set(one)) != len(one) for one in labels):
        return None
    left, right, _ = labels
    batch = [label for label in made if label in left and label in right]
    terms = [label for label in left if label in right and label not in made]
    rows, columns = ([label for label in made if label in one and label not in batch] for one in (left, right))
    sizes = [dict(zip(one, tensor.shape, strict=False)) for one, tensor in zip((left, right), tensors, strict=True)]
    is_summed_alone = len([*batch, *rows, *terms]) != len(left) or len([*batch, *columns, *terms]) != len(right)
    if is_summed_alone or any(sizes[0][label] != sizes[1][label] for label in (*batch, *terms)):
        return None
    return ProductForm(
        Operand(0, partial(_grouped, labels=left, groups=(batch, rows, terms))),
        Operand(1, partial(_grouped, labels=right, groups=(batch, columns, terms))),
        partial(_grouped, labels=made, groups=(batch, rows, columns)),
    )


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(1, -1, tensor.shape[-1])


def _in_batch(tensor: Tensor) -> Tensor:
    return tensor[(None,) * (_BATCHED - tensor.dim())] if tensor.dim() < _BATCHED else tensor.flatten(0, -3)


def _turned(tensor: Tensor) -> Tensor:
    return _in_batch(tensor).mT


def _grouped(tensor: Tensor, *, labels: str, groups: Sequence[Sequence[str]]) -> Tensor:
    """Return a tensor with the dimensions of each group as one."""
    order = [labels.index(label) for group in groups for label in group]
    sizes = [math.prod(tensor.shape[labels.index(label)] for label in group) for group in groups]
    return tensor.permute(order).reshape(sizes)


_FORMS: Mapping[str, Callable[[OperationCall, Sequence[Tensor]], ProductForm | None]] = {
    "linear": _linear,
    "mm": _matmul,
    "bmm": _matmul,
    "matmul": _matmul,
    "__matmul__": _matmul,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "einsum": _einsum,
}
