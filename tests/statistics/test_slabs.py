"""The life of slabs: taken, sealed, ready, released, and never waited for."""

import numpy as np
import pytest
import torch

from tests.statistics.histogram_truth import numpy_histogram
from tests.statistics.numpy_moments import assert_moments, elements_of
from trainermon.statistics import SlabRing
from trainermon.statistics import slabs as slabs_module


class FakeCopy:
    """Stands for an accelerator's copy to the host: it arrives when the test says so."""

    def __init__(self, device):
        self.arrived = False

    def was_written(self, *tables):
        pass

    def join(self):
        pass

    def start(self, *tables):
        self.arrived = False
        return [table.clone() for table in tables]

    def done(self):
        return self.arrived

    def wait(self):
        self.arrived = True


@pytest.fixture
def copies(monkeypatch):
    """Make slabs of a CPU copy like those of an accelerator, and return the copies in the order of the slabs."""
    made = []

    def open_slab(self, device, *, capacity):
        init(self, device, capacity=capacity)
        self._copy = FakeCopy(device)
        made.append(self._copy)

    init = slabs_module.Slab.__init__
    monkeypatch.setattr(slabs_module.Slab, "__init__", open_slab)
    return made


def write_step(ring, step):
    slab = ring.begin(step)
    if slab is not None:
        slab.take([torch.full((2,), float(step))])
        ring.seal(slab)
    return slab


def test_rows_are_those_of_the_tensors_in_order():
    ring = SlabRing(capacity=1)
    tensors = [torch.randn(size) for size in (3, 1, 7, 20)]
    slab = ring.begin(5)

    firsts = [slab.take(tensors[:1]), slab.take(tensors[1:]), slab.take([])]
    ring.seal(slab)

    [ready] = ring.ready()
    assert (ready.step, ready.num_rows, firsts) == (5, 4, [0, 1, 4])
    for row, tensor in zip(ready.rows(), tensors, strict=True):
        assert_moments(row, elements_of(tensor))


def test_rows_are_taken_when_they_are_taken():
    slab = SlabRing().begin(0)
    tensor = torch.ones(4)

    slab.take([tensor])
    tensor.fill_(9.0)

    assert slab.rows()[0].tolist() == [4.0, 1.0, 1.0, 4.0, 4.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("device", ["a CPU", "one whose copy arrives later"])
def test_some_rows_have_histograms_and_the_next_step_has_none_of_them(request, device):
    if device != "a CPU":
        request.getfixturevalue("copies")
    ring, tensors = SlabRing(capacity=1), [torch.randn(size) for size in (3, 1, 7, 20, 0)]
    slab = ring.begin(5)
    slab.take(tensors)

    slab.count([3, 1], [tensors[3], tensors[1]])
    slab.count([4], [tensors[4]])
    assert [slab.has_histogram(row) for row in range(5)] == [False, True, False, True, True]
    ring.seal(slab)
    ring.flush()

    places, counts = slab.histograms()
    for row in (1, 3, 4):
        np.testing.assert_array_equal(counts[places[row]], numpy_histogram(elements_of(tensors[row])))
    ring.put_back(slab)
    places, counts = ring.begin(6).histograms()
    assert (len(places), len(counts)) == (0, 0)


def test_rows_of_one_step_can_be_repeated_in_the_next():
    ring = SlabRing(capacity=1)
    first = ring.begin(0)
    first.take([torch.randn(4), torch.randn(5), torch.randn(6)])
    kept = first.copy_rows(1, 2)
    ring.seal(first)
    second = ring.begin(1)
    second.take([torch.randn(2)])

    row = second.put_rows(kept)

    assert row == 1
    np.testing.assert_array_equal(second.rows()[1:], first.rows()[1:])


def test_any_nonfinite_looks_at_the_named_rows_only():
    slab = SlabRing().begin(0)
    slab.take([torch.ones(3), torch.tensor([1.0, torch.nan]), torch.tensor([-torch.inf])])

    assert [slab.any_nonfinite([row]) for row in (0, 1, 2)] == [False, True, True]
    assert slab.any_nonfinite([0, 2])


def test_a_step_is_handed_out_when_its_copy_has_arrived_and_in_order(copies):
    ring = SlabRing()
    write_step(ring, 0)
    write_step(ring, 1)
    [second, first] = copies[-2:]  # the ring takes its slabs from the end

    assert ring.ready() == []
    second.arrived = True
    assert ring.ready() == []
    first.arrived = True
    assert [slab.step for slab in ring.ready()] == [0, 1]


def test_a_step_without_a_free_slab_is_skipped_and_counted(copies):
    ring = SlabRing(num_slabs=3)

    slabs = [write_step(ring, step) for step in range(5)]

    assert [slab is None for slab in slabs] == [False, False, False, True, True]
    assert ring.skipped == 2


def test_a_released_slab_serves_again(copies):
    ring = SlabRing(num_slabs=3)
    for step in range(3):
        write_step(ring, step)
    copies[2].arrived = True

    [slab] = ring.ready()
    ring.put_back(slab)

    assert write_step(ring, 3) is slab
    assert slab.step == 3


def test_flush_waits_for_every_sealed_slab(copies):
    ring = SlabRing()
    write_step(ring, 0)
    write_step(ring, 1)

    slabs = ring.flush()

    assert [(slab.step, slab.rows()[0, 1].item()) for slab in slabs] == [(0, 0.0), (1, 1.0)]
    assert ring.flush() == []


def test_an_open_slab_that_is_released_is_used_again():
    ring = SlabRing()
    for step in range(10):
        slab = ring.begin(step)
        slab.take([torch.ones(1)])
        ring.put_back(slab)

    assert (ring.skipped, ring.ready()) == (0, [])
    assert ring.begin(10).num_rows == 0


def test_two_slabs_are_open_at_a_time_and_keep_apart():
    ring = SlabRing()
    first, second = ring.begin(0), ring.begin(1)
    second.take([torch.full((2,), 7.0)])
    first.take([torch.full((3,), 5.0)])

    ring.seal(first)
    ring.seal(second)

    assert [(slab.step, slab.rows()[0, 0].item()) for slab in ring.ready()] == [(0, 3.0), (1, 2.0)]


def test_fewer_than_three_slabs_are_refused():
    with pytest.raises(ValueError, match="num_slabs is 2, expected at least 3"):
        SlabRing(num_slabs=2)
