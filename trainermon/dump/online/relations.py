"""Relations that a right kernel keeps, whatever the right result is: no reference is needed for them.

Scaling by a power of two and a change of sign alter no bit of a mantissa, whatever the order of a sum: they are exact.
The others may change the order of sums, and have the allowance of the call twice.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainermon.accuracy.calls import OperationCall
from trainermon.accuracy.judge import Judgement, Status, coarsest_roundoff, family_of_call
from trainermon.accuracy.places import index_at, place_of
from trainermon.accuracy.reference import Reference
from trainermon.accuracy.screen import QuickReference
from trainermon.dump.online.observed_calls import twin_of

LINEAR = frozenset(
    ["matmul", "__matmul__", "mm", "bmm", "linear", "mv", "conv1d", "conv2d", "conv3d", "sum", "mean", "dot", "einsum"]
)
PRODUCTS = frozenset(["matmul", "__matmul__", "mm", "bmm"])
BY_ROWS = frozenset(
    [
        "linear",
        "layer_norm",
        "rms_norm",
        "gelu",
        "silu",
        "relu",
        "softmax",
        "log_softmax",
        "sigmoid",
        "tanh",
        "exp",
        "embedding",
        "matmul",
        "__matmul__",
        "mm",
        "bmm",
        "conv1d",
        "conv2d",
        "conv3d",
        "scaled_dot_product_attention",
        "group_norm",
    ]
)
SOFTMAXES = frozenset(["softmax", "log_softmax"])
_FACTOR = 8.0


class Relation(NamedTuple):
    """A call that is related to another one, and what it must give.

    Attributes:
        name: `scale`, `sign`, `rows`, `strided`, `transposed` or `shift`.
        call: The related call.
        expected: Makes, of what the call gave, what the related one must give.
        is_exact: Bit for bit.
    """

    name: str
    call: OperationCall
    expected: Callable[[Tensor], Tensor]
    is_exact: bool = False


def relations_of(name: str, call: OperationCall) -> Iterator[Relation]:
    """Yield the relations that hold for a call of the function `name` (`linear`); none for most functions."""
    first = call.args[0] if call.args else None
    if not isinstance(first, Tensor) or not first.is_floating_point() or not first.numel():
        return
    if name in LINEAR and not _has_bias(name, call):
        yield Relation(
            "scale", _with_first(call, twin_of(first, _FACTOR)), lambda given: given * _FACTOR, is_exact=True
        )
        yield Relation("sign", _with_first(call, twin_of(first, -1.0)), lambda given: -given, is_exact=True)
    if name in BY_ROWS and first.dim() > 1 and first.shape[0] > 1 and _is_free_of_first(name, call, first):
        half = first.shape[0] // 2
        yield Relation("rows", _sliced(call, first, half), lambda given: given[:half])
    if name in (LINEAR | BY_ROWS) and first.dim() > 1:
        strided = torch.empty_like(first.transpose(0, -1), memory_format=torch.contiguous_format).transpose(0, -1)
        yield Relation("strided", _with_first(call, strided.copy_(first)), lambda given: given)
    second = call.args[1] if len(call.args) > 1 else None
    if name in PRODUCTS and isinstance(second, Tensor) and min(first.dim(), second.dim()) > 1 and not call.kwargs:
        swapped = call._replace(args=(second.mT, first.mT, *call.args[2:]))
        yield Relation("transposed", swapped, lambda given: given.mT)
    if name in SOFTMAXES and bool(first.isfinite().all()):
        shift = 2.0 ** torch.floor(torch.log2(first.abs().max().clamp(min=1e-3))).item()
        shifted = first + shift
        if torch.equal(shifted - shift, first):  # no bit was lost by the shift itself
            yield Relation("shift", _with_first(call, shifted), lambda given: given)


def relations_of_backward(_: str, call: OperationCall) -> Iterator[Relation]:
    """Yield what holds for every backward, the call of a `GradientFunction`: it is linear in the gradients given."""
    *inputs, gradients, exactness = call.args
    given = [one for one in gradients if one is not None]
    is_narrow = any(one.dtype is torch.float16 for one in call.tensors)  # between, its range is left
    for name, factor in (("sign", -1.0),) if is_narrow else (("scale", _FACTOR), ("sign", -1.0)):
        scaled = [None if one is None else twin_of(one, factor) for one in gradients]
        made = [one for one in scaled if one is not None]
        if all(torch.equal(one.isfinite(), other.isfinite()) for one, other in zip(given, made, strict=True)):
            related = call._replace(args=(*inputs, scaled, exactness))
            yield Relation(name, related, functools.partial(operator.mul, factor), is_exact=True)


def permutations_of(name: str, call: OperationCall) -> Iterator[Relation]:
    """Yield permutations of the inputs of the function `name` that its result must follow, or must not notice.

    `order` reverses what is summed over, and the result stays; `batch` reverses rows, and with them the result's.
    """
    first = call.args[0] if call.args else None
    if not isinstance(first, Tensor) or not first.is_floating_point() or first.dim() < 2 or not first.numel():
        return
    reordered = _reordered(name, call, first)
    if reordered is not None:
        yield Relation("order", reordered, lambda given: given)
    if name in BY_ROWS and first.shape[0] > 1 and _is_free_of_first(name, call, first):
        yield Relation("batch", _by_rows(call, first, _reversed), _reversed)


def _reversed(value: Tensor) -> Tensor:
    return value.flip(0)


def _reordered(name: str, call: OperationCall, first: Tensor) -> OperationCall | None:
    """Return the call with the terms of its sums in the opposite order; None if it is not known how."""
    second = call.args[1] if len(call.args) > 1 else call.kwargs.get("weight")
    if name == "linear" and isinstance(second, Tensor):
        if len(call.args) > 1:
            return call._replace(args=(first.flip(-1), second.flip(-1), *call.args[2:]))
        return _with_first(call, first.flip(-1))._replace(kwargs={**call.kwargs, "weight": second.flip(-1)})
    if name in PRODUCTS and isinstance(second, Tensor) and second.dim() > 1 and len(call.args) == 2:
        return call._replace(args=(first.flip(-1), second.flip(-2)))
    if name in ("sum", "mean") and len(call.args) == 1 and not call.kwargs:
        return _with_first(call, first.flip(tuple(range(first.dim()))))
    return None


def _has_bias(name: str, call: OperationCall) -> bool:
    if name in ("linear", "conv1d", "conv2d", "conv3d"):
        return (call.args[2] if len(call.args) > 2 else call.kwargs.get("bias")) is not None
    return call.kwargs.get("dtype") is not None


def _with_first(call: OperationCall, first: Tensor) -> OperationCall:
    return call._replace(args=(first, *call.args[1:]))


def _is_free_of_first(name: str, call: OperationCall, first: Tensor) -> bool:
    """Return whether rows along the first dimension do not depend on one another."""
    if name in SOFTMAXES:
        dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim")
        return isinstance(dim, int) and dim % first.dim() != 0
    if name in ("layer_norm", "rms_norm"):
        shape = call.args[1] if len(call.args) > 1 else call.kwargs.get("normalized_shape", ())
        return len(tuple(shape)) < first.dim()
    if name in PRODUCTS:
        second = call.args[1] if len(call.args) > 1 else None
        return first.dim() == 2 or (isinstance(second, Tensor) and second.dim() == first.dim())
    return (
        first.dim() == 4
        if name in ("conv2d", "scaled_dot_product_attention")
        else name not in ("conv1d", "conv3d", "group_norm")
    )


def _sliced(call: OperationCall, first: Tensor, half: int) -> OperationCall:
    """Return the call with the first rows of its first argument, and of whatever else has a row for each of them."""
    return _by_rows(call, first, lambda value: value[:half])


def _by_rows(call: OperationCall, first: Tensor, change: Callable[[Tensor], Tensor]) -> OperationCall:
    """Return the call with its first argument changed by rows, and whatever else has a row for each of its."""
    with_rows = {"bmm", "matmul", "__matmul__", "scaled_dot_product_attention"}

    def cut(value: Any) -> Any:
        batched = isinstance(value, Tensor) and value.dim() == first.dim() > 2 and value.shape[0] == first.shape[0]
        return change(value) if batched else value

    name = getattr(call.function, "__name__", "")
    rest = tuple(map(cut, call.args[1:])) if name in with_rows else tuple(call.args[1:])
    kwargs = {key: cut(value) for key, value in call.kwargs.items()} if name in with_rows else dict(call.kwargs)
    return call._replace(args=(change(first), *rest), kwargs=kwargs)


def judge_relation(relation: Relation, name: str, call: OperationCall, pair: tuple[Tensor, Tensor]) -> Judgement:
    """Return the verdict on `pair`: what the call gave, and what the related one gave.

    Cost: none if it is exact; else a run in a finer type, and up to five more where that settles nothing.
    """
    given, observed = pair
    expected = relation.expected(given)
    if expected.shape != observed.shape:
        return _verdict(relation, observed, expected, torch.ones(observed.shape, dtype=torch.bool))
    same = (observed == expected) | (observed.isnan() & expected.isnan())
    if relation.is_exact:
        tiny = torch.finfo(given.dtype).tiny * _FACTOR
        same |= expected.isinf() | (expected.abs() < tiny * _FACTOR)  # beyond the range of the type bits are lost
        return _verdict(relation, observed, expected, ~same)
    off = (observed.double() - expected.double()).abs()
    try:
        quick = QuickReference(name, call, given)
        above = ~((off <= 2 * relation.expected(quick.bound(0, given.dtype)).abs()) | same)
    except Exception:  # noqa: BLE001  # there is no finer kernel on this device: the judge's runs on the CPU
        above = ~same
    if bool(above.any()):
        unit = max(2.0**-24, coarsest_roundoff([*call.tensors, given]))
        allowed = Reference(call, family_of_call(name, call), name).allowed(0, given.dtype, unit).to(off.device)
        above = ~((off <= 2 * relation.expected(allowed).abs()) | same)
    return _verdict(relation, observed, expected, above)


def _verdict(relation: Relation, observed: Tensor, expected: Tensor, wrong: Tensor) -> Judgement:
    dtype = str(observed.dtype).removeprefix("torch.")
    if not bool(wrong.any()):
        return Judgement(status=Status.PASS, dtype=dtype, shape=tuple(observed.shape))
    at = int(wrong.flatten().to(torch.uint8).argmax())
    is_comparable = expected.shape == observed.shape
    return Judgement(
        status=Status.ERROR,
        reason=f"relation {relation.name} does not hold",
        dtype=dtype,
        shape=tuple(observed.shape),
        worst=math.inf,
        index=index_at(at, observed.shape),
        device_value=observed.flatten()[at].item(),
        golden_value=expected.flatten()[at].item() if is_comparable else math.nan,
        share_above=float(wrong.double().mean()),
        place=place_of(wrong.cpu()),
    )
