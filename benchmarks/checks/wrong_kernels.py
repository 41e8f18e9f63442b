"""Kernels that compute something else, as kernels have done: each beside what a verdict on it must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trainermon.accuracy.calls import OperationCall

WRONG = ("error",)
"""What most are: an error, and nothing else will do."""
NOTICED = ("error", "warning")
HARMLESS = ("pass", "warning")
_RSQRT_MAGIC = 0x5F3759DF
_TF32_BITS = 13


class WrongKernel(NamedTuple):
    """A kernel that is not what it should be.

    Attributes:
        what: What is wrong with it.
        name: The operation.
        call: A call of the sound operation.
        result: What the wrong kernel gives for it.
        expected: The verdicts that are right.
    """

    what: str
    name: str
    call: OperationCall
    result: Any
    expected: Sequence[str] = WRONG


def wrong_kernels(dtype: torch.dtype, seed: int) -> Iterator[WrongKernel]:
    """Yield them all in one type; the numbers depend on `seed`."""
    torch.manual_seed(seed)
    for make in (_products, _norms, _functions, _attention, _losses, _moves, _sums, _forms):
        yield from make(dtype)


def _case(
    what: str, name: str, function: Callable[..., Any], args: Sequence[Any], wrong: Any, expected: Sequence[str] = WRONG
) -> WrongKernel:
    return WrongKernel(what, name, OperationCall(function, list(args), {}), wrong, expected)


def _products(dtype: torch.dtype) -> Iterator[WrongKernel]:
    rows, weight = torch.randn(96, 96, dtype=dtype), torch.randn(40, 96, dtype=dtype)
    exact = rows.double() @ weight.double().T
    lost = (rows[:, :64].double() @ weight[:, :64].double().T).to(dtype)
    yield _case("the last terms of a product are lost", "linear", functional.linear, (rows, weight), lost)
    tiled = exact.to(dtype)
    tiled[32:48, 16:32] = tiled[0:16, 0:16]
    yield _case("one tile is another's", "linear", functional.linear, (rows, weight), tiled)
    if dtype is torch.float32:
        coarse = (_tf32(rows).double() @ _tf32(weight).double().T).float()
        yield _case("TF32 though it was off", "linear", functional.linear, (rows, weight), coarse)
    if dtype is torch.bfloat16:
        total = torch.zeros(96, 40, dtype=dtype)
        for term in range(96):
            total += rows[:, term, None] * weight[:, term]
        yield _case("summed in 16 bits", "linear", functional.linear, (rows, weight), total, NOTICED)
        cut = (exact.float().view(torch.int32) & -65536).view(torch.float32).to(dtype)
        yield _case("cut instead of rounded", "linear", functional.linear, (rows, weight), cut, NOTICED)
    image, kernel = torch.randn(2, 4, 12, 12, dtype=dtype), torch.randn(8, 4, 3, 3, dtype=dtype)
    turned = functional.conv2d(image, kernel.flip(-1))
    yield _case("a kernel is mirrored", "conv2d", functional.conv2d, (image, kernel), turned)


def _norms(dtype: torch.dtype) -> Iterator[WrongKernel]:
    rows = torch.randn(16, 32, dtype=dtype)
    small = rows * 1e-3
    wide = small.double()
    bare = ((wide - wide.mean(-1, keepdim=True)) / wide.std(-1, correction=0, keepdim=True)).to(dtype)
    yield _case("eps is missing", "layer_norm", functional.layer_norm, (small, (32,)), bare)
    wide = rows.double()
    unbiased = ((wide - wide.mean(-1, keepdim=True)) / (wide.std(-1, keepdim=True))).to(dtype)
    yield _case("mean over n - 1", "layer_norm", functional.layer_norm, (rows, (32,)), unbiased)
    centred = functional.layer_norm(rows, (32,))
    yield _case("the mean is taken off", "rms_norm", functional.rms_norm, (rows, (32,), None, 1e-5), centred)
    image = torch.randn(2, 8, 4, 4, dtype=dtype)
    yield _case("other groups", "group_norm", functional.group_norm, (image, 2), functional.group_norm(image, 4))
    probabilities = torch.randn(6, 6, dtype=dtype)
    other = probabilities.softmax(0)
    yield _case("along another dimension", "softmax", torch.softmax, (probabilities, -1), other)
    large = torch.randn(8, 16, dtype=torch.float32).mul(30).add(100).to(dtype)
    naive = large.exp() / large.exp().sum(-1, keepdim=True)
    yield _case("softmax without the largest taken off", "softmax", torch.softmax, (large, -1), naive)


def _functions(dtype: torch.dtype) -> Iterator[WrongKernel]:
    values = torch.randn(400, dtype=dtype) * 2
    tanh = functional.gelu(values, approximate="tanh")
    yield _case("gelu by tanh", "gelu", functional.gelu, (values,), tanh)
    if dtype is torch.float32:
        positive = values.abs() + 0.1
        halved = (_RSQRT_MAGIC - (positive.view(torch.int32) >> 1)).view(torch.float32)
        step = halved * (1.5 - 0.5 * positive * halved * halved)
        yield _case("rsqrt after one step", "rsqrt", torch.rsqrt, (positive,), step)
    yield _case("clamped from below alone", "clamp", torch.clamp, (values, -1.0, 1.0), values.clamp(min=-1.0))
    flipped = values > 0
    flipped[-1] = ~flipped[-1]
    chosen = torch.where(flipped, values, -values)
    yield _case("one is chosen wrongly", "where", torch.where, (values > 0, values, -values), chosen)
    if dtype is torch.float16:
        large = torch.full((40,), 12.0, dtype=dtype)
        full = torch.full((40,), torch.finfo(dtype).max, dtype=dtype)
        yield _case("the largest number for infinity", "exp", torch.exp, (large,), full, ("warning",))
    tiny = torch.full((40,), torch.finfo(dtype).tiny, dtype=dtype)
    yield _case("subnormal numbers are zero", "mul", torch.mul, (tiny, 0.25), torch.zeros_like(tiny), HARMLESS)


def _attention(dtype: torch.dtype) -> Iterator[WrongKernel]:
    query, key, value = (torch.randn(2, 2, 12, 16, dtype=dtype) for _ in range(3))
    seen = torch.ones(12, 12, dtype=torch.bool)
    attend = partial(functional.scaled_dot_product_attention, is_causal=True)
    given = (query, key, value)
    shifted = functional.scaled_dot_product_attention(query, key, value, seen.tril(1))
    yield _case("a mask is shifted by one", "scaled_dot_product_attention", attend, given, shifted)
    unscaled = attend(query, key, value, scale=1.0)
    yield _case("scores are not scaled", "scaled_dot_product_attention", attend, given, unscaled)
    swapped = attend(query, key.flip(1), value)
    yield _case("keys of another head", "scaled_dot_product_attention", attend, given, swapped)


def _losses(dtype: torch.dtype) -> Iterator[WrongKernel]:
    scores, targets = torch.randn(24, 10, dtype=dtype), torch.arange(24) % 10
    targets[::3] = -100
    kept = targets >= 0
    summed = functional.cross_entropy(scores[kept].double(), targets[kept], reduction="sum")
    entropy = functional.cross_entropy
    yield _case("ignored rows are counted", "cross_entropy", entropy, (scores, targets), (summed / 24).to(dtype))
    yield _case("a sum for a mean", "cross_entropy", entropy, (scores, targets), summed.to(dtype))
    other = torch.randn(24, 10, dtype=dtype)
    doubled = functional.mse_loss(scores, other) / 2
    yield _case("half of the loss", "mse_loss", functional.mse_loss, (scores, other), doubled)


def _moves(dtype: torch.dtype) -> Iterator[WrongKernel]:
    table, places = torch.randn(20, 8, dtype=dtype), torch.arange(0, 18, 2)
    other = functional.embedding(places + 1, table)
    yield _case("rows beside those asked for", "embedding", functional.embedding, (places, table), other)
    values = torch.randn(6, 20, dtype=dtype)
    found = values.topk(5)
    wrong, at = found.values.clone(), found.indices.clone()
    order = values.argsort(descending=True)
    at[:, 4] = order[:, 5]
    wrong[:, 4] = values.gather(1, order[:, 5:6])[:, 0]
    yield _case("the sixth for the fifth", "topk", torch.topk, (values, 5), (wrong, at))
    least = values.argmin(1)
    yield _case("the least for the greatest", "argmax", torch.argmax, (values, 1), least)
    ordered = values.sort(1)
    yield _case("places of another order", "sort", torch.sort, (values, 1), (ordered.values, ordered.indices.flip(1)))


def _sums(dtype: torch.dtype) -> Iterator[WrongKernel]:
    values = torch.rand(8, 96, dtype=dtype)
    restarted = values.cumsum(1)
    restarted[:, 64:] = values[:, 64:].cumsum(1)
    yield _case("a running sum starts again", "cumsum", torch.cumsum, (values, 1), restarted)
    yield _case("mean over n - 1", "mean", torch.mean, (values, 1), (values.double().sum(1) / 95).to(dtype))
    total, places = torch.zeros(4, 96, dtype=dtype), torch.tensor([0, 1, 1, 2, 3, 3, 3, 0])
    last = total.index_copy(0, places, values)
    yield _case("writes to one place are lost", "index_add", torch.index_add, (total, 0, places, values), last)
    biased = values.double().var(1, correction=0).to(dtype)
    yield _case("variance over n", "var", torch.var, (values, 1), biased)


def _forms(dtype: torch.dtype) -> Iterator[WrongKernel]:
    values = torch.randn(6, 20, dtype=dtype)
    yield _case("another shape", "relu", torch.relu, (values,), values.relu().flatten())
    yield _case("whole numbers", "relu", torch.relu, (values,), values.relu().int())
    yield _case("a result is missing", "topk", torch.topk, (values, 5), (values.topk(5).values,))


def _tf32(tensor: Tensor) -> Tensor:
    """Return the tensor with the ten bits of mantissa that TF32 keeps."""
    return (tensor.view(torch.int32) & -(1 << _TF32_BITS)).view(torch.float32)
