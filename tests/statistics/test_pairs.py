"""The pair kernel against numpy in float64, over types, strides and values."""

import ctypes
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.statistics.test_compiled import NEEDED_FLAGS
from trainermon.statistics import pairs

pytestmark = pytest.mark.skipif(not pairs.is_available(), reason="the compiled library is not there, or an old one")

COUNT = 20_011  # more than two items, and no multiple of a vector
MIXES = [(ours, theirs) for ours in pairs.KINDS for theirs in pairs.KINDS]


def stored(tensor):
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def box(ours, theirs):
    """Return the box of two arrays of one shape."""
    row = np.ones(pairs.BOX_WORDS, np.int64)
    row[:2] = ours.ctypes.data, theirs.ctypes.data
    for start, numbers in (
        (2, ours.shape),
        (2 + pairs.MAX_DIMS, [step // ours.itemsize for step in ours.strides]),
        (2 + 2 * pairs.MAX_DIMS, [step // theirs.itemsize for step in theirs.strides]),
    ):
        end = start + pairs.MAX_DIMS
        row[end - ours.ndim : end] = numbers
    return row[None]


def made(kind, theirs_kind, *, bad=False):
    generator = torch.Generator().manual_seed(len(kind) * 7 + len(theirs_kind))
    ours = torch.randn(COUNT, generator=generator, dtype=torch.float64)
    theirs = ours + 1e-2 * torch.randn(COUNT, generator=generator, dtype=torch.float64)
    ours, theirs = ours.to(getattr(torch, kind)), theirs.to(getattr(torch, theirs_kind))
    theirs[:5_000] = ours[:5_000].to(theirs.dtype)
    if bad:
        ours[17_000], ours[17_001], theirs[17_001], theirs[100] = math.nan, math.inf, -math.inf, math.nan
    return ours, theirs


def expected(ours, theirs):
    a, b = ours.double().numpy(), theirs.double().numpy()
    finite = np.isfinite(a) & np.isfinite(b)
    unequal = (a != b) & ~(np.isnan(a) & np.isnan(b))
    x, y = a[finite], b[finite]
    apart = np.where(finite, np.abs(np.where(finite, a, 0) - np.where(finite, b, 0)), 0)
    return {
        "our_norm": np.linalg.norm(x),
        "their_norm": np.linalg.norm(y),
        "distance": np.linalg.norm(x - y),
        "largest": apart.max(),
        "largest_at": int(apart.argmax()),
        "count": len(a),
        "unequal": int(unequal.sum()),
        "first_unequal": int(np.flatnonzero(unequal)[0]),
        "our_nans": int(np.isnan(a).sum()),
        "our_infs": int(np.isinf(a).sum()),
        "their_nans": int(np.isnan(b).sum()),
        "their_infs": int(np.isinf(b).sum()),
    }


def assert_sums(found, wanted):
    for name, value in wanted.items():
        # the difference of two floats is rounded to a float before it is called the largest
        tolerance = 1e-7 if name == "largest" else 1e-12
        assert getattr(found, name) == pytest.approx(value, rel=tolerance), name


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "with NaN and Inf"])
@pytest.mark.parametrize(("kind", "theirs_kind"), MIXES, ids="-".join)
def test_sums_are_those_of_float64(kind, theirs_kind, bad):
    ours, theirs = made(kind, theirs_kind, bad=bad)

    found = pairs.pair_sums(box(stored(ours), stored(theirs)), kind, theirs_kind)

    assert_sums(found, expected(ours, theirs))


@pytest.mark.parametrize("kind", pairs.KINDS)
def test_equal_arrays_have_no_distance_and_a_cosine_of_one(kind):
    ours, _ = made(kind, kind)
    copy = ours.clone()

    found = pairs.pair_sums(box(stored(ours), stored(copy)), kind, kind)

    assert (found.unequal, found.distance, found.cosine, found.first_unequal) == (0, 0.0, 1.0, -1)
    assert found.our_norm == found.their_norm == pytest.approx(float(ours.double().norm()))


@pytest.mark.parametrize("kind", pairs.KINDS)
def test_one_step_is_one_unit_in_the_last_place(kind):
    ours, _ = made(kind, kind)
    theirs = ours.clone()
    integers = theirs.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.element_size()])
    integers[12_345] += 3

    found = pairs.pair_sums(box(stored(ours), stored(theirs)), kind, kind)

    assert (found.ulps, found.unequal, found.first_unequal, found.largest_at) == (3, 1, 12_345, 12_345)


def test_signs_of_zeros_are_told_apart():
    ours, theirs = np.zeros(40, np.float32), np.zeros(40, np.float32)
    theirs[33] = -0.0

    found = pairs.pair_sums(box(ours, theirs), "float32", "float32")

    assert (found.unequal, found.first_unequal, found.largest, found.ulps) == (1, 33, 0.0, 1)


@pytest.mark.parametrize(("kind", "theirs_kind"), [("float32", "float32"), ("bfloat16", "float32")], ids="-".join)
def test_any_strides_give_what_dense_arrays_give(kind, theirs_kind):
    ours, theirs = made(kind, theirs_kind)
    ours, theirs = ours[:19_200].reshape(10, 40, 48), theirs[:19_200].reshape(10, 40, 48)
    moved = theirs.permute(2, 0, 1).contiguous().permute(1, 2, 0)[1:, ::3, 5:]

    found = pairs.pair_sums(box(stored(ours)[1:, ::3, 5:], stored(moved)), kind, theirs_kind)

    assert_sums(found, expected(ours[1:, ::3, 5:].flatten(), theirs[1:, ::3, 5:].flatten()))


def test_boxes_are_counted_on_and_merge_to_the_whole():
    ours, theirs = (stored(side) for side in made("float32", "float32", bad=True))
    cut = 7_777
    parts = [box(ours[:cut], theirs[:cut]), box(ours[cut:], theirs[cut:])]

    whole = pairs.pair_sums(np.concatenate(parts), "float32", "float32")
    merged = pairs.pair_sums(parts[0], "float32", "float32").merge(pairs.pair_sums(parts[1], "float32", "float32"))

    assert (merged.unequal, merged.first_unequal, merged.largest_at) == (
        whole.unequal,
        whole.first_unequal,
        whole.largest_at,
    )
    assert_sums(whole, expected(torch.from_numpy(ours), torch.from_numpy(theirs)))
    assert merged.distance == pytest.approx(whole.distance)


@pytest.mark.parametrize("target", ["bfloat16", "float16"])
@pytest.mark.parametrize("theirs_kind", ["float32", "stored"])
def test_rounding_is_torchs(target, theirs_kind):
    integers = torch.randint(-(2**31), 2**31, (COUNT,), generator=torch.Generator().manual_seed(3)).int()
    ours = torch.cat([integers.view(torch.float32), torch.linspace(-7e-5, 7e-5, COUNT), torch.linspace(0, 7e4, COUNT)])
    theirs = ours.to(getattr(torch, target))
    kind = target if theirs_kind == "stored" else "float32"
    theirs = theirs.to(getattr(torch, kind))
    both = box(stored(ours), stored(theirs))
    assert pairs.is_rounded(both, "float32", kind, target)

    changed = stored(theirs.clone())
    changed.view(np.uint8)[-1 if kind == target else -2] ^= 1

    assert not pairs.is_rounded(box(stored(ours), changed), "float32", kind, target)


def test_cosine_is_exact_where_the_two_are_nearly_equal():
    found = pairs.PairSums(our_norm=1.0, their_norm=1.0, distance=math.sqrt(2e-14))

    assert 1 - found.cosine == pytest.approx(1e-14, rel=0.01)


def test_one_zero_array_has_no_cosine():
    assert pairs.PairSums(our_norm=1.0, distance=1.0).cosine is None
    assert pairs.PairSums().cosine == 1.0


@pytest.mark.parametrize("instructions", NEEDED_FLAGS)
def test_every_instruction_set_gives_the_right_sums(tmp_path, monkeypatch, instructions):
    compiler = shutil.which("gcc")
    cpu = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    if compiler is None or "sse2" not in cpu or not NEEDED_FLAGS[instructions] <= set(cpu):
        pytest.skip(f"needs gcc and a processor with {instructions}")
    built = tmp_path / "pairs.so"
    flags = ["-O3", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fno-math-errno", "-fno-trapping-math"]
    source = Path(pairs.__file__).with_name("pairs.c")
    subprocess.run(
        [compiler, *flags, "-DCLONED=", f"-march={instructions}", "-shared", "-fPIC", source, "-o", built], check=True
    )
    kernel = pairs._PairKernel(ctypes.CDLL(str(built)))
    monkeypatch.setattr(pairs, "_kernel", lambda: kernel)
    for kind in pairs.KINDS:
        ours, theirs = made(kind, kind, bad=True)

        found = pairs.pair_sums(box(stored(ours), stored(theirs)), kind, kind)

        assert_sums(found, expected(ours, theirs))
