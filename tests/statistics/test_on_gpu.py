"""The Triton kernels and the slabs on a CUDA device: right, deterministic, without a wait, in a bounded memory."""

import contextlib

import numpy as np
import pytest
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tests.statistics.histogram_truth import numpy_histogram
from tests.statistics.numpy_moments import assert_moments, elements_of
from tests.strategies import FLOATS, INTEGERS, LAYOUTS, PATTERNS, fill
from trainermon.core.values import NUM_BINS
from trainermon.statistics import SlabRing, kernel_name, moments
from trainermon.statistics.histograms import counting, torch_counts
from trainermon.statistics.slabs import capture_check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MAX_LAUNCHES = 12
MIB = 1 << 20


@contextlib.contextmanager
def nothing_waits():
    """Raise on any wait of the host for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def rows_of(tensors):
    out = torch.full((len(tensors), 8), -7.0, dtype=torch.float64, device="cuda")
    moments(tensors, out)
    return out.cpu().numpy()


def launches_of(action):
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as record:
        action()
        torch.cuda.synchronize()
    kernels = [event for event in record.events() if event.device_type is DeviceType.CUDA]
    return [event.name for event in kernels if not event.name.lower().startswith("mem")]


def test_triton_serves_cuda_tensors():
    rows_of([torch.ones(3, device="cuda")])

    assert kernel_name("cuda:0") == "triton"


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_every_kind_of_data_in_every_size_is_read_right(dtype):
    sizes = (0, 1, 100, 1023, 16_383, 16_384, 16_385, 200_000, 3_000_001)
    tensors = [fill(pattern, size, dtype=dtype, seed=1) for pattern in sorted(PATTERNS) for size in sizes]

    rows = rows_of([tensor.cuda() for tensor in tensors])

    for row, tensor in zip(rows, tensors, strict=True):
        assert_moments(row, elements_of(tensor))


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_every_layout_is_read_right_alone_and_in_a_list(layout):
    tensors = [fill("mixed", 300 * 1000, dtype=dtype, seed=5).reshape(300, 1000).cuda() for dtype in FLOATS + INTEGERS]
    tensors = [LAYOUTS[layout](tensor) for tensor in tensors]

    together = rows_of(tensors)

    for row, tensor in zip(together, tensors, strict=True):
        assert_moments(row, elements_of(tensor.cpu()))
        np.testing.assert_array_equal(rows_of([tensor])[0], row)


@pytest.mark.parametrize("way", ["triton", "torch calls"])
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_histograms_are_those_of_numpy_and_nothing_waits(dtype, way, monkeypatch):
    if way == "torch calls":
        monkeypatch.setattr(counting, "_way_of", lambda device: torch_counts.count_by_sorting)
    sizes = (0, 1, 1023, 16_385, 1_100_000)
    tensors = [fill(pattern, size, dtype=dtype, seed=1).cuda() for pattern in sorted(PATTERNS) for size in sizes]
    out = torch.full((len(tensors), NUM_BINS), -7, dtype=torch.int64, device="cuda")
    counting.count(tensors, out)  # compiles

    with nothing_waits():
        counting.count(tensors, out)

    for row, tensor in zip(out.cpu().numpy(), tensors, strict=True):
        np.testing.assert_array_equal(row, numpy_histogram(elements_of(tensor.cpu())))


def test_the_same_tensors_give_the_same_bits():
    tensors = [torch.randn(size, device="cuda") for size in (10_000_000, 37, 1_000_003)]
    expected = rows_of(tensors)

    for _ in range(20):
        np.testing.assert_array_equal(rows_of(tensors), expected)


@pytest.mark.parametrize("count", [500, 5000])
def test_launches_do_not_grow_with_the_number_of_tensors(count):
    tensors = [torch.randn(1 + index % 3000, device="cuda", dtype=torch.bfloat16) for index in range(count)]
    out = torch.empty(count, 8, dtype=torch.float64, device="cuda")
    moments(tensors, out)

    names = launches_of(lambda: moments(tensors, out))

    assert 0 < len(names) <= MAX_LAUNCHES, names


def test_nothing_is_waited_for_and_memory_does_not_grow():
    gradients = [torch.randn(1_000_003, device="cuda", dtype=torch.bfloat16) for _ in range(300)]
    ring = SlabRing("cuda", capacity=2048)
    before = torch.cuda.memory_allocated()
    used = []

    with nothing_waits():
        for step in range(12):
            slab = ring.begin(step)
            if slab is not None:
                slab.take(gradients)
                slab.take([gradients[0][:1000].view(10, 100)[:, ::3]])
                slab.take(gradients[:100] if step % 2 else gradients[100:])
                ring.seal(slab)
            for ready in ring.ready():
                ring.put_back(ready)
            used.append(torch.cuda.memory_allocated() - before)

    assert max(used) <= 64 * MIB
    assert used[-1] - used[4] < MIB


def test_rows_written_in_a_side_stream_arrive():
    ring, side = SlabRing("cuda"), torch.cuda.Stream()
    big = torch.randn(50_000_000, device="cuda")
    torch.cuda.synchronize()
    slab = ring.begin(0)
    with torch.cuda.stream(side):
        slab.take([big])
    slab.take([torch.ones(5, device="cuda")])
    ring.seal(slab)

    [ready] = ring.flush()

    assert_moments(ready.rows()[0], elements_of(big.cpu()))
    assert ready.rows()[1, 3] == 5.0


def test_a_capture_is_noticed():
    is_capturing = capture_check(torch.device("cuda", 0))
    x = torch.ones(4, device="cuda")
    assert not is_capturing()

    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        seen = is_capturing()
        x.add_(1)

    assert seen
    assert not is_capturing()
