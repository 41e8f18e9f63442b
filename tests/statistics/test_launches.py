"""The Triton kernels: interpreted, compiled for a GPU that need not be there, counted, and done without."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from tests.statistics.numpy_moments import assert_moments, elements_of
from trainermon.statistics import kernel, launches

triton_kernel = vars(launches)["triton_kernel"]

POINTERS = {"like": "*{0}", "first_chunk": "i32", "tensor_of": "*i32", "addresses": "*i64", "layouts": "*i64"}
MAX_LAUNCHES = 12
MIB = 1 << 20


@pytest.mark.parametrize("wide", ["", pytest.param("1", marks=pytest.mark.slow)])
def test_the_kernels_compute_the_moments_when_interpreted(wide):
    inner = Path(__file__).with_name("interpreted.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(inner)]

    done = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "WIDE": wide},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout[-4000:]


@pytest.fixture
def launched(monkeypatch):
    """Note every launch instead of doing it, as (name of the kernel, number of programs)."""
    noted = []

    class Noted:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *_, **__: noted.append((self.name, grid[0]))

    for name in ("scan_one", "scan_many", "finish_one", "finish_many"):
        monkeypatch.setattr(triton_kernel, name, Noted(name))
    return noted


@pytest.fixture
def uploads(monkeypatch):
    sizes = []
    upload = launches.KernelLauncher._upload
    monkeypatch.setattr(
        launches.KernelLauncher, "_upload", lambda self, table: sizes.append(table.nbytes) or upload(self, table)
    )
    return sizes


@pytest.mark.parametrize("count", [500, 5000])
def test_launches_do_not_grow_with_the_number_of_tensors(launched, count):
    sizes = [1 + 7 * index % 40_000 for index in range(count)]
    base = torch.empty(max(sizes) + 1, dtype=torch.bfloat16)
    tensors = [base[index % 2 : size + index % 2] for index, size in enumerate(sizes)]  # half of them not aligned

    launches.KernelLauncher(torch.device("cpu")).moments(tensors, torch.empty(count, 8, dtype=torch.float64), 0)

    assert len(launched) == 3 <= MAX_LAUNCHES
    chunks = sum(-(-size // launches.CHUNK) for size in sizes)
    assert sum(programs for name, programs in launched if name == "scan_many") == chunks
    assert launched[-1] == ("finish_many", count)


def test_a_list_that_comes_again_is_not_uploaded_again(launched, uploads):
    launcher = launches.KernelLauncher(torch.device("cpu"))
    lists = [[torch.empty(size) for size in (5, 70_000, 3)] for _ in range(2)]
    out = torch.empty(9, 8, dtype=torch.float64)

    counts = []
    for tensors, first_row in ((lists[0], 0), (lists[1], 3), (lists[0], 6), (lists[1], 0)):
        launcher.moments(tensors, out, first_row)
        counts.append(len(uploads))

    assert counts == [4, 5, 5, 5]  # the second list differs in its addresses only
    assert uploads[4] == 3 * 8


def test_tables_and_workspace_stay_within_their_bounds(launched, uploads, monkeypatch):
    monkeypatch.setattr(launches, "TABLE_BYTES", 5000)
    launcher = launches.KernelLauncher(torch.device("cpu"))
    out = torch.empty(200, 8, dtype=torch.float64)
    base = torch.empty(10_000_000, dtype=torch.int8).view(torch.float16)

    for count in range(1, 190):
        launcher.moments([base[: 1000 * number] for number in range(count)], out, 0)

    for kept in (launcher._tables, launcher._addresses):
        assert sum(table.nbytes for table in kept._tables.values()) == kept._used
        assert kept._used <= 5000 or len(kept._tables) == 1
    assert launches.WORKSPACE_BYTES + 2 * 8 * MIB < 64 * MIB
    assert launcher._workspaces[0].nbytes <= launches.WORKSPACE_BYTES


@pytest.mark.parametrize(("dtype", "width"), [("fp32", 4), ("bf16", 2)])
def test_dense_chunks_are_loaded_16_bytes_at_a_time_without_atomics(tmp_path, monkeypatch, dtype, width):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signature = {name: kind.format(dtype) for name, kind in POINTERS.items()}
    source = ASTSource(
        triton_kernel.scan_many,
        signature=signature | {"partials": "*fp64", "DENSE": "constexpr", "WIDE": "constexpr"},
        constexprs={"DENSE": True, "WIDE": False},
    )

    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

    assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) == 16 * 1024 * width // (128 * 16)
    assert not re.search(r"\b(atom|red)\.", ptx)
    assert ".ftz" not in ptx


@pytest.fixture
def cuda_way(caplog):
    """What serves a CUDA device, on a CPU."""
    caplog.set_level(logging.WARNING, logger="trainermon")
    return kernel._Triton(torch.device("cpu"))


def rows_by(way, tensors):
    out = torch.empty(len(tensors), 8, dtype=torch.float64)
    way(tensors, out, 0)
    return out.numpy()


@pytest.mark.parametrize(
    "error", [ImportError("no triton"), RuntimeError("no C compiler"), OSError("no ptxas")], ids=str
)
def test_without_a_working_triton_torch_calls_serve_and_one_line_says_so(cuda_way, caplog, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(launches, "KernelLauncher", fail)
    tensors = [torch.randn(9), torch.randn(4)]

    for _ in range(3):
        for row, tensor in zip(rows_by(cuda_way, tensors), tensors, strict=True):
            assert_moments(row, elements_of(tensor))

    assert [record.message for record in caplog.records] == [
        f"statistics of CUDA tensors are taken by torch calls: {type(error).__name__}: {error}"
    ]


def test_a_fault_of_a_tensor_is_not_taken_for_one_of_triton(cuda_way, caplog, launched):
    freed = torch.randn(4)
    freed.untyped_storage().resize_(0)

    with pytest.raises(ValueError, match="has no memory of its own"):
        rows_by(cuda_way, [freed])

    assert cuda_way.is_used
    assert not caplog.records
