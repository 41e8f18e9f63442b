"""Finding the compiled library, and every instruction set that it is built for."""

import ctypes
import importlib.machinery
import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.statistics.conftest import rows_by
from tests.statistics.numpy_moments import assert_moments, elements_of
from tests.strategies import FLOATS, INTEGERS, PATTERNS, fill
from trainermon.core.native import library
from trainermon.statistics import compiled
from trainermon.statistics.native import NativeMoments

NEEDED_FLAGS = {"x86-64": set(), "x86-64-v3": {"avx2", "fma", "f16c"}, "x86-64-v4": {"avx512f", "avx512bw", "avx512dq"}}

ITEM = 65_536  # as in moments.c: one thread reads these after each other


@pytest.fixture
def without_library(monkeypatch, tmp_path):
    monkeypatch.delenv("TRAINERMON_KERNEL", raising=False)
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    return tmp_path


def test_without_a_library_there_is_no_compiled_kernel(without_library):
    assert compiled.load() is None


def test_a_library_that_cannot_be_loaded_is_passed_over_with_a_warning(without_library, caplog):
    (without_library / f"_moments{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(b"not a library")

    assert compiled.load() is None
    assert "the compiled kernels are done without: cannot load" in caplog.text


def test_asking_for_a_library_that_is_missing_is_an_error(without_library, monkeypatch):
    monkeypatch.setenv("TRAINERMON_KERNEL", "c")

    with pytest.raises(ValueError, match="the library was not built: install a C compiler"):
        compiled.load()


def test_an_unknown_choice_is_an_error(monkeypatch):
    monkeypatch.setenv("TRAINERMON_KERNEL", "C")

    with pytest.raises(ValueError, match="TRAINERMON_KERNEL is 'C', expected 'c', 'torch' or nothing"):
        compiled.load()


@pytest.mark.parametrize("instructions", NEEDED_FLAGS)
def test_every_instruction_set_gives_the_right_moments(tmp_path, instructions):
    compiler = shutil.which("gcc")
    cpu = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    if compiler is None or "sse2" not in cpu or not NEEDED_FLAGS[instructions] <= set(cpu):
        pytest.skip(f"needs gcc and a processor with {instructions}")
    library = tmp_path / "moments.so"
    source = Path(compiled.__file__).with_name("moments.c")
    flags = ["-O3", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fno-math-errno", "-fno-trapping-math", "-pthread"]
    subprocess.run(
        [compiler, *flags, "-DCLONED=", f"-march={instructions}", "-shared", "-fPIC", source, "-o", library], check=True
    )
    rows_of = rows_by(compiled._MomentsKernel(NativeMoments(ctypes.CDLL(str(library)))).moments)
    tensors = [fill(pattern, 70_003, dtype=dtype, seed=2) for dtype in FLOATS for pattern in sorted(PATTERNS)]
    tensors += [fill("normal", 70_003, dtype=dtype, seed=2) for dtype in INTEGERS]

    rows = rows_of(tensors)

    for row, tensor in zip(rows, tensors, strict=True):
        assert_moments(row, elements_of(tensor))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_an_item_gets_the_same_bits_whatever_came_before_it(compiled_rows, dtype):
    items = [fill(pattern, ITEM, dtype=dtype, seed=3) for pattern in sorted(PATTERNS)]
    ends = [item[5:] for item in items]  # not a whole number of vectors
    first, second = compiled_rows(items), compiled_rows(ends)
    pairs = list(itertools.product(range(len(items)), repeat=2))

    rows = compiled_rows([torch.cat((items[a], ends[b])) for a, b in pairs])

    sums = [3, 4]
    for row, (a, b) in zip(rows, pairs, strict=True):
        np.testing.assert_array_equal(row[sums], first[a][sums] + second[b][sums])


def test_short_rows_far_apart_are_gathered(compiled_rows):
    tensor = torch.randn(3000, 24)[:, 5:12]

    [row] = compiled_rows([tensor])

    assert_moments(row, elements_of(tensor))


@pytest.fixture
def write_dense():
    return compiled._dense_writer() or pytest.skip("there is no library, or another interpreter")


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.uint8, torch.bool]


def test_dense_tensors_are_written_as_by_the_library_itself(write_dense, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    shapes = [(), (0,), (1,), (5, 3), (70_001,)]
    tensors = [
        torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)
        for dtype in DTYPES
        for shape in shapes
    ]
    tensors.append(nn.Parameter(torch.randn(7)))
    rows = torch.full((len(tensors), 8), -1.0, dtype=torch.float64)
    assert write_dense(tensors, rows.data_ptr()) is True

    monkeypatch.setattr(compiled, "_dense_writer", lambda: None)
    expected = torch.full_like(rows, -2.0)
    compiled.load()(tensors, expected, 0)
    assert torch.equal(rows, expected)


class Other(torch.Tensor):
    """A tensor of another class, whose memory may be anything."""


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, 4).t(),
        torch.ones(3).as_subclass(Other),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3, device="meta"),
        torch.ones(3).to_sparse(),
        torch.ones(3).to_mkldnn(),
        torch._neg_view(torch.ones(3)),
        torch.ones(2_100_000),
        None,
        3,
    ],
    ids=lambda value: str(getattr(value, "layout", value)),
)
def test_what_needs_a_closer_look_or_threads_is_left_to_others_without_an_error(write_dense, tensor):
    rows = torch.zeros(3, 8, dtype=torch.float64)

    assert write_dense([torch.ones(2_100_000), tensor], rows.data_ptr()) is False
    assert write_dense([torch.ones(1)] * 257, rows.data_ptr()) is False
    assert write_dense(None, rows.data_ptr()) is False


def test_a_tensor_within_vmap_is_left_to_others(write_dense):
    answers = []

    def see(tensor):
        answers.append(write_dense([tensor], torch.zeros(1, 8, dtype=torch.float64).data_ptr()))
        return tensor

    torch.vmap(see)(torch.ones(2, 3))

    assert answers == [False]


def test_tensors_are_released(write_dense):
    tensors, rows = [torch.ones(3), torch.ones(3, 2).t()], torch.zeros(2, 8, dtype=torch.float64)
    before = [sys.getrefcount(each) for each in (*tensors, torch.float32)]
    for _ in range(100):
        write_dense(tensors, rows.data_ptr())
    after = [sys.getrefcount(each) for each in (*tensors, torch.float32)]

    assert [new - old for new, old in zip(after, before, strict=True)] == [0, 0, 0]
