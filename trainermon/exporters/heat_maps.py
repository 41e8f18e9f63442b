"""The heat maps of a run: which rows there are, and their values by step for each statistic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from trainermon.core.errors import QueryError
from trainermon.core.journal import Header
from trainermon.core.values import Kind, SeriesKey
from trainermon.exporters.grid import MIN_COLUMNS, StepGrid
from trainermon.exporters.heat_rows import HEATMAP_STATISTICS, HeatRow, heat_row, statistics_of
from trainermon.exporters.merge import StepMoments, heat

# What a heat map calls otherwise.
_GRIDS = {"mean": "rms", "max": "absmax"}


class HeatMaps:
    """Collects the values of all heat maps of the page: rows are series, columns are steps.

    A row is known by its number, in the order in which rows were met.

    Args:
        max_bytes: Memory for all values; rows beyond 4 000 for each MiB of a third of it are not shown.
    """

    def __init__(self, *, max_bytes: int) -> None:
        cells = max_bytes // 4 // len(HEATMAP_STATISTICS)
        self._grids = {statistic: StepGrid(max_cells=cells) for statistic in HEATMAP_STATISTICS}
        self._max_rows = cells // MIN_COLUMNS
        self._rows: dict[HeatRow, int] = {}
        self._is_size: list[bool] = []  # by row: what is shown is a size, not a value that has a sign
        self._sizes = np.zeros(0, np.bool_)  # the same, as far as it was asked for
        self._places: dict[int, tuple[int, int]] = {}  # by row: pipeline chunk, and place in the rank's table

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def grids(self) -> Iterator[StepGrid]:
        """The grid of values of each heat map and statistic."""
        yield from self._grids.values()

    def row(self, header: Header, key: SeriesKey, place: int) -> int:
        """Return the number of the row that shows a series; -1 if none does.

        `place` is the position of the series in the rank's table.
        """
        row = heat_row(key)
        if row is None or (row not in self._rows and len(self._rows) == self._max_rows):
            return -1
        index = self._rows.setdefault(row, len(self._rows))
        if index == len(self._is_size):
            self._is_size.append("rms" in statistics_of(row.heat_map))
        self._places[index] = (key.stage * header.coordinates.pp_size + header.coordinates.pp, place)
        return index

    def put(self, step: int, now: StepMoments) -> None:
        """Add the values of a step, merged over the ranks that have shown it; put twice, the larger stays."""
        for statistic, grid in self._grids.items():
            grid.put(step, self._values(now, statistic))

    def plain(self) -> list[dict[str, Any]]:
        """Return which heat maps there are, ready for JSON: `[{"kind": …, "statistics": […]}]`.

        The first statistic is the one that says most.
        """
        names = dict.fromkeys(row.heat_map for row in self._rows)
        order = {kind.value: place for place, kind in enumerate(Kind)}
        ordered = sorted(names, key=lambda name: order[name.partition("/")[0]])
        return [{"kind": name, "statistics": list(statistics_of(name))} for name in ordered]

    def select(self, kind: str, statistic: str, still_open: Mapping[int, StepMoments]) -> tuple[StepGrid, list[str]]:
        """Return the values of a heat map, and the label of each row; rows are in model order, inputs first.

        `still_open` are the steps that not all ranks have reached.

        Raises:
            QueryError: There is no such heat map.
        """
        rows = [(self._places[index], row.label, index) for row, index in self._rows.items() if row.heat_map == kind]
        if not rows:
            known = ", ".join(entry["kind"] for entry in self.plain())
            raise QueryError(f"no heat map of kind {kind!r}; expected one of: {known or 'none yet'}")
        known_statistics = statistics_of(kind)
        if statistic not in known_statistics:
            raise QueryError(f"unknown statistic {statistic!r}; expected one of: {', '.join(known_statistics)}")
        source = _GRIDS.get(statistic, statistic)
        rows.sort()
        chosen = np.array([index for *_, index in rows])
        copy = self._grids[source].select(chosen)
        for step, now in sorted(still_open.items()):
            copy.put(step, _padded(self._values(now, source), len(self._rows))[chosen])
        return copy, [label for _, label, _ in rows]

    def _values(self, step: StepMoments, statistic: str) -> np.ndarray:
        if len(self._sizes) < len(self._is_size):
            self._sizes = np.array(self._is_size)
        return heat(step.moments, statistic, is_size=self._sizes[: step.moments.shape[1]])


def _padded(values: np.ndarray, length: int) -> np.ndarray:
    return np.concatenate([values, np.full(length - len(values), np.nan)])
