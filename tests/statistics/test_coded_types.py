"""Dtypes that torch stores and does not compute with: their numbers, by the definitions of the types."""

import numpy as np
import pytest
import torch

from tests.statistics.numpy_moments import assert_moments
from tests.tensor_kinds import all_dtypes, cast, every_kind, numbers
from trainermon.statistics import fallback, kernel
from trainermon.statistics.layout import CODED, decoded, plain

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch: quantized, sparse and masked tensors may change


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32])
def test_a_quantized_tensor_has_the_numbers_that_it_means(rows_of, dtype):
    quantized = cast(numbers(), dtype)
    whole = quantized.int_repr().numpy().astype(np.float64)
    truth = (whole - quantized.q_zero_point()) * quantized.q_scale()

    [row] = rows_of([quantized])

    assert_moments(row, truth.ravel())


@pytest.mark.parametrize("dtype", [torch.quint4x2, torch.quint2x4])
def test_packed_quantized_tensors_have_the_numbers_that_they_mean(rows_of, dtype):
    levels = (1 << (4 if dtype is torch.quint4x2 else 2)) - 1
    truth = (np.clip(np.round(numbers().numpy() / 0.5) + 1, 0, levels) - 1) * 0.5

    [row] = rows_of([cast(numbers(), dtype)])

    assert_moments(row, truth.astype(np.float64).ravel())


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no float4")
def test_every_code_of_float4_is_two_numbers_by_its_definition():
    def value(code):
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        return (-1.0) ** sign * (0.5 * mantissa if not exponent else 2.0 ** (exponent - 1) * (1 + 0.5 * mantissa))

    codes = torch.arange(256).to(torch.uint8).view(16, 16).view(torch.float4_e2m1fn_x2)

    found = decoded(codes)

    assert found.shape == (16, 32)
    truth = [half for byte in range(256) for half in (value(byte & 15), value(byte >> 4))]
    np.testing.assert_array_equal(found.numpy().ravel(), truth)


@pytest.mark.parametrize("dtype", [each for each in all_dtypes() if each in CODED and "bits" in str(each)])
def test_bits_are_read_as_they_lie(rows_of, dtype):
    given = cast(numbers(), dtype)
    whole = (numbers() * 40).numpy().astype(np.int64)
    truth = whole if dtype is torch.bits16 else whole & 255

    [row] = rows_of([given])

    assert_moments(row, truth.astype(np.float64).ravel())


@pytest.mark.parametrize("name", ["coo", "csr", "csc", "bsr", "bsc", "complex coo"])
def test_a_sparse_tensor_counts_with_its_zeros(rows_of, name):
    given = every_kind(numbers())[name]
    dense = given.to_dense()
    truth = (torch.view_as_real(dense) if dense.is_complex() else dense).numpy().astype(np.float64).ravel()

    [row] = rows_of([given])

    assert_moments(row, truth)


def test_no_dtype_of_torch_is_refused(rows_of):
    assert len(rows_of(list(every_kind(numbers()).values()))) == len(every_kind(numbers()))


@pytest.mark.parametrize("in_dims", [0, 1])
def test_inside_vmap_and_grad_the_whole_batch_is_read(rows_of, in_dims):
    whole = torch.randn(5, 5, 3)
    found = []

    def look(part):
        found.append(plain(part))
        return part.sum()

    torch.func.vmap(torch.func.grad(look), in_dims)(whole)

    [row] = rows_of(found)
    assert_moments(row, whole.double().numpy().ravel())


@pytest.mark.parametrize("moments", [kernel.moments, fallback.moments], ids=["kernel", "fallback"])
@pytest.mark.parametrize(
    "transform", [lambda look: look, torch.func.grad, torch.func.vmap], ids=["none", "grad", "vmap"]
)
def test_rows_from_outside_are_written_whole_within_transforms(moments, transform):
    """Also of tensors that are not simply dense, of which a row is written in several steps."""
    whole, out = torch.randn(6, 4), torch.full((3, 8), -1.0, dtype=torch.float64)

    def look(part):
        moments([part, part.unsqueeze(0).expand(5, *part.shape), part.abs().clamp(0.5)[..., ::2]], out)
        return part.sum()

    transform(look)(whole)

    numbers = whole.double().numpy()
    expected = [
        numbers.ravel(),
        np.tile(numbers.ravel(), 5),
        np.clip(np.abs(whole.numpy()), 0.5, None)[..., ::2].ravel(),
    ]
    for row, values in zip(out, expected, strict=True):
        assert_moments(row, values.astype(np.float64))
