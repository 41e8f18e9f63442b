"""A collector without a file: what taps take, by series, as soon as a step is sealed."""

from __future__ import annotations

import torch

from trainermon.core.values import Moments, Placement, SeriesKey
from trainermon.monitor.taps.collector import Collector


class Rows:
    """Stands where the journal does: `rows[step][key]` and the placement of each series.

    Attributes:
        collector: What taps write to. `begin(step)` and `seal()` make the rows of a step appear here.
    """

    def __init__(self) -> None:
        self.keys: list[SeriesKey] = []
        self.placements: dict[SeriesKey, Placement | None] = {}
        self.rows: dict[int, dict[SeriesKey, Moments]] = {}
        self.collector = Collector(torch.device("cpu"), self)  # type: ignore[arg-type]

    def add_series(self, keys, placements) -> None:
        self.keys += keys
        self.placements.update(zip(keys, placements, strict=True))

    def append_block(self, block, _frame=None) -> None:
        step = self.rows.setdefault(block.step, {})
        for column, number in enumerate(block.series):
            step[self.keys[number]] = Moments(*block.values[:, column].tolist())

    def of(self, step, kind) -> dict[str, Moments]:
        """Return the rows of one kind on one step by label."""
        return {key.label: row for key, row in self.rows.get(step, {}).items() if key.kind == kind}
