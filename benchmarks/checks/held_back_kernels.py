"""Wrong kernels on which no constant of the checker was chosen, after faults that kernels have had."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.checks.wrong_kernels import WrongKernel
from trainermon.accuracy.calls import OperationCall


def held_back_kernels(dtype: torch.dtype, seed: int) -> Iterator[WrongKernel]:
    """Yield them all in one type; the numbers depend on `seed`. The right verdict on each is an error."""
    torch.manual_seed(seed)
    for make in (_products, _norms, _attention, _sums, _moves):
        yield from make(dtype)


def _case(what: str, function: Callable[..., object], args: Sequence[object], wrong: Tensor) -> WrongKernel:
    dtype = next(one.dtype for one in args if isinstance(one, Tensor) and one.is_floating_point())
    return WrongKernel(what, function.__name__, OperationCall(function, list(args), {}), wrong.to(dtype))


def _products(dtype: torch.dtype) -> Iterator[WrongKernel]:
    rows, weight = torch.randn(32, 8192).to(dtype), torch.randn(48, 8192).to(dtype)
    left, right = rows.double(), weight.double()
    given = (rows, weight)
    yield _case("64 of 8 192 terms are lost", functional.linear, given, left[:, 64:] @ right[:, 64:].T)
    twice = left @ right.T + left[:, :128] @ right[:, :128].T
    yield _case("a block of 128 terms is added twice", functional.linear, given, twice)
    positive = (rows[:, :2048].abs(), weight[:, :2048].abs())
    yield _case("each of 2 048 terms is rounded", functional.linear, positive, _one_by_one(*positive))
    bias = torch.randn(48).to(dtype)
    without = rows[:, :64].double() @ weight[:, :64].double().T
    without[:, :32] += bias[:32].double()
    yield _case("the bias is lost in the last tile", functional.linear, (rows[:, :64], weight[:, :64], bias), without)
    image, kernel = torch.randn(2, 6, 10, 10).to(dtype), torch.randn(8, 6, 3, 3).to(dtype)
    fewer = functional.conv2d(image[:, :5].double(), kernel[:, :5].double())
    yield _case("a channel is left out", torch.conv2d, (image, kernel), fewer)


def _one_by_one(rows: Tensor, weight: Tensor) -> Tensor:
    total = torch.zeros(len(rows), len(weight), dtype=torch.float64)
    coarse = torch.float16 if rows.dtype is torch.float32 else rows.dtype
    for term in range(rows.shape[1]):
        total = (total + rows[:, term, None].double() * weight[:, term].double()).to(coarse).double()
    return total


def _norms(dtype: torch.dtype) -> Iterator[WrongKernel]:
    rows = torch.randn(64, 768).to(dtype)
    wide = rows.double()
    exact = functional.layer_norm(wide, (768,))
    yield _case("2 % too large everywhere", functional.layer_norm, (rows, (768,)), exact * 1.02)
    small = (rows * 0.02).to(dtype)
    about = small.double() - small.double().mean(-1, keepdim=True)
    outside = about / (about.square().mean(-1, keepdim=True).sqrt() + 1e-5)
    yield _case("eps is added to the root", functional.layer_norm, (small, (768,)), outside)
    rest = (wide - wide[:, :512].mean(-1, keepdim=True)) / wide[:, :512].std(-1, correction=0, keepdim=True)
    yield _case("statistics of the first 512 of 768", functional.layer_norm, (rows, (768,)), rest)
    gain = (torch.rand(768) + 0.5).to(dtype)
    root = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    yield _case(
        "a gain is added, not multiplied", functional.rms_norm, (rows, (768,), gain, 1e-5), root + gain.double()
    )


def _attention(dtype: torch.dtype) -> Iterator[WrongKernel]:
    query, key, value = (torch.randn(2, 3, 24, 20).to(dtype) for _ in range(3))
    attend = functional.scaled_dot_product_attention
    given = tuple(one.double() for one in (query, key, value))
    yield _case("scaled by the padded head of 32", attend, (query, key, value), attend(*given, scale=32**-0.5))
    cut = attend(given[0], given[1][:, :, :16], given[2][:, :, :16])
    yield _case("the last keys are left out", attend, (query, key, value), cut)
    tiled = attend(*given)
    tiled[:, :, 16:] = attend(given[0][:, :, 16:], given[1][:, :, 8:], given[2][:, :, 8:])
    yield _case("the last tile misses the first keys", attend, (query, key, value), tiled)
    scores = torch.randn(8, 40).to(dtype)
    power = 2.0 ** scores.double()
    yield _case("powers of two for those of e", torch.softmax, (scores, -1), power / power.sum(-1, keepdim=True))


def _sums(dtype: torch.dtype) -> Iterator[WrongKernel]:
    values = torch.randn(4, 1 << 16).to(dtype)
    lost = values[:, : -(1 << 13)].double().sum(-1)
    yield _case("an eighth of 65 536 is left out", torch.sum, (values, -1), lost)
    counts = torch.rand(6, 300).to(dtype)
    yield _case("divided by 256, not 300", torch.mean, (counts, -1), counts.double().sum(-1) / 256)
    late = counts.double().cumsum(-1)
    late[:, 256:] -= late[:, 255:256]
    yield _case("a running sum starts again at 256", torch.cumsum, (counts, -1), late)


def _moves(dtype: torch.dtype) -> Iterator[WrongKernel]:
    table, places = torch.randn(70, 8).to(dtype), torch.arange(70)
    yield _case("rows beyond 64 are those from 0", functional.embedding, (places, table), table[places % 64])
    image = torch.randn(2, 3, 9, 9).to(dtype)
    padded = functional.avg_pool2d(image.double(), 3, 2, 1, count_include_pad=False)
    yield _case("padding is not counted", functional.avg_pool2d, (image, 3, 2, 1), padded)
    shifted = functional.interpolate(image.double(), scale_factor=2, mode="bilinear", align_corners=True)
    yield _case("corners are aligned", _doubled, (image,), shifted)


def _doubled(image: Tensor) -> Tensor:
    return functional.interpolate(image, scale_factor=2, mode="bilinear", align_corners=False)


_doubled.__name__ = "interpolate"
