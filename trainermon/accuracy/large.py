"""Products that are too large to be run in float64 as a whole: judged by projections, and by some rows and columns.

A product times a vector of signs costs a thousandth of the product (Freivalds' check). Errors of rounding add up in it
as their squares do; a tile that is wrong stands out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trainermon.accuracy.calls import OperationCall, plain
from trainermon.accuracy.families import Family
from trainermon.accuracy.judge import Judgement, Review, Status, coarsest_roundoff, judge_call
from trainermon.accuracy.reference import unit_roundoff

MAX_PRODUCTS = 2**33
"""Multiplications of a call beyond which it is projected."""
_PRODUCTS = frozenset(["linear", "mm", "matmul", "__matmul__"])
_PROJECTIONS = 4
_SAMPLED = 256
_TILE = 128
_CHUNK = 2048
_SINGLE = 2.0**-24
_WORSE = (Status.PASS, Status.WARNING, Status.ERROR)


class _Product(NamedTuple):
    """A product of matrices as a linear layer has it: `left` times the transpose of `right`, plus `bias`."""

    left: Tensor
    right: Tensor
    bias: Tensor | None


def judge_any_call(
    name: str, call: OperationCall, output: Any, *, inside: torch.dtype | None = None, review: Review | None = None
) -> list[Judgement]:
    """Return what `judge_call` does; of a product beyond 2^33 multiplications, judgements of parts and projections.

    These say `projected`, and are not reviewed. Cost: of 8192^3 some 10 s of one core and 0.5 GB.
    """
    product = _product_of(name, call)
    given = output[0] if isinstance(output, list | tuple) and len(output) == 1 else output
    if product is None or not isinstance(given, Tensor) or not given.is_floating_point():
        return judge_call(name, call, output, inside=inside, review=review)
    rows, columns = product.left.shape[0], product.right.shape[0]
    if rows * columns * product.left.shape[1] <= MAX_PRODUCTS or given.numel() != rows * columns:
        return judge_call(name, call, output, inside=inside, review=review)
    coarsest = max(coarsest_roundoff([*call.tensors, given]), unit_roundoff(inside) if inside else 0.0)
    return [_judged(product, plain(given).reshape(rows, columns), inside, coarsest)]


def _product_of(name: str, call: OperationCall) -> _Product | None:
    last = name.rpartition(".")[2]
    tensors = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor)]
    if last not in _PRODUCTS or not 2 <= len(tensors) <= (3 if last == "linear" else 2):
        return None
    left, right = plain(tensors[0]), plain(tensors[1])
    if left.dim() < 2 or right.dim() != 2 or not (left.is_floating_point() and right.is_floating_point()):
        return None
    bias = plain(tensors[2]) if len(tensors) > 2 else None
    return _Product(left.flatten(0, -2), right if last == "linear" else right.mT, bias)


def _judged(product: _Product, given: Tensor, inside: torch.dtype | None, coarsest: float) -> Judgement:
    """Return the worst verdict on blocks of rows and columns, or that on the projections if it is worse."""
    found = _not_finite(product, given)
    for rows, columns in _blocks(given) if found is None else ():
        bias = None if product.bias is None else product.bias[columns]
        call = OperationCall(functional.linear, [product.left[rows], product.right[columns], bias], {})
        [judgement] = judge_call("linear", call, given[rows][:, columns], inside=inside)
        if judgement.index is not None:
            place = int(rows[judgement.index[0]]), int(columns[judgement.index[1]])
            judgement = dataclasses.replace(judgement, index=place)
        if found is None or _WORSE.index(judgement.status) > _WORSE.index(found.status):
            found = judgement
    if found is None or found.status is not Status.ERROR:
        found = _projected(product, given, coarsest, found)
    reason = f"{found.reason}, projected" if found.reason else ""
    return dataclasses.replace(found, reason=reason, shape=tuple(given.shape), place=None, standard="projected")


def _not_finite(product: _Product, given: Tensor) -> Judgement | None:
    """Return the verdict on a result that is not finite, of factors that are; None if it does not come to that."""
    if bool(given.isfinite().all()) or not all(one is None or bool(one.isfinite().all()) for one in product):
        return None
    wrong = ~given.isfinite()
    place = divmod(int(wrong.flatten().to(torch.uint8).argmax()), given.shape[1])
    return Judgement(
        status=Status.ERROR,
        reason="not finite",
        worst=math.inf,
        index=place,
        device_value=float(given[place]),
        device_nonfinite=int(wrong.sum()),
        share_above=float(wrong.double().mean()),
    )


def _blocks(given: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield some rows and all columns, then all rows and some columns, in chunks: a few anywhere and the last tile."""
    generator = torch.Generator().manual_seed(0)
    for flip in (False, True):
        few, all_of = given.shape[::-1] if flip else given.shape
        chosen = torch.randperm(few, generator=generator)[:_SAMPLED]
        chosen = torch.tensor(sorted({*chosen.tolist(), *range(few - few % _TILE, few)}))
        for chunk in _chunks(torch.arange(all_of)):
            yield (chunk, chosen) if flip else (chosen, chunk)


def _projected(product: _Product, given: Tensor, coarsest: float, found: Judgement | None) -> Judgement:
    """Return a verdict on the product times vectors of signs, from both sides; `found` if these say nothing worse."""
    left, right, bias = product
    sides = [(left, right, given, bias, None), (right, left, given.mT, None, bias)]
    status, worst, at = Status.PASS, 0.0, (0, 0)
    for number, (one, other, result, across, along) in enumerate(sides):
        generator = torch.Generator().manual_seed(1 + number)
        signs = (torch.randint(0, 2, (other.shape[0], _PROJECTIONS), generator=generator) * 2 - 1).double()
        exact = _times(one, _transposed_times(other, signs))
        if across is not None:
            exact += across.double() @ signs
        if along is not None:
            exact += along.double().unsqueeze(1) * signs.sum(0)
        error = (_times(result, signs) - exact).abs().amax(1)
        terms = 4 * math.sqrt(one.shape[1]) * _norms(one) * float(_norms(other).square().sum().sqrt())
        rounding = 2 * unit_roundoff(given.dtype) * _norms(result)
        for unit, verdict in ((_SINGLE, Status.WARNING), (max(coarsest, _SINGLE), Status.ERROR)):
            ratio = torch.where(error == 0, 0.0, error / (5 * (rounding + terms * unit)))
            ratio = torch.where(ratio.isnan(), math.inf, ratio)
            if float(ratio.max()) > 1:
                status, worst = verdict, float(ratio.max())
                at = (int(ratio.argmax()), 0) if number == 0 else (0, int(ratio.argmax()))
    if found is not None and _WORSE.index(status) <= _WORSE.index(found.status):
        return found
    reason = "coarse" if status is Status.WARNING else "inexact"
    base = found or Judgement(status=status, standard=Family.CONTRACTION.value)
    at_value = float(given[at])
    return dataclasses.replace(base, status=status, reason=reason, worst=worst, index=at, device_value=at_value)


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
