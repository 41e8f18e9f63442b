"""What the collector takes, and what it leaves alone."""

import numpy as np
import pytest
import torch

from tests.statistics.histogram_truth import numpy_histogram
from tests.statistics.numpy_moments import elements_of
from trainermon.core.events import EventType
from trainermon.core.values import Kind, SeriesKey
from trainermon.monitor.taps import collector as collector_module
from trainermon.monitor.taps.collector import Collector


class Journal:
    """A journal in memory."""

    def __init__(self):
        self.series, self.blocks, self.events = [], [], []

    def add_series(self, keys, placements):
        self.series += keys

    def append_block(self, block, _frame=None):
        self.blocks.append(block)

    def append_event(self, event):
        self.events.append(event)


@pytest.fixture
def journal():
    return Journal()


def test_while_a_graph_is_captured_nothing_is_read_and_one_message_says_so(monkeypatch, journal, caplog):
    capturing = [False]
    monkeypatch.setattr(collector_module, "capture_check", lambda device: lambda: capturing[0])
    collector = Collector(torch.device("cpu"), journal)
    series = [collector.table.id_of(SeriesKey(Kind.ACTV, name)) for name in "ab"]
    collector.begin(0)
    collector.take(series, [torch.ones(2), torch.ones(3)])
    kept = collector.copy_rows(0, 2)
    collector.seal()

    collector.begin(1)
    capturing[0] = True
    first = collector.take(series, [torch.ones(2), torch.ones(3)])
    collector.repeat(series, kept)
    collector.put(0, 1.0)
    collector.seal()
    capturing[0] = False
    collector.write_ready(wait=True)

    assert (first, collector.refused) == (-1, 4)
    assert [block.step for block in journal.blocks] == [0]
    [event] = journal.events
    assert event.type is EventType.WARNING
    assert "CUDA graph is being captured" in event.message
    assert caplog.text.count("CUDA graph is being captured") == 1


def test_a_series_taken_twice_keeps_its_last_row(journal):
    collector = Collector(torch.device("cpu"), journal)
    collector.begin(3)
    collector.take((0, 1), (torch.ones(2), torch.ones(3)))
    collector.take((1,), (torch.ones(7),))
    collector.seal()

    [block] = journal.blocks
    assert dict(zip(block.series.tolist(), block.values[0].tolist(), strict=True)) == {0: 2.0, 1: 7.0}


def blocks_of(journal):
    return [
        (block.step, dict(zip(block.series.tolist(), block.values[0].tolist(), strict=True)))
        for block in journal.blocks
    ]


def test_the_first_row_of_a_step_closes_the_one_that_has_ended(journal):
    collector = Collector(torch.device("cpu"), journal)
    collector.begin(0)
    collector.take((0,), (torch.ones(2),))
    collector.begin(1)
    assert journal.blocks == []

    collector.take((0,), (torch.ones(3),))
    assert blocks_of(journal) == [(0, {0: 2.0})]
    collector.seal()

    assert blocks_of(journal)[1:] == [(1, {0: 3.0})]


def test_what_comes_late_joins_its_step_while_that_is_open_and_follows_it_later(journal):
    collector = Collector(torch.device("cpu"), journal)
    collector.begin(0)
    collector.take((0,), (torch.ones(2),))
    collector.begin(1)
    with collector.late(0):
        collector.take((1,), (torch.ones(4),))
    collector.take((0,), (torch.ones(3),))  # as a collective does between two records
    with collector.late(0):
        collector.take((2,), (torch.ones(5),))
        collector.put(3, 9.0)
    collector.take((1,), (torch.ones(6),))
    collector.seal()

    assert blocks_of(journal) == [(0, {0: 2.0, 1: 4.0}), (0, {2: 5.0, 3: 1.0}), (1, {0: 3.0, 1: 6.0})]


def test_no_slab_is_lost_by_steps_that_are_empty_or_discarded(journal):
    collector = Collector(torch.device("cpu"), journal)
    for step in range(20):
        collector.begin(step)
        collector.take((), ())
        collector.seal()
        collector.take((0,), (torch.ones(2),))
        collector.reset_step()
    collector.begin(20)
    collector.take((0,), (torch.ones(7),))
    collector.seal()

    assert blocks_of(journal) == [(20, {0: 7.0})]


class EvenSteps:
    """Wants histograms of the series 1 and 2, on even steps."""

    def is_due(self, step):
        return step % 2 == 0

    def wants(self, series):
        return series in (1, 2)


def test_chosen_series_have_histograms_on_steps_that_are_due(journal):
    collector = Collector(torch.device("cpu"), journal)
    collector.histograms = EvenSteps()
    shared, tensors = torch.randn(9), [torch.randn(3), torch.randn(4)]
    for step in range(3):
        collector.begin(step)
        row = collector.take((3,), (shared,))
        collector.share(2, row, shared)  # which alone of the two has one
        collector.take((0, 1), tensors)
        collector.put(4, 1.0)
        collector.seal()

    assert [block.step for block in journal.blocks if block.histograms is not None] == [0, 2]
    block = journal.blocks[2]
    found = {int(block.series[place]): counts for place, counts in zip(*fields_of(block.histograms), strict=True)}
    assert found.keys() == {1, 2}
    np.testing.assert_array_equal(found[1], numpy_histogram(elements_of(tensors[1])))
    np.testing.assert_array_equal(found[2], numpy_histogram(elements_of(shared)))


def fields_of(histograms):
    return histograms.places, histograms.counts
