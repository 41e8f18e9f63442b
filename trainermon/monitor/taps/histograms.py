"""Which series have a histogram, and on which steps."""

from __future__ import annotations

from trainermon.core.config.schema import HistogramsConfig
from trainermon.core.values import Kind
from trainermon.hooks.names import chosen
from trainermon.monitor.taps.row_collector import SeriesNumbers


class ChosenHistograms:
    """The choice of histograms by a configuration.

    Args:
        config: Which kinds, targets and steps.
        table: The series that its numbers are about.
        first: The first step that may be collected.
        step_interval: Every how many steps are collected: of these, the first in each `config.step_interval` is due.
    """

    def __init__(self, config: HistogramsConfig, table: SeriesNumbers, *, first: int, step_interval: int) -> None:
        self._config = config
        self._kinds = frozenset(map(Kind, config.kinds))
        self._table = table
        self._step_interval = step_interval
        self._until = first + step_interval
        self._wanted: dict[int, bool] = {}

    def is_due(self, step: int) -> bool:
        """Return whether histograms are taken on `step`, if it is collected."""
        return step % self._config.step_interval < self._step_interval or step < self._until

    def wants(self, series: int) -> bool:
        """Return whether the series with this number has a histogram on steps that are due."""
        found = self._wanted.get(series)
        if found is None:
            key = self._table.keys[series]
            found = key.kind in self._kinds and chosen(key.name, self._config.targets, key.stage)
            self._wanted[series] = found
        return found
