"""CRC-32 against zlib, at any length and place, by every width of register that this machine has."""

import ctypes
import math
import shutil
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from trainermon.core.values import STATISTICS
from trainermon.statistics import crc32 as module
from trainermon.statistics.crc32 import crc32, moments_and_crc32
from trainermon.statistics.kernel import moments

BYTES = np.random.default_rng(0).integers(0, 256, 1 << 16, np.uint8)
NEEDED_FLAGS = {16: "pclmulqdq", 32: "avx2 vpclmulqdq", 64: "avx512f vpclmulqdq"}
SIZES = [0, 1, 15, 16, 63, 64, 65, 79, 80, 127, 128, 255, 256, 257, 511, 512, 768, 1000, 4095]


@pytest.fixture(scope="module", params=[*NEEDED_FLAGS, "zlib"], ids=str)
def way(request, tmp_path_factory):
    """The checksum of one tensor, by registers of so many bytes, or without the library."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "zlib":
            patch.setattr(module, "_compiled", lambda: None)
        else:
            built = build(request.param, tmp_path_factory.mktemp("crc32"))
            patch.setattr(module, "library", lambda: built)
            compiled = module._compiled.__wrapped__()
            patch.setattr(module, "_compiled", lambda: compiled)
        yield request.param


def build(width, folder):
    compiler = shutil.which("gcc")
    cpu = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    if compiler is None or not set(NEEDED_FLAGS[width].split()) <= set(cpu):
        pytest.skip(f"needs gcc and a processor with {NEEDED_FLAGS[width]}")
    flags = ["-O3", "-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-DWIDEST={width}"]
    flags += ["-fno-math-errno", "-fno-trapping-math", "-pthread"]
    sources = [Path(module.__file__).with_name(name) for name in ("crc32.c", "signs.c", "moments.c")]
    library = folder / "crc32.so"
    subprocess.run([compiler, *flags, "-shared", "-fPIC", *sources, "-o", library, "-lm"], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.usefixtures("way")
@given(st.integers(0, 5000), st.integers(0, 300))
@example(65_000, 17)
def test_the_crc_is_that_of_zlib(size, first):
    for count in {size, *SIZES}:
        piece = BYTES[first : first + count]

        assert crc32(torch.from_numpy(piece)) == zlib.crc32(piece.tobytes()), count


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [0, 3, 256, 300])
def test_a_crc_is_continued(size):
    if module._compiled() is None:
        pytest.skip("the library alone continues one")
    found = ctypes.c_uint32(zlib.crc32(BYTES[:1000].tobytes()))

    module._compiled().trainermon_crc32(BYTES[1000:].ctypes.data, size, ctypes.byref(found))

    assert found.value == zlib.crc32(BYTES[: 1000 + size].tobytes())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_moments_and_crc_are_those_of_two_passes(dtype):
    random = torch.Generator().manual_seed(0)
    tensors = [torch.randn(count, generator=random).to(dtype) for count in (0, 1, 63, 65_536, 200_003)]
    tensors += [tensors[-1][1:], tensors[-1][:200_000].view(400, 500).T]
    tensors[3][5], tensors[4][7] = math.nan, math.inf
    rows = torch.empty((len(tensors), len(STATISTICS)), dtype=torch.float64)
    moments(tensors, rows)

    found, checksums = moments_and_crc32(tensors)

    assert found == rows.tolist()
    assert checksums == [zlib.crc32(tensor.float().contiguous().numpy().tobytes()) for tensor in tensors]


@pytest.mark.usefixtures("way")
def test_a_tensor_without_memory_is_refused():
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)

    with pytest.raises(ValueError, match="has no memory of its own"):
        moments_and_crc32([tensor])


def test_no_tensors_have_no_rows():
    assert moments_and_crc32([]) == ([], [])
