"""Checksums against exact integer arithmetic of Python, both ways to compute them, and what they must see."""

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.statistics.test_compiled import NEEDED_FLAGS
from trainermon.core.values import STATISTICS
from trainermon.statistics import checksums as module
from trainermon.statistics.checksums import checksums, row_checksums, rows_of

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64),
    *(torch.bool, torch.float8_e4m3fn, torch.complex64),
]
MULTIPLIER = 0x9E3779B97F4A7C15


@pytest.fixture(params=["compiled", "torch", "device"])
def way(request, monkeypatch):
    if request.param != "compiled":
        monkeypatch.setattr(module, "_compiled", lambda: None)
        if request.param == "device":  # the calls that an accelerator gets
            monkeypatch.setattr(module, "_of_cpu_piece", module._of_device_piece)
    elif module._compiled() is None:
        assert not shutil.which("gcc"), "the library was not built, although there is a C compiler"
        pytest.skip("the library was not built: there is no C compiler")
    return request.param


def words_of(tensor):
    """Return the elements' bits as signed integers, by numpy."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    size = tensor.element_size()
    raw = tensor.contiguous().view(-1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    return raw.numpy().view(f"i{size}").tolist()


def exact(tensor):
    return sum(word * (word + MULTIPLIER) for word in words_of(tensor)) % 2**64


def found(*tensors):
    return [value % 2**64 for value in checksums(tensors).tolist()]


def random(count, dtype, *, seed=0):
    raw = np.random.default_rng(seed).integers(0, 256, count * 8 + 8, np.uint8)
    if dtype is torch.bool:
        return torch.from_numpy(raw[:count] > 127)
    view = {torch.complex64: torch.complex64}.get(dtype, dtype)
    return torch.from_numpy(raw).view(view)[:count].clone()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("count", [0, 1, 31, 70_003])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_checksum_is_that_of_exact_arithmetic_whatever_the_bits_mean(dtype, count):
    tensor = random(count, dtype)

    assert found(tensor) == [exact(tensor)]


@pytest.mark.usefixtures("way")
def test_layout_does_not_matter_but_every_element_counts():
    base = torch.randn(40, 60)
    views = [base, base.t(), base[3:, 5:41], base[::2], base[:, :1].expand(40, 7), base.t().reshape(-1)[1:]]

    assert found(*views) == [exact(view) for view in views]


@pytest.mark.usefixtures("way")
def test_checksums_of_parts_add_up_to_that_of_the_whole():
    whole = torch.randn(30_001).bfloat16()
    shuffled = whole[torch.randperm(whole.numel())]
    parts = found(whole[:7], whole[7:20_000], whole[20_000:])

    assert sum(parts) % 2**64 == found(whole)[0] == found(shuffled)[0]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_flip_of_any_bit_of_any_kind_of_value_is_seen(dtype):
    # a sum of squares alone misses the sign of 2.0, whose bits are 2^30
    values = [0.0, -0.0, 1.0, 2.0, -2.0, 3e-39, 1e38, float("nan"), float("inf"), *torch.randn(20).tolist()]
    tensor = torch.tensor(values).to(dtype)
    integers = torch.int32 if dtype is torch.float32 else torch.int16
    [before] = found(tensor)
    for index in range(tensor.numel()):
        for bit in range(8 * tensor.element_size()):
            flipped = tensor.clone()
            mask = torch.tensor(1 << bit).to(integers) if bit < 8 * tensor.element_size() - 1 else torch.tensor(-1)
            word = flipped.view(integers)[index]
            flipped.view(integers)[index] = word ^ mask if mask >= 0 else word ^ torch.iinfo(integers).min

            assert found(flipped) != [before], (values[index], bit)


@pytest.mark.usefixtures("way")
def test_rounding_errors_in_opposite_directions_do_not_cancel():
    rng = np.random.default_rng(1)
    missed = 0
    for _ in range(200):
        tensor = torch.from_numpy(rng.standard_normal(64).astype(np.float32))
        other = tensor.clone()
        up, down = rng.choice(64, 2, replace=False)
        other.view(torch.int32)[up] += 1
        other.view(torch.int32)[down] -= 1
        missed += found(tensor) == found(other)

    assert missed == 0


def test_number_of_threads_changes_nothing():
    if module._compiled() is None:
        assert not shutil.which("gcc"), "the library was not built, although there is a C compiler"
        pytest.skip("the library was not built: there is no C compiler")
    tensors = [torch.randn(3_000_001), torch.randn(1_500_000).bfloat16(), torch.randn(5)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = found(*tensors)
        torch.set_num_threads(3)
        three = found(*tensors)
    finally:
        torch.set_num_threads(before)

    assert one == three


def test_row_holds_all_bits_of_a_checksum():
    sums = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF, -(2**32)])

    rows = rows_of(sums)

    low, high = rows[:, STATISTICS.index("min")], rows[:, STATISTICS.index("max")] - 2.0**32
    assert [(int(h) << 32) | int(lo) for lo, h in zip(low, high, strict=True)] == [v % 2**64 for v in sums.tolist()]
    assert rows[:, STATISTICS.index("count")].tolist() == [2.0] * 7
    assert rows[0].tolist() == [2.0, 0.0, 2.0**32, 2.0**32, 2.0**64, 1.0, 0.0, 0.0]


def test_a_parameter_whose_storage_is_freed_is_refused():
    tensor = torch.randn(8)
    tensor.untyped_storage().resize_(0)

    with pytest.raises(ValueError, match="has no memory of its own"):
        checksums([tensor])


@pytest.mark.parametrize("instructions", NEEDED_FLAGS)
def test_every_instruction_set_gives_the_right_checksums(tmp_path, instructions):
    compiler = shutil.which("gcc")
    cpu = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    if compiler is None or "sse2" not in cpu or not NEEDED_FLAGS[instructions] <= set(cpu):
        pytest.skip(f"needs gcc and a processor with {instructions}")
    library = tmp_path / "checksums.so"
    source = Path(module.__file__).with_name("checksums.c")
    flags = ["-O3", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-DCLONED=", f"-march={instructions}", "-pthread"]
    subprocess.run([compiler, *flags, "-shared", "-fPIC", source, "-o", library], check=True)
    scan = module._ChecksumKernel(ctypes.CDLL(str(library)))
    tensors = [random(70_003, dtype, seed=2) for dtype in (torch.int8, torch.bfloat16, torch.float32, torch.float64)]

    sums = scan([module._integers(tensor) for tensor in tensors])

    assert [value % 2**64 for value in sums.tolist()] == [exact(tensor) for tensor in tensors]


@pytest.mark.parametrize("has", ["avx512bw", "avx2", "neither"])
@pytest.mark.skipif(platform.machine() != "x86_64", reason="words are taken in pairs on x86-64 only")
def test_words_in_pairs_are_exact(has, tmp_path):
    compiler = shutil.which("gcc") or pytest.skip("there is no gcc")
    if has != "neither" and f" {has} " not in Path("/proc/cpuinfo").read_text().replace("\n", " "):
        pytest.skip(f"this processor has no {has}")
    library = tmp_path / "checksums.so"
    chosen = f"-D__builtin_cpu_supports(name)=(sizeof(name)=={len(has) + 1 if has != 'neither' else 0})"
    source = Path(module.__file__).with_suffix(".c")
    flags = ["-O3", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread", "-shared", "-fPIC", chosen]
    subprocess.run([compiler, *flags, source, "-o", library], check=True)
    scan = module._ChecksumKernel(ctypes.CDLL(str(library)))
    sizes = (0, 1, 15, 16, 17, 31, 32, 33, 1000, 2 * 32 * 16384 + 77)
    made = [torch.full((size,), fill, dtype=torch.int16) for size in sizes for fill in (-(2**15), 2**15 - 1, -1)]
    tensors = [*made, *(random(size, torch.bfloat16, seed=size) for size in sizes)]

    sums = scan([module._integers(tensor) for tensor in tensors])

    assert [value % 2**64 for value in sums.tolist()] == [exact(tensor) for tensor in tensors]


@pytest.mark.parametrize("shape", [(5,), (7, 3), (4, 200), (3, 2, 100), (1, 9), (2, 0), (0, 3), ()])
def test_checksums_of_rows_are_those_of_each_row(shape, way):
    tensor = random(max(1, int(np.prod(shape))), torch.bfloat16)[: int(np.prod(shape))].reshape(shape)

    rows = [value % 2**64 for value in row_checksums(tensor).tolist()]

    assert rows == [exact(row.reshape(-1)) for row in (tensor if shape else tensor[None])]


def test_rows_of_a_transposed_tensor_are_those_that_are_seen(way):
    tensor = random(600, torch.float32).reshape(20, 30).t()

    assert [value % 2**64 for value in row_checksums(tensor).tolist()] == [exact(row) for row in tensor]
