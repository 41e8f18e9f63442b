"""The positional hash is numpy's sum of mixed integers, sees order, and adds up over any split."""

import itertools

import numpy as np
import pytest
import torch

from trainermon.statistics import positions
from trainermon.statistics.positions import WholeRegion, positional_hash, samples_hash

WHOLE = torch.arange(24 * 6, dtype=torch.float32).reshape(24, 6).sin()
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def by_numpy(tensor, indices=None):
    """Return the hash of a CPU tensor by unsigned arithmetic; `indices` are those in the whole tensor."""
    size = tensor.element_size()
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    bits = tensor.contiguous().view(signed).numpy().reshape(-1).view(f"u{size}").astype(np.uint64)
    places = (
        np.arange(bits.size, dtype=np.uint64) if indices is None else np.asarray(indices, dtype=np.uint64).reshape(-1)
    )
    with np.errstate(over="ignore"):
        x = bits + (places + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return int((x ^ (x >> np.uint64(31))).sum(dtype=np.uint64))


@pytest.fixture(params=["compiled", "torch"])
def either_way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(positions, "_compiled", lambda: None)
    elif positions._compiled() is None:
        pytest.skip("the C library is not built")


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_hash_is_numpys(dtype):
    tensor = (WHOLE * 100).to(dtype)

    assert positional_hash(tensor) == by_numpy(tensor)
    assert positional_hash(tensor.T) == by_numpy(tensor.T)
    assert positional_hash(tensor[0, 0]) == by_numpy(tensor[:1, 0])
    assert positional_hash(tensor[:0]) == 0


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("sizes", [(12, 12), (3, 21), (24, 0)])
def test_parts_add_up_to_the_whole(dim, sizes):
    whole = WHOLE if dim == 0 else WHOLE.T.contiguous()
    starts = [0, sizes[0]]

    parts = [
        positional_hash(
            whole.narrow(dim, start, size), WholeRegion(tuple(whole.shape), (start, 0) if dim == 0 else (0, start))
        )
        for start, size in zip(starts, sizes, strict=True)
    ]

    assert sum(parts) % 2**64 == positional_hash(whole) == by_numpy(whole)


@pytest.mark.usefixtures("either_way")
def test_flat_ranges_and_boxes_add_up_alike():
    flat = WHOLE.reshape(-1)
    cuts = [0, 7, 50, 144]
    ranges = [positional_hash(flat[a:b], WholeRegion((24, 6), (a,), flat=True)) for a, b in itertools.pairwise(cuts)]
    boxes = [
        positional_hash(WHOLE[i : i + 12, j : j + 2], WholeRegion((24, 6), (i, j))) for i in (0, 12) for j in (0, 2, 4)
    ]

    assert sum(ranges) % 2**64 == sum(boxes) % 2**64 == by_numpy(WHOLE)


def test_one_bit_and_one_swap_are_seen():
    swapped, flipped = WHOLE.clone(), WHOLE.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    flipped[5, 5] = -flipped[5, 5]

    assert len({positional_hash(tensor) for tensor in (WHOLE, swapped, flipped)}) == 3


def test_complex_numbers_are_their_parts():
    tensor = torch.complex(WHOLE, -WHOLE)
    halves = [positional_hash(tensor[i : i + 12], WholeRegion((24, 6), (i, 0))) for i in (0, 12)]

    assert positional_hash(tensor) == by_numpy(torch.view_as_real(tensor)) == sum(halves) % 2**64


@pytest.mark.usefixtures("either_way")
def test_the_hash_of_samples_is_numpys_in_any_order():
    hashes = [by_numpy(row) for row in WHOLE]
    expected = sum(by_numpy(torch.tensor([value - (value >> 63 << 64)])) for value in hashes) % 2**64

    assert samples_hash(WHOLE) == samples_hash(WHOLE.flip(0)) == expected
    assert samples_hash(WHOLE.flip(1)) != expected
    assert samples_hash(WHOLE[0, 0]) == samples_hash(WHOLE[:0]) == 0
