"""A step under `CollectiveTaps`, and its rows by name; for tests in one process and in several."""

from typing import Any

import numpy as np
import torch

from trainermon.core.config import CollectivesConfig
from trainermon.core.values import NO_ELEMENTS, Kind, Moments, SeriesKey
from trainermon.hooks.guard import FaultGuard
from trainermon.monitor.taps.collectives import CollectiveTaps
from trainermon.monitor.taps.collector import Collector

EVERYTHING = CollectivesConfig(enable=True, cc_pre_hook=True)


class Steps:
    """Runs actions as steps, each under taps that are attached for it, and returns the rows of each."""

    def __init__(self, config=EVERYTHING, purposes=None):
        self.faults = []
        self.keys = []
        self.block: Any = None
        writer: Any = self
        self.collector = Collector(torch.device("cpu"), writer)
        self.taps = CollectiveTaps(
            self.collector, FaultGuard(self.faults.append), purposes=purposes or {}, config=config
        )

    def add_series(self, keys, placements):
        self.keys += keys

    def append_block(self, block, _frame=None):
        self.block = block

    def rows(self, action):
        """Return the rows of a step that is `action`, and nothing is left attached."""
        self.collector.begin(0)
        self.taps.attach()
        try:
            action()
            self.taps.step_ended()
        finally:
            self.taps.detach()
        return self.sealed()

    def sealed(self):
        """End the open step and return its rows."""
        self.block = None
        self.collector.seal()
        self.collector.write_ready(wait=True)
        assert self.faults == []
        if self.block is None:
            return Rows({})
        values = np.asarray(self.block.values)
        found = {self.keys[number]: Moments(*values[:, i]) for i, number in enumerate(self.block.series)}
        return Rows(found)


class Rows(dict):
    """Moments by series key."""

    def of(self, name, slot, call=0):
        """Return the moments of one row."""
        return self[SeriesKey(Kind.COMM, name, slot, call)]

    def value(self, name, slot):
        """Return a number that stands for itself."""
        return self.of(name, slot).sum

    def slots(self, name, call=0):
        """Return the slots that one call has."""
        return {key.slot for key in self if (key.name, key.call) == (name, call)}

    def names(self):
        """Return the names of what has operands or waiting times: group and operation."""
        return {key.name for key in self if "." in key.name}


def moments(values):
    """Return the moments of finite values, by numpy in float64."""
    flat = np.asarray(values, dtype=np.float64).reshape(-1)
    if not flat.size:
        return NO_ELEMENTS
    return Moments(
        flat.size, flat.min(), flat.max(), flat.sum(), np.dot(flat, flat), int(np.count_nonzero(flat == 0)), 0.0, 0.0
    )


def close(found, expected):
    """Whether two moments agree: counts and extremes exactly, sums to 1e-6."""
    exact = [
        getattr(found, name) == getattr(expected, name) for name in ("count", "min", "max", "zeros", "nans", "infs")
    ]
    return all(exact) and np.allclose([found.sum, found.sum_sq], [expected.sum, expected.sum_sq], rtol=1e-6, atol=1e-6)
