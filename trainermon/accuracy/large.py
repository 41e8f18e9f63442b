"""Products that are too large to be run in float64 as a whole: judged by projections, and by some rows and columns.

A product times a vector of signs costs a thousandth of the product (Freivalds' check). Errors of rounding add up in it
as their squares do; a tile that is wrong stands out. Gradients of a product are products, too, and where several calls
take a tensor, its gradient is a sum of products.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trainermon.accuracy.allowances import ALLOWANCES
from trainermon.accuracy.calls import OperationCall, plain
from trainermon.accuracy.chunks import judge_in_chunks
from trainermon.accuracy.families import Family
from trainermon.accuracy.judge import (
    Judgement,
    Review,
    Status,
    coarsest_roundoff,
    judge_call,
    judge_gradient,
)
from trainermon.accuracy.matrix_products import MatrixProduct, ProductForm, form_of, is_product, multiplications
from trainermon.accuracy.products import BackwardCall, GradientSum
from trainermon.accuracy.reference import unit_roundoff
from trainermon.accuracy.whole_errors import is_swamped

MAX_PRODUCTS = 2**33
"""Multiplications of a call beyond which it is projected."""
_PROJECTIONS = 4
_SAMPLED = 256
_SAMPLED_OF_BATCH = 4
_TILE = 128
_CHUNK = 2048
_SINGLE = 2.0**-24
_WORSE = (Status.PASS, Status.WARNING, Status.ERROR)


class _Sum(NamedTuple):
    """Products that add up, and what is added to them; all laid out as batches of matrices."""

    parts: Sequence[MatrixProduct]
    added: Tensor | None = None
    beta: float = 1.0


_Block = tuple[int, Tensor, Tensor]
"""Place in the batch, rows and columns."""


def judge_any_call(
    name: str, call: OperationCall, output: Any, *, inside: torch.dtype | None = None, review: Review | None = None
) -> list[Judgement]:
    """Return what `judge_call` does; of a product beyond 2^33 multiplications, judgements of parts and projections.

    These say `projected`, and are not reviewed. Cost: of 8192^3 some 10 s of one core and 0.5 GB. Operations on
    elements are judged in chunks of 2^22.
    """
    given = output[0] if isinstance(output, list | tuple) and len(output) == 1 else output
    form = form_of(name, call) if isinstance(given, Tensor) and given.is_floating_point() else None
    if form is None:
        return judge_in_chunks(name, call, output, inside=inside, review=review)
    product = form.product(call)
    result = form.result(plain(given))
    rows, columns = product.left.shape[1], product.right.shape[1]
    fits = result.shape == (product.left.shape[0], rows, columns)
    if not fits or multiplications(product.left, product.right) <= MAX_PRODUCTS:
        return judge_call(name, call, output, inside=inside, review=review)
    added = form.added and form.added.laid_out(plain(call.tensors[form.added.number])).expand(result.shape)
    every = _Sum([product], added, form.beta)

    def judged(block: _Block) -> Judgement:
        [found] = judge_call(*_block_call(every, block), _of_block(result, block), inside=inside)
        return found

    coarsest = max(coarsest_roundoff([*call.tensors, given]), unit_roundoff(inside) if inside else 0.0)
    return [_judged(every, result, judged, coarsest, tuple(given.shape))]


def may_be_large(name: str, given: Sequence[int], made: Sequence[int]) -> bool:
    """Return whether a call of `name` that takes and makes tensors of so many elements may be a large product."""
    return is_product(name) and math.sqrt(math.prod(sorted(given)[-2:]) * sum(made)) > MAX_PRODUCTS


class LargeBackward(NamedTuple):
    """The backward of a product of matrices too large for float64 as a whole."""

    backward: BackwardCall
    form: ProductForm

    @classmethod
    def of(cls, name: str, backward: BackwardCall) -> LargeBackward | None:
        """Return the backward of a call of the operation `name`; None if it is no such product."""
        form = form_of(name, backward.call)
        if form is None or len(backward.gradients) != 1 or backward.gradients[0] is None:
            return None
        product = form.product(backward.call)
        result = form.result(backward.gradients[0])
        fits = result.shape == (product.left.shape[0], product.left.shape[1], product.right.shape[1])
        is_large = multiplications(product.left, product.right) > MAX_PRODUCTS
        return cls(backward, form) if fits and is_large else None

    def gradient(self, number: int) -> MatrixProduct | None:
        """Return the product that the gradient of the tensor `number` is; None: it is none."""
        [given] = self.backward.gradients
        found = None if given is None else self.form.gradient(self.backward.call, given, number)
        return found and found._replace(inside=self.backward.inside)


def judge_large_gradient(given: Tensor, terms: Sequence[tuple[LargeBackward, int]]) -> Judgement | None:
    """Return a judgement of the recorded gradient of a tensor, by parts and projections; None: it cannot be had so.

    `terms` are the calls that take the tensor, each with its number among their own. Cost: as of their forwards.
    """
    parts = [part for part in (backward.gradient(number) for backward, number in terms) if part is not None]
    if len(parts) < len(terms):
        return None
    given = plain(given)
    laid_out = [backward.form.layout_of(number)(given) for backward, number in terms]
    result, every = laid_out[0], _Sum(parts)
    alike = all(one.shape == result.shape and one.stride() == result.stride() for one in laid_out)
    if not alike or any(part.result_shape != result.shape for part in parts):
        return None
    coarsest = max([coarsest_roundoff([given]), *(backward.backward.coarsest for backward, _ in terms)])

    def judged(block: _Block) -> Judgement:
        part = _of_block(result, block)
        return judge_gradient(part, _BlockSum([_PartBlock(one, block) for one in every.parts], part), coarsest)

    return _judged(every, result, judged, coarsest, tuple(given.shape))


class _PartBlock:
    """A block of a product in float64; has what a sum of gradients asks of a part."""

    def __init__(self, part: MatrixProduct, block: _Block) -> None:
        number, rows, columns = block
        self._left = part.left[number][rows].double() * part.factor
        self._right = part.right[number][columns].double()
        self._inside = unit_roundoff(part.inside) if part.inside else 0.0
        self.results = [self._left @ self._right.mT]
        self._magnitude: Tensor | None = None

    def allowed(self, number: int, unit: float) -> Tensor:
        """Return the allowed error of each element, see `VectorProduct.allowed`."""
        if self._magnitude is None:
            self._magnitude = self._left.abs() @ self._right.abs().mT
        factor = ALLOWANCES[Family.CONTRACTION].sums * math.sqrt(self._left.shape[1])
        return 2 * self._inside * self.results[number].abs() + factor * unit * self._magnitude

    def allowed_norm(self, unit: float) -> float:
        """Return the norm that the errors together may have, see `Reference.allowed_norm`."""
        walk = max(float(self._walk().norm()), float(self.results[0].norm()))
        return 2 * (math.sqrt(self._left.shape[1]) * unit + self._inside) * walk

    def num_roundings(self, _number: int) -> float:
        """Return one: the terms are kept in float32."""
        return 1.0

    def is_swamped(self, number: int, unit: float) -> bool:
        """Return whether a sum that is rounded to `unit` may lose terms."""
        return is_swamped(self.results[number], self._walk(), unit)

    def _walk(self) -> Tensor:
        """Return the root of the sum of squares of the terms of each element."""
        return (self._left.square() @ self._right.square().mT).sqrt()

    def alternatives(self, _number: int) -> list[Tensor]:
        """Return nothing: a product does not jump."""
        return []


class _BlockSum(GradientSum):
    """A block of a sum of products."""

    def __init__(self, parts: Sequence[_PartBlock], like: Tensor) -> None:
        super().__init__([(part, 0) for part in parts], like)
        self._blocks = parts

    def allowed_norm(self, _number: int, unit: float) -> float:
        """Return the norm that the errors together may have."""
        return sum(part.allowed_norm(unit) for part in self._blocks)


def _block_call(every: _Sum, block: _Block) -> tuple[str, OperationCall]:
    """Return name and call that give a block of a product."""
    [part] = every.parts
    number, rows, columns = block
    left, right = part.left[number][rows], part.right[number][columns]
    if every.added is None:
        return "linear", OperationCall(functional.linear, [left, right], {})
    added = every.added[number][rows][:, columns]
    return "addmm", OperationCall(torch.addmm, [added, left, right.mT], {"alpha": part.factor, "beta": every.beta})


def _of_block(result: Tensor, block: _Block) -> Tensor:
    number, rows, columns = block
    return result[number][rows][:, columns]


def _judged(
    every: _Sum, result: Tensor, judged: Callable[[_Block], Judgement], coarsest: float, shape: tuple[int, ...]
) -> Judgement:
    """Return the worst verdict on blocks of rows and columns, or that on the projections if it is worse."""
    found = _not_finite(every, result)
    for block in _blocks(result) if found is None else ():
        judgement = judged(block)
        if judgement.index is not None:
            number, rows, columns = block
            place = int(rows[judgement.index[0]]), int(columns[judgement.index[1]])
            judgement = dataclasses.replace(judgement, index=_index(result, number, *place))
        if found is None or _WORSE.index(judgement.status) > _WORSE.index(found.status):
            found = judgement
    if found is None or found.status is not Status.ERROR:
        for number in range(result.shape[0]):
            found = _projected(every, result, number, coarsest, found)
    if found is None:
        found = Judgement(status=Status.PASS)
    reason = f"{found.reason}, projected" if found.reason else ""
    dtype = str(result.dtype).removeprefix("torch.")
    return dataclasses.replace(found, reason=reason, shape=shape, dtype=dtype, place=None, standard="projected")


def _index(result: Tensor, number: int, row: int, column: int) -> tuple[int, ...]:
    """Return an index in the matrix of a result, or in the batch of them."""
    return (row, column) if result.shape[0] == 1 else (number, row, column)


def _not_finite(every: _Sum, result: Tensor) -> Judgement | None:
    """Return the verdict on a result that is not finite, of factors that are; None if it does not come to that."""
    taken = [tensor for part in every.parts for tensor in (part.left, part.right)]
    taken += [] if every.added is None else [every.added]
    if bool(result.isfinite().all()) or not all(bool(one.isfinite().all()) for one in taken):
        return None
    wrong = ~result.isfinite()
    number, row, column = (int(one) for one in wrong.nonzero()[0])
    return Judgement(
        status=Status.ERROR,
        reason="not finite",
        worst=math.inf,
        index=_index(result, number, row, column),
        device_value=float(result[number, row, column]),
        device_nonfinite=int(wrong.sum()),
        share_above=float(wrong.double().mean()),
    )


def _blocks(result: Tensor) -> Iterator[_Block]:
    """Yield some rows and all columns, then all rows and some columns, in chunks: a few anywhere and the last tile.

    Of a batch the first matrix, the last, and two anywhere.
    """
    generator = torch.Generator().manual_seed(0)
    batch = result.shape[0]
    inner = torch.randperm(batch, generator=generator)[: _SAMPLED_OF_BATCH - 2].tolist()
    for number in sorted({0, batch - 1, *inner}) if batch > _SAMPLED_OF_BATCH else range(batch):
        for flip in (False, True):
            few, all_of = result.shape[:0:-1] if flip else result.shape[1:]
            chosen = torch.randperm(few, generator=generator)[:_SAMPLED]
            chosen = torch.tensor(sorted({*chosen.tolist(), *range(few - few % _TILE, few)}))
            for chunk in _chunks(torch.arange(all_of)):
                yield (number, chunk, chosen) if flip else (number, chosen, chunk)
            if few <= _SAMPLED:  # that was every element
                break


def _projected(every: _Sum, results: Tensor, number: int, coarsest: float, found: Judgement | None) -> Judgement | None:
    """Return a verdict on a product times vectors of signs, from both sides; `found` if these say nothing worse."""
    status, worst, at = Status.PASS, 0.0, (0, 0)
    for flip in (False, True):
        result = results[number].mT if flip else results[number]
        projection = _Projection(every, number, flip=flip)
        error = (_times(result, projection.signs) - projection.exact).abs()
        error = torch.where(projection.exact.isfinite(), error, 0.0).amax(1)  # infinite where its factors are
        rounding = projection.rounding(result)
        for unit, verdict in ((_SINGLE, Status.WARNING), (max(coarsest, _SINGLE), Status.ERROR)):
            ratio = torch.where(error == 0, 0.0, error / (5 * (rounding + projection.terms * unit)))
            ratio = torch.where(ratio.isnan(), math.inf, ratio)
            if float(ratio.max()) > 1:
                status, worst = verdict, float(ratio.max())
                at = (0, int(ratio.argmax())) if flip else (int(ratio.argmax()), 0)
    if found is not None and _WORSE.index(status) <= _WORSE.index(found.status):
        return found
    reason = {Status.WARNING: "coarse", Status.ERROR: "inexact"}.get(status, "")
    base = found or Judgement(status=status)
    value = float(results[number][at])
    index = _index(results, number, *at)
    return dataclasses.replace(base, status=status, reason=reason, worst=worst, index=index, device_value=value)


class _Projection:
    """A sum of products times vectors of signs; `flip`: its transpose.

    Attributes:
        signs: The vectors.
        exact: The sum times each of them, in float64.
        terms: By row, the allowed error of its sums, in roundoffs.
    """

    def __init__(self, every: _Sum, number: int, *, flip: bool) -> None:
        pairs = [(part.left[number], part.right[number], part.factor) for part in every.parts]
        pairs = [(right, left, factor) if flip else (left, right, factor) for left, right, factor in pairs]
        generator = torch.Generator().manual_seed(1 + flip)
        width = pairs[0][1].shape[0]
        self.signs = (torch.randint(0, 2, (width, _PROJECTIONS), generator=generator) * 2 - 1).double()
        self._parts = [factor * _times(one, _transposed_times(other, self.signs)) for one, other, factor in pairs]
        self._inside = max(unit_roundoff(part.inside) if part.inside else 0.0 for part in every.parts)
        self.exact = torch.stack(self._parts).sum(0)
        self.terms = torch.zeros(())
        for one, other, factor in pairs:
            size = _norms(one) * float(_norms(other).square().sum().sqrt())
            self.terms = self.terms + 4 * abs(factor) * math.sqrt(one.shape[1]) * size
        if every.added is not None:
            added = every.added[number]
            self.exact = self.exact + every.beta * _times(added.mT if flip else added, self.signs)

    def rounding(self, result: Tensor) -> Tensor:
        """Return by row what rounding of the result, and of each part of a sum, comes to."""
        unit = unit_roundoff(result.dtype)
        found = 2 * max(unit, self._inside) * _norms(result)
        if len(self._parts) > 1:
            found = found + len(self._parts) * unit * sum(one.square().mean(1).sqrt() for one in self._parts)
        return found


def _norms(matrix: Tensor) -> Tensor:
    return torch.cat([chunk.double().norm(dim=1) for chunk in _chunks(matrix)])


def _times(matrix: Tensor, vectors: Tensor) -> Tensor:
    return torch.cat([chunk.double() @ vectors for chunk in _chunks(matrix)])


def _transposed_times(matrix: Tensor, vectors: Tensor) -> Tensor:
    parts = zip(_chunks(matrix), _chunks(vectors), strict=True)
    return sum((chunk.double().mT @ part for chunk, part in parts), torch.zeros((), dtype=torch.float64))


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    for first in range(0, tensor.shape[0], _CHUNK):
        yield tensor[first : first + _CHUNK]
