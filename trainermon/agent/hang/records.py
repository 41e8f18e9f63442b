"""Keeps each rank's last records and its last word, for the report that is written when it has died."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from trainermon.agent.consumers import RecordConsumer
from trainermon.core.derived import COUNT, INFS, NANS, SUM
from trainermon.core.events import FailedEvent, RankEvent
from trainermon.core.journal import Header
from trainermon.core.journal.patterns import ByPattern
from trainermon.core.values import STATISTICS, Kind, SeriesKey, StatBlock

KEPT_STEPS = 10
_KINDS = (Kind.LOSS, Kind.STEP)


class StepRecord(NamedTuple):
    """One step of one rank, for the report on a hang.

    Attributes:
        step: The step.
        time_s: When it ended, Unix time by the rank's clock.
        values: By name, the loss and other numbers that it recorded.
    """

    step: int
    time_s: float
    values: Mapping[str, float]


class LastRecords(RecordConsumer):
    """Remembers the last ten steps of each rank, and the exception that ended its script, if one did."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[StepRecord]] = {}
        self._numbers: dict[int, tuple[int, ByPattern[list[tuple[int, str]]]]] = {}
        self._failures: dict[int, tuple[int, FailedEvent]] = {}

    def steps(self, rank: int) -> list[StepRecord]:
        """Return the last steps of a rank, oldest first."""
        return list(self._steps.get(rank, ()))

    def failure(self, rank: int, *, attempt: int) -> FailedEvent | None:
        """Return the exception that ended the script of a rank in an attempt; None without one."""
        found = self._failures.get(rank)
        return found[1] if found is not None and found[0] == attempt else None

    def on_block(self, header: Header, keys: Sequence[SeriesKey], block: StatBlock) -> None:
        """Remember one step of one rank: its time, its loss and other numbers."""
        rank = header.coordinates.rank
        numbers = self._numbers_of(rank, keys).of(np.asarray(block.series))
        rows = np.asarray(block.values, np.float64).reshape(len(STATISTICS), -1)
        values = {name: _mean(*rows[:, row].tolist()) for row, name in numbers}
        kept = self._steps.setdefault(rank, deque(maxlen=KEPT_STEPS))
        kept.append(StepRecord(block.step, block.time_s, values))

    def on_event(self, header: Header, event: RankEvent) -> None:
        """Remember the exception with which a rank's script ended."""
        if isinstance(event, FailedEvent):
            self._failures[header.coordinates.rank] = header.attempt, event

    def _numbers_of(self, rank: int, keys: Sequence[SeriesKey]) -> ByPattern[list[tuple[int, str]]]:
        """Return, for the ids of a block, the rows of the numbers and what these are called."""
        known = self._numbers.get(rank)
        if known is None or known[0] != len(keys):
            names = {number: key.label for number, key in enumerate(keys) if key.kind in _KINDS}
            rows = ByPattern[list[tuple[int, str]]](partial(_rows_of, names))
            known = self._numbers[rank] = (len(keys), rows)
        return known[1]


def _rows_of(names: Mapping[int, str], series: np.ndarray) -> list[tuple[int, str]]:
    return [(row, names[number]) for row, number in enumerate(series.tolist()) if number in names]


def _mean(*moments: float) -> float:
    finite = moments[COUNT] - moments[NANS] - moments[INFS]
    return moments[SUM] / finite if finite else math.nan
