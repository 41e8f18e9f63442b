"""Adds what the accelerators said to the steps of the ranks, so that it goes the way of their other numbers."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from trainermon.agent.accelerators.readings import AcceleratorReading
from trainermon.agent.follower import FollowedRecord
from trainermon.core.catalogue import (
    ACCELERATOR_CLOCK_SERIES,
    ACCELERATOR_MEMORY_RATIO_SERIES,
    ACCELERATOR_MEMORY_SERIES,
    ACCELERATOR_POWER_SERIES,
    ACCELERATOR_TEMPERATURE_SERIES,
    ACCELERATOR_THROTTLED_SERIES,
    ACCELERATOR_UTILIZATION_SERIES,
)
from trainermon.core.journal import BlockRecord, Header
from trainermon.core.values import NO_ELEMENTS, STATISTICS, Kind, Moments, Placement, SeriesKey, StatBlock

MAX_READINGS = 4096
MAX_STEPS = 4096

MEASURES: Mapping[str, Callable[[AcceleratorReading], float]] = MappingProxyType(
    {
        ACCELERATOR_UTILIZATION_SERIES: lambda reading: reading.utilization,
        ACCELERATOR_MEMORY_SERIES: lambda reading: reading.memory_used_bytes,
        ACCELERATOR_MEMORY_RATIO_SERIES: lambda reading: reading.memory_ratio,
        ACCELERATOR_POWER_SERIES: lambda reading: reading.power_watts,
        ACCELERATOR_TEMPERATURE_SERIES: lambda reading: reading.temperature_celsius,
        ACCELERATOR_CLOCK_SERIES: lambda reading: reading.clock_hertz,
        ACCELERATOR_THROTTLED_SERIES: lambda reading: reading.throttled,
    }
)
"""The series, and what of a reading each is made of."""

Values = npt.NDArray[np.float64]


class AcceleratorRows:
    """Keeps the readings of each rank's accelerator until the step in whose time they fall is read from its journal.

    A reading is an element: the row of a step holds the moments of all readings between the end of the step before and
    its own. A step that is over before the next reading has the last one, unless that is older than `max_age_s`. Steps
    that are read again after a restart, whose readings are gone, have no such rows.

    Args:
        max_age_s: For so many seconds a reading stands for what it reads.
    """

    def __init__(self, max_age_s: float) -> None:
        self._max_age_s = max_age_s
        self._readings: dict[int, _RankReadings] = {}
        self._tables: dict[int, _JoinedTable] = {}
        self._rows: OrderedDict[tuple[int, int, int], tuple[Sequence[str], Values]] = OrderedDict()

    def note(self, rank: int, time_s: float, reading: AcceleratorReading) -> None:
        """Keep a reading of the accelerator of `rank`; `time_s` is Unix time."""
        self._readings.setdefault(rank, _RankReadings()).waiting.append((time_s, reading))

    def extend(self, followed: FollowedRecord) -> FollowedRecord:
        """Return the record with the rows of its step's readings, and its header with their series; else as it is.

        The same step gives the same rows again. Series of the rank keep their order, and within an attempt the table
        only grows.
        """
        header, record = followed
        rank = header.coordinates.rank
        if rank not in self._readings:
            return followed
        table = self._tables.get(rank)
        if table is None or table.attempt != header.attempt:
            table = self._tables[rank] = _JoinedTable(header.attempt)
        if isinstance(record, BlockRecord):
            names, values = self._rows_of(rank, header.attempt, record.block)
            record = dataclasses.replace(record, block=table.join(header, record.block, names, values))
        return FollowedRecord(table.header_of(header), record)

    def _rows_of(self, rank: int, attempt: int, block: StatBlock) -> tuple[Sequence[str], Values]:
        place = (rank, attempt, block.step)
        if place not in self._rows:
            readings = self._readings[rank].take(block.time_s, self._max_age_s)
            rows = {name: _moments([measure(reading) for reading in readings]) for name, measure in MEASURES.items()}
            told = {name: row for name, row in rows.items() if row.count}
            values = np.array([dataclasses.astuple(row) for row in told.values()]).reshape(len(told), len(STATISTICS))
            self._rows[place] = tuple(told), values.T
            while len(self._rows) > MAX_STEPS:
                self._rows.popitem(last=False)
        return self._rows[place]


class _RankReadings:
    """Readings of one rank's accelerator: those that no step has yet, and the last one that a step has."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[float, AcceleratorReading]] = deque(maxlen=MAX_READINGS)
        self._last: tuple[float, AcceleratorReading] | None = None

    def take(self, until_s: float, max_age_s: float) -> list[AcceleratorReading]:
        """Return the readings of a step that ended at `until_s`, Unix time."""
        fresh = []
        while self.waiting and self.waiting[0][0] <= until_s:
            self._last = self.waiting.popleft()
            fresh.append(self._last[1])
        if fresh or self._last is None:
            return fresh
        time_s, reading = self._last
        return [reading] if until_s - time_s <= max_age_s else []


class _JoinedTable:
    """A rank's series with those of its accelerator among them, in the order in which they came up.

    Attributes:
        attempt: The start of the job that it is of.
    """

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self._keys: list[SeriesKey] = []
        self._placements: list[Placement | None] = []
        self._places: list[int] = []  # by the rank's own number of a series
        self._own: dict[str, int] = {}
        self._headers: list[tuple[Header, Header]] = []  # the follower's own one, and with this table

    def join(self, header: Header, block: StatBlock, names: Sequence[str], values: Values) -> StatBlock:
        """Return the block, numbered by this table, with the rows `values` [8, n] of the accelerator."""
        self._follow(header)
        for name in names:
            if name not in self._own:
                self._own[name] = len(self._keys)
                self._keys.append(SeriesKey(Kind.STEP, name))
                self._placements.append(None)
        series = np.array(self._places, np.uint32)[np.asarray(block.series)]
        added = np.array([self._own[name] for name in names], np.uint32)
        told = np.asarray(block.values, np.float64)
        return dataclasses.replace(
            block,
            series=np.concatenate([series, added]),
            values=np.ascontiguousarray(np.concatenate([told, values], axis=1)),
        )

    def header_of(self, header: Header) -> Header:
        """Return `header` with this table; the same object as long as nothing has changed."""
        self._follow(header)
        for own, extended in self._headers:
            if own is header and len(extended.series) == len(self._keys):
                return extended
        extended = dataclasses.replace(header, series=tuple(self._keys), placements=tuple(self._placements))
        others = [entry for entry in self._headers if entry[0] is not header]
        self._headers = [*others[-1:], (header, extended)]  # a store that is behind has a follower of its own
        return extended

    def _follow(self, header: Header) -> None:
        """Add the series that the rank has named since."""
        for number in range(len(self._places), len(header.series)):
            self._places.append(len(self._keys))
            self._keys.append(header.series[number])
            self._placements.append(header.placements[number] if number < len(header.placements) else None)


def _moments(values: Sequence[float]) -> Moments:
    """Return the moments of what is known of the values."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return NO_ELEMENTS
    squares = math.fsum(value * value for value in known)
    zeros = known.count(0.0)
    return Moments(len(known), min(known), max(known), math.fsum(known), squares, zeros, 0.0, 0.0)
