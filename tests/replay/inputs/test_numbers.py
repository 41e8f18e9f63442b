"""Random tensors have the statistics that were asked for, by numpy in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainermon.replay.inputs.numbers import TensorNumbers, tensor_like

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "moved": lambda rng, n: 3 + 0.1 * rng.standard_normal(n),
    "uniform": lambda rng, n: rng.uniform(0, 1, n),
    "rectified": lambda rng, n: np.maximum(rng.standard_normal(n), 0),
    "long tail": lambda rng, n: np.exp(2 * rng.standard_normal(n)),
    "outliers": lambda rng, n: np.where(np.arange(n) % 97 == 5, 50.0, 0.1 * rng.standard_normal(n)),
    "two values": lambda rng, n: np.where(rng.random(n) < 0.3, -2.0, 5.0),
    "constant": lambda _rng, n: np.full(n, 0.7),
}


def finite(tensor):
    values = tensor.detach().flatten().to(torch.float64).numpy()
    return values[np.isfinite(values)]


def numbers_of(tensor):
    """Return the statistics of a tensor, by numpy."""
    values, every = finite(tensor), tensor.detach().flatten().to(torch.float64).numpy()
    exact = tensor if tensor.dtype.is_floating_point else tensor.flatten().tolist()
    low, high = (values.min(), values.max()) if tensor.dtype.is_floating_point else (min(exact), max(exact))
    return TensorNumbers(
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        low=low,
        high=high,
        mean=float(values.mean()),
        norm=float(np.sqrt((values**2).sum())),
        nans=int(np.isnan(every).sum()),
        infs=int(np.isinf(every).sum()),
        zeros=int((every == 0).sum()),
    )


def assert_alike(found, wanted):
    values = finite(found)
    unit = torch.finfo(found.dtype).eps if found.dtype.is_floating_point else 0.0
    rms = wanted.norm / math.sqrt(max(1, values.size))
    assert (found.dtype, tuple(found.shape)) == (wanted.dtype, wanted.shape)
    assert (values.min(), values.max()) == (wanted.low, wanted.high)
    assert np.sqrt((values**2).sum()) == pytest.approx(wanted.norm, rel=0.02)
    assert values.mean() == pytest.approx(wanted.mean, rel=0.02, abs=unit * rms)
    assert int(found.isnan().sum()) == wanted.nans
    assert int(found.isinf().sum()) == wanted.infs
    if wanted.zeros is not None:
        assert int((found == 0).sum()) == wanted.zeros


@settings(deadline=None, max_examples=40)
@given(
    shape=st.sampled_from(sorted(SHAPES)),
    dtype=st.sampled_from(FLOATS),
    count=st.sampled_from([1, 2, 3, 7, 40, 300, 3000]),
    power=st.sampled_from([-6, 0, 3]),
    seed=st.integers(0, 1 << 16),
)
def test_floating_numbers_have_the_statistics_of_a_tensor(shape, dtype, count, power, seed):
    values = SHAPES[shape](np.random.default_rng(seed), count) * 2.0**power
    wanted = numbers_of(torch.from_numpy(values).to(dtype))

    assert_alike(tensor_like(wanted, np.random.default_rng(seed + 1)), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_whole_range_of_a_type_is_no_overflow(dtype):
    most = torch.finfo(dtype).max
    values = torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, 1000)) * most
    values[:2] = torch.tensor([-most, most])
    wanted = numbers_of(values.to(dtype))

    assert_alike(tensor_like(wanted, np.random.default_rng(1)), wanted)


@settings(deadline=None, max_examples=40)
@given(
    dtype=st.sampled_from([torch.int64, torch.int32, torch.int16, torch.uint8]),
    bounds=st.sampled_from([(0, 1), (0, 9), (1, 3), (0, 127), (1, 100), (7, 7)]),
    count=st.sampled_from([1, 2, 5, 64, 1000]),
    seed=st.integers(0, 1 << 16),
)
def test_whole_numbers_have_the_statistics_of_a_tensor(dtype, bounds, count, seed):
    values = np.random.default_rng(seed).integers(bounds[0], bounds[1] + 1, count)
    wanted = numbers_of(torch.from_numpy(values).to(dtype))

    assert_alike(tensor_like(wanted, np.random.default_rng(seed + 1)), wanted)


def test_the_whole_range_of_int64_is_met():
    info = torch.iinfo(torch.int64)
    wanted = TensorNumbers(dtype=torch.int64, shape=(1000,), low=info.min, high=info.max + 1, mean=0.0, norm=1.7e20)

    found = tensor_like(wanted, np.random.default_rng(0))

    assert (int(found.min()), int(found.max())) == (info.min, info.max)
    assert np.linalg.norm(found.numpy().astype(np.float64)) == pytest.approx(1.7e20, rel=0.02)


def test_nans_and_infinities_are_where_nothing_else_is():
    values = torch.randn(40, 25, generator=torch.Generator().manual_seed(0))
    values[3, :7], values[5, 2:4], values[8] = -math.inf, math.nan, 0.0
    wanted = numbers_of(values)

    found = tensor_like(wanted, np.random.default_rng(0))

    assert_alike(found, wanted)
    assert bool((found[found.isinf()] < 0).all())


def test_msprobes_statistics_say_of_infinite_numbers_that_there_are_some():
    form = {"dtype": "torch.float16", "shape": [50], "Max": math.inf, "Min": -3.0, "Mean": math.inf, "Norm": math.inf}
    found = tensor_like(TensorNumbers.of_form({**form, "Max_except_inf_nan": 2.0}), np.random.default_rng(0))

    assert int((found == math.inf).sum()) == 1
    assert (float(finite(found).min()), float(finite(found).max())) == (-3.0, 2.0)


def test_magnitudes_of_complex_numbers_are_met():
    values = torch.randn(500, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    size = values.abs().double().numpy()
    wanted = TensorNumbers(
        dtype=torch.complex64,
        shape=(500,),
        low=size.min(),
        high=size.max(),
        mean=size.mean(),
        norm=float(np.linalg.norm(size)),
    )

    found = tensor_like(wanted, np.random.default_rng(0)).abs().double().numpy()

    assert (found.max(), found.mean(), np.linalg.norm(found)) == pytest.approx(
        (wanted.high, wanted.mean, wanted.norm), rel=0.02
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_of_a_triangle_is_that_triangle(dtype):
    lower = torch.ones(2, 6, 6).tril()
    mask = lower.bool() if dtype is torch.bool else lower.log()
    zeros = int((mask == 0).sum())
    wanted = TensorNumbers(
        dtype=dtype,
        shape=(2, 6, 6),
        low=0.0,
        high=float(dtype is torch.bool),
        mean=None if dtype is torch.bool else 0.0,
        norm=None if dtype is torch.bool else 0.0,
        zeros=zeros,
        infs=int(mask.isinf().sum()),
    )

    assert torch.equal(tensor_like(wanted, np.random.default_rng(0)), mask)


def test_the_same_seed_gives_the_same_numbers():
    wanted = TensorNumbers(dtype=torch.float32, shape=(9,), low=-1.0, high=2.0, mean=0.1, norm=3.0)
    one, same, other = (tensor_like(wanted, np.random.default_rng(seed)) for seed in (1, 1, 2))

    assert torch.equal(one, same)
    assert not torch.equal(one, other)
