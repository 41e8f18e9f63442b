"""Signs against numpy in float64, both ways to read them, in every instruction set of this machine."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.statistics.test_compiled import NEEDED_FLAGS
from trainermon.core.values import STATISTICS
from trainermon.statistics import bitmaps
from trainermon.statistics import signs as module
from trainermon.statistics.kernel import moments
from trainermon.statistics.signs import WORD_BITS, signs_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SPECIAL = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, -1e-40, 1.0, -1.0, 6e-8]
BOUNDS = (-1.0, 0.0, 1.0)


def random(count, dtype, seed=0):
    values = torch.from_numpy(np.random.default_rng(seed).standard_normal(count)).to(dtype)
    values[: len(SPECIAL)] = torch.tensor(SPECIAL, dtype=torch.float64)[:count].to(dtype)
    return values


def bits(words, count):
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:count].astype(bool)


def check(found, tensor):
    values = tensor.detach().double().flatten().numpy()
    count = values.size
    assert found.num_elements == count
    assert len(found.positive) == len(found.negative) == -(-count // WORD_BITS)
    assert (bits(found.positive, count) == (values > 0)).all()
    assert (bits(found.negative, count) == (values < 0)).all()
    assert np.bitwise_count(found.positive).sum() == (values > 0).sum(), "a bit beyond the last element"
    row = torch.empty((1, len(STATISTICS)), dtype=torch.float64)
    moments([tensor], row)
    assert found.moments.tolist() == row[0].tolist()
    assert found.at_most.tolist() == [int((values <= bound).sum()) for bound in BOUNDS]


@pytest.fixture(scope="module", params=["compiled", "torch"])
def way(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(module, "_compiled", lambda: None)
        yield request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("way")
def test_signs_are_those_of_numpy(dtype):
    tensors = [random(count, dtype, seed=count) for count in (0, 1, 63, 64, 65, 2047, 2048, 2049, 5001, 65536 + 70)]

    for tensor, found in zip(tensors, signs_of(tensors, BOUNDS), strict=True):
        check(found, tensor)


@given(st.lists(st.floats(width=32), max_size=200))
def test_any_floats_have_the_signs_that_numpy_gives_them(values):
    tensor = torch.tensor(values, dtype=torch.float32)

    check(signs_of([tensor], BOUNDS)[0], tensor)


@pytest.mark.usefixtures("way")
def test_elements_come_in_the_order_of_the_tensor_however_they_lie():
    tensor = random(60 * 7, torch.float32).view(60, 7)

    check(signs_of([tensor.t()], BOUNDS)[0], tensor.t().contiguous())
    check(signs_of([tensor[:, ::2]], BOUNDS)[0], tensor[:, ::2].contiguous())
    check(signs_of([tensor[0, 0]], BOUNDS)[0], tensor[0, 0])


def test_a_freed_tensor_is_refused():
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)

    with pytest.raises(ValueError, match="has no memory of its own"):
        signs_of([tensor])


@pytest.mark.parametrize("instructions", NEEDED_FLAGS)
def test_every_instruction_set_gives_the_right_signs(tmp_path, instructions):
    compiler = shutil.which("gcc")
    cpu = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    if compiler is None or "sse2" not in cpu or not NEEDED_FLAGS[instructions] <= set(cpu):
        pytest.skip(f"needs gcc and a processor with {instructions}")
    library = tmp_path / "signs.so"
    flags = ["-O3", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-DCLONED=", f"-march={instructions}"]
    flags += ["-fno-math-errno", "-fno-trapping-math"]
    sources = [Path(module.__file__).with_name(name) for name in ("signs.c", "moments.c")]
    subprocess.run([compiler, *flags, "-shared", "-fPIC", *sources, "-o", library, "-lm"], check=True)
    kernel = module._SignKernel(ctypes.CDLL(str(library)))

    for dtype in DTYPES:
        tensor = random(5001, dtype)
        check(kernel([tensor], BOUNDS)[0], tensor)


@pytest.fixture
def kernel_or_numpy(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(bitmaps, "_library", lambda: None)


@pytest.mark.parametrize("kernel_or_numpy", ["compiled", "numpy"], indirect=True)
@pytest.mark.usefixtures("kernel_or_numpy")
@pytest.mark.parametrize("count", [0, 1, 64, 1000])
def test_differences_are_counted_as_numpy_counts_them(count):
    values = [np.sign(np.random.default_rng(seed).integers(-1, 2, count)) for seed in (1, 2)]
    maps = [signs_of([torch.from_numpy(each).float()])[0] for each in values]

    found = bitmaps.sign_differences(*((each.positive, each.negative) for each in maps))

    assert found == (((values[0] > 0) != (values[1] > 0)).sum(), (values[0] != values[1]).sum())


@pytest.mark.parametrize("kernel_or_numpy", ["compiled", "numpy"], indirect=True)
@pytest.mark.usefixtures("kernel_or_numpy")
def test_the_differences_of_files_are_those_of_their_tensors():
    random, lengths = np.random.default_rng(0), np.array([3, 0, 40], np.int64)
    ours, theirs = random.integers(0, 2**63, (2, 2 * lengths.sum())).astype(np.uint64)

    found = bitmaps.differences_of_files(ours, theirs, lengths)

    differ = ours ^ theirs
    pairs = (differ[:3], differ[3:6]), (differ[6:6], differ[6:6]), (differ[6:46], differ[46:])
    assert found.tolist() == [
        [int(np.bitwise_count(x).sum()) for x in (above, above | below)] for above, below in pairs
    ]
    with pytest.raises(ValueError, match="found 86 and 85 words, expected 86"):
        bitmaps.differences_of_files(ours, theirs[1:], lengths)


def test_bitmaps_of_other_lengths_are_refused():
    words = np.zeros(2, np.uint64)

    with pytest.raises(ValueError, match=r"found \[2, 1, 2, 1\] words"):
        bitmaps.sign_differences((words, words), (words[:1], words[:1]))
