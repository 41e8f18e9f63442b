"""Histograms against numpy's frexp in float64: compiled, by torch calls and, of any layout, dtype and length."""

import ctypes
import itertools
import logging
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.statistics.histogram_truth import numpy_histogram
from tests.statistics.numpy_moments import elements_of
from tests.statistics.test_compiled import NEEDED_FLAGS
from tests.strategies import FLOATS, INTEGERS, PATTERNS, fill, flat_tensors, laid_out_tensors
from trainermon.core.values import BIN_BOUNDS, NUM_BINS, ZERO_BIN
from trainermon.statistics.histograms import counting, torch_counts

SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, -1e-310, 1e-45, -1e-40, 6e-8, -6.1e-5, 2.0**-45, 65504.0]
SPECIAL += [-(2.0**16), 2.0**16 - 0.004, math.nextafter(2.0**-45, 0), -1.0, math.nextafter(1.0, 0), 1.5, -3e38, 1e308]


def sorted_counts(flat, row):
    torch_counts.count_by_sorting(flat, row)


@pytest.fixture(scope="module", params=["compiled", "torch on a CPU", "torch on a device"])
def counts_of(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "compiled":
            assert counting._compiled() is not None or not shutil.which("gcc"), "the library was not built"
        else:
            way = torch_counts.count_on_cpu if request.param.endswith("CPU") else torch_counts.count_by_sorting
            patch.setattr(counting, "_compiled", lambda: None)
            patch.setattr(counting, "_way_of", lambda device: way)
        yield counts


def counts(tensors):
    out = torch.full((len(tensors) + 2, NUM_BINS), -7, dtype=torch.int64)
    counting.count(tensors, out, 1)
    assert (out[[0, -1]] == -7).all(), "wrote into the rows of others"
    return out[1:-1].numpy()


def check(found, tensors):
    for row, tensor in zip(found, tensors, strict=True):
        expected = numpy_histogram(elements_of(tensor))
        np.testing.assert_array_equal(row, expected, f"{tensor.dtype} {list(tensor.shape)}")
        assert row.sum() == tensor.numel()


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
def test_every_dtype_is_counted_as_by_numpy(counts_of, dtype):
    tensors = [fill(pattern, 4099, dtype=dtype, seed=1) for pattern in sorted(PATTERNS)] if dtype in FLOATS else []
    if dtype in FLOATS:
        tensors.append(torch.tensor(SPECIAL, dtype=torch.float64).to(dtype))
    elif dtype is torch.bool:
        tensors.append(torch.tensor([True, False, True]))
    else:
        limits = torch.iinfo(dtype)
        tensors.append(torch.tensor([limits.min, limits.max, 0, 1, 2, 3, 127], dtype=dtype))

    check(counts_of(tensors), tensors)


def test_every_number_of_16_bits_is_counted_as_by_numpy(counts_of):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    tensors = [bits.view(torch.bfloat16), bits.view(torch.float16)]

    check(counts_of(tensors), tensors)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(tensors=st.lists(st.one_of(flat_tensors(sizes=st.integers(0, 9000)), laid_out_tensors()), max_size=4))
def test_any_list_of_tensors_of_any_layout(counts_of, tensors):
    check(counts_of(tensors), tensors)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(values=st.lists(st.floats(width=64), max_size=300), cuts=st.lists(st.integers(0, 300), max_size=3))
def test_counts_of_parts_add_up_to_those_of_the_whole(counts_of, values, cuts):
    whole = torch.tensor(values, dtype=torch.float64)
    ends = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [whole[begin:end] for begin, end in itertools.pairwise(ends)]

    found = counts_of([whole, *parts])

    np.testing.assert_array_equal(found[1:].sum(axis=0), found[0])


def test_sparse_complex_and_expanded_tensors_are_counted_with_all_their_elements(counts_of):
    dense = torch.zeros(6, 3)
    dense[2] = -7.0
    pairs = torch.randn(5, dtype=torch.complex64)
    tensors = [dense.to_sparse(), torch.randn(4, 1).expand(4, 1000)]

    found = counts_of([*tensors, pairs])

    np.testing.assert_array_equal(found[0], numpy_histogram(elements_of(dense)))
    np.testing.assert_array_equal(found[1], numpy_histogram(elements_of(tensors[1])))
    np.testing.assert_array_equal(found[2], numpy_histogram(elements_of(torch.view_as_real(pairs))))


def test_a_tensor_without_memory_is_refused(counts_of):
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)

    with pytest.raises(ValueError, match="has no memory of its own"):
        counts_of([freed])


def test_the_bounds_of_bins_are_those_that_elements_are_counted_by(counts_of):
    finite = [(bin, low, high) for bin, (low, high) in enumerate(BIN_BOUNDS) if low < high]
    inner = [
        low if 0 < low < math.inf else high if -math.inf < high < 0 else (low + high) / 2 for _, low, high in finite
    ]

    row = counts_of([torch.tensor(inner, dtype=torch.float64)])[0]

    assert [int(row[bin]) for bin, _, _ in finite] == [1] * 126
    assert sorted(BIN_BOUNDS[:-1]) == list(BIN_BOUNDS[:-1])
    assert BIN_BOUNDS[ZERO_BIN] == (0.0, 0.0)


@pytest.mark.parametrize("instructions", NEEDED_FLAGS)
def test_every_instruction_set_counts_right(tmp_path, instructions):
    compiler = shutil.which("gcc")
    cpu = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    if compiler is None or "sse2" not in cpu or not NEEDED_FLAGS[instructions] <= set(cpu):
        pytest.skip(f"needs gcc and a processor with {instructions}")
    library = tmp_path / "counts.so"
    flags = ["-O3", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-DCLONED=", f"-march={instructions}"]
    flags += ["-fno-math-errno", "-fno-trapping-math"]
    source = Path(counting.__file__).with_name("counts.c")
    subprocess.run([compiler, *flags, "-shared", "-fPIC", source, "-o", library], check=True)
    kernel = counting._CompiledCounts(ctypes.CDLL(str(library)))
    tensors = [torch.tensor(SPECIAL * 300, dtype=torch.float64).to(dtype)[5:] for dtype in FLOATS]
    rows = torch.empty((len(tensors), NUM_BINS), dtype=torch.int64)

    kernel(tensors, rows)

    check(rows.numpy(), tensors)


def test_without_a_working_triton_torch_calls_count_and_one_line_says_so(caplog):
    caplog.set_level(logging.WARNING, logger="trainermon")
    way, tensor = counting._TritonCounts(), torch.randn(3000)  # which is on no CUDA device

    for _ in range(2):
        row = torch.zeros(NUM_BINS, dtype=torch.int64)
        way(tensor, row)
        np.testing.assert_array_equal(row.numpy(), numpy_histogram(elements_of(tensor)))

    (told,) = [record.message for record in caplog.records]
    assert told.startswith("histograms of CUDA tensors are taken by torch calls: ValueError")
