"""What the page shows of a run, kept in memory and answered without touching the disk.

`RunHistory` is fed block by block and merges the local ranks: lines (loss, gradient norm, step time, and what else
there is one number of per step), heat maps of series by steps, and of ranks by steps. The whole run is kept, at a
resolution that falls with its length (see `StepGrid`); full detail is in the store. Memory: `max_bytes` for the heat
maps, at most 16 MiB for the steps that some rank has not reached yet, and about 1 MB for the rest.
"""

from __future__ import annotations

import collections
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainermon.core.catalogue import (
    ACCELERATOR_CLOCK_SERIES,
    ACCELERATOR_MEMORY_SERIES,
    ACCELERATOR_POWER_SERIES,
    ACCELERATOR_TEMPERATURE_SERIES,
    ACCELERATOR_THROTTLED_SERIES,
    ACCELERATOR_UTILIZATION_SERIES,
)
from trainermon.core.errors import QueryError
from trainermon.core.journal import Header
from trainermon.core.values import STATISTICS, Coordinates, SeriesKey, StatBlock, measured_as_plain
from trainermon.exporters.grid import PooledGrid, StepGrid
from trainermon.exporters.heat_maps import HeatMaps
from trainermon.exporters.merge import (
    STEP_TIME,
    WAIT,
    Indices,
    MergeTable,
    OpenStep,
    StepSummary,
    series_table,
)
from trainermon.exporters.store.blocks import read_blocks
from trainermon.exporters.stored_steps import ShownSeries, StoredStep

ACCELERATOR_LINES = (
    ACCELERATOR_UTILIZATION_SERIES,
    ACCELERATOR_MEMORY_SERIES,
    ACCELERATOR_POWER_SERIES,
    ACCELERATOR_TEMPERATURE_SERIES,
    ACCELERATOR_CLOCK_SERIES,
    ACCELERATOR_THROTTLED_SERIES,
)
LINES = (
    "loss",
    "grad_norm",
    STEP_TIME,
    "global_grad_norm",
    "learning_rate",
    "clip_ratio",
    "loss_scale",
    "skipped",
    "tokens_per_second",
    "rl_mean_abs",
    "rl_ratio",
    "rl_ess",
    *ACCELERATOR_LINES,
)
_ALWAYS = (STEP_TIME, "loss", "grad_norm", "lag")
RANK_QUANTITIES = (*_ALWAYS, WAIT, *ACCELERATOR_LINES)

# Where several steps share a point the most unusual one is kept: the smallest of these, the largest of the others.
_SMALLEST = frozenset(
    {
        *("clip_ratio", "loss_scale", "tokens_per_second", "rl_ess"),
        *(ACCELERATOR_UTILIZATION_SERIES, ACCELERATOR_CLOCK_SERIES),
    }
)

_LINE_CELLS = 8192
_OPEN_BYTES = 16 << 20
_MAX_OPEN_STEPS = 64
_MAX_SUMMARIES = 1024


class AttemptProgress:
    """Tracks how far the ranks of the newest attempt (start of the job) have come.

    Attributes:
        attempt: Its number; -1 before the first.
        first_step: Its first step; None before that.
    """

    def __init__(self) -> None:
        self.attempt = -1
        self.first_step: int | None = None
        self._newest: dict[int, int] = {}  # by rank that has not ended, the newest step

    @property
    def complete_step(self) -> int | None:
        """The last step that every rank has reached; None where no rank is expected to go on."""
        return min(self._newest.values(), default=None)

    def start(self, attempt: int, *ranks: int) -> None:
        """Register ranks whose steps will come; a later attempt takes the place of the former ones."""
        if attempt > self.attempt:
            self.attempt, self.first_step = attempt, None
            self._newest = {}
        if attempt == self.attempt:
            for rank in ranks:
                self._newest.setdefault(rank, -1)

    def advance(self, attempt: int, step: int, *ranks: int) -> bool:
        """Record the step of ranks; return whether it counts: a later attempt may have repeated it."""
        if attempt == self.attempt:
            self._newest.update(dict.fromkeys(ranks, step))
            return True
        return self.first_step is not None and step < self.first_step

    def end(self, rank: int) -> None:
        """Note that no more steps of a rank will come."""
        self._newest.pop(rank, None)

    def end_all(self) -> None:
        """Note that no more steps of any rank will come."""
        self._newest = {}


class RunHistory:
    """Keeps, in bounded memory, the curves and heat maps of the run so far for the page.

    All methods belong to one thread. A step is complete when every rank that has begun and not ended is past it; until
    then it is shown as far as it is known. When a new attempt begins, what the former ones recorded from its first step
    on is forgotten. Series beyond 4 000 for each MiB of `max_bytes` / 3 are not shown.

    Args:
        max_bytes: Memory for the heat maps.
        order: Gives the place of a series in model order; None: the place in the rank's table, which a journal has in
            that order.
    """

    def __init__(self, *, max_bytes: int = 48 << 20, order: Callable[[Header, SeriesKey], int] | None = None) -> None:
        self._order = order
        self._heat = HeatMaps(max_bytes=max_bytes)
        self._lines = StepGrid(max_columns=_LINE_CELLS)  # a row for each of LINES
        self._ranks = {quantity: StepGrid(max_cells=1 << 16) for quantity in RANK_QUANTITIES}
        self._tables: dict[int, MergeTable] = {}
        self._rank_rows: dict[int, int] = {}
        self._placed: tuple[tuple[ShownSeries, ...], Indices] | None = None
        self._open: dict[int, OpenStep | StoredStep] = {}
        self._progress = AttemptProgress()
        self._summaries: collections.deque[StepSummary] = collections.deque(maxlen=_MAX_SUMMARIES)
        self._summarised = -1
        self.latest: StepSummary | None = None

    def start(self, header: Header) -> None:
        """Register a rank whose blocks will come: no step is complete without it. Optional.

        Repeating it changes nothing.
        """
        self._progress.start(header.attempt, header.coordinates.rank)

    def end(self, rank: int) -> None:
        """Note that no more blocks of this rank will come."""
        self._progress.end(rank)
        self._close_steps()

    def end_all(self) -> None:
        """Note that no more blocks of any rank will come."""
        self._progress.end_all()
        self._close_steps()

    def add(self, header: Header, keys: Sequence[SeriesKey], block: StatBlock) -> None:
        """Add one step of one rank; about 0.2 ms for 3 000 series."""
        self.start(header)
        if header.attempt == self._progress.attempt and self._progress.first_step is None:
            self._begin_attempt(block.step)
        if not self._progress.advance(header.attempt, block.step, header.coordinates.rank):
            return
        step = self._open.setdefault(block.step, OpenStep())
        assert isinstance(step, OpenStep), "blocks are added to a history that was given stored steps"
        step.add(self._table(header, keys), block)
        self._close_steps()

    def add_stored(self, step: StoredStep, coordinates: Mapping[int, Coordinates]) -> None:
        """Add one step of many ranks at once, instead of a block of each; about 2 ms for 10 000 ranks.

        Steps come in order of attempt and number; what comes of one later is joined to it while it is open. A history
        is given either blocks or such steps. `coordinates` are those of the ranks.
        """
        ranks = step.ranks.tolist()
        self._progress.start(step.attempt, *ranks)
        if step.attempt == self._progress.attempt and self._progress.first_step is None:
            self._begin_attempt(step.step)
        if not self._progress.advance(step.attempt, step.step, *ranks):
            return
        for rank in ranks:
            self._rank_rows.setdefault(rank, len(self._rank_rows))
        known, placed = self._open.get(step.step), step.placed(self._places(step.rows, coordinates))
        self._open[step.step] = known.joined(placed) if isinstance(known, StoredStep) else placed
        self._close_steps()

    def refill(self, directory: Path, *, max_rows: int = 2_000_000) -> None:
        """Add the newest blocks of a node's segments, at most about `max_rows` rows; about 1 µs a row.

        Raises:
            StoreError: A segment cannot be read.
        """
        blocks = read_blocks(directory, max_rows=max_rows)
        for _, of_step in itertools.groupby(blocks, lambda entry: (entry[0].attempt, entry[1].step)):
            step = list(of_step)
            for header, _ in step:
                self.start(header)
            for header, block in step:
                self.add(header, header.series, block)
        self.end_all()

    def take_summaries(self) -> list[StepSummary]:
        """Return the steps that have been completed since the last call, each once, at most the newest 1 024."""
        taken = list(self._summaries)
        self._summaries.clear()
        return taken

    def heatmaps(self) -> list[dict[str, Any]]:
        """Return which heat maps there are: [{"kind": "grad_reduced", "statistics": ["rms", ...]}, ...].

        The first statistic is the one that says most.
        """
        return self._heat.plain()

    def rank_quantities(self) -> list[str]:
        """Return the names of the quantities by rank and step (`step_time`, `lag` …) that this run has."""
        return [name for name in RANK_QUANTITIES if name in _ALWAYS or self._ranks[name].has_values]

    def lines(self, names: Sequence[str]) -> dict[str, Any]:
        """Return {"steps": [...], "series": {name: [...]}}, ready for JSON; None where nothing was recorded.

        A line without any value is empty. Beyond 8 192 steps a value is the largest of several steps, of clip ratio,
        loss scale, tokens per second, effective samples, utilisation and clock the smallest, and its step the first of
        them.

        Raises:
            QueryError: A name is unknown.
        """
        for name in names:
            _require(name, LINES, "line")
        copy = self._lines.select(np.arange(len(LINES)))
        for step, now in sorted(self._open.items()):
            copy.put(step, _line_values(now.summary(step)))
        pooled = copy.select(np.array([LINES.index(name) for name in names], np.intp)).pool(_LINE_CELLS)
        filled = np.flatnonzero(~np.isnan(pooled.values).all(axis=0))
        return {
            "steps": [pooled.first_step + column * pooled.stride for column in filled.tolist()],
            "series": {
                name: _told(name, values) for name, values in zip(names, pooled.values[:, filled].tolist(), strict=True)
            },
        }

    def heatmap(self, kind: str, statistic: str, columns: int) -> bytes:
        """Return a heat map in the page's binary format; its rows are in model order, the input's side first.

        Raises:
            QueryError: There is no such heat map.
        """
        grid, labels = self._heat.select(kind, statistic, self._open)
        return _encode(grid.pool(columns), labels, kind=kind, statistic=statistic)

    def ranks(self, quantity: str, columns: int) -> bytes:
        """Return a quantity of ranks by steps in the page's binary format; `step_time` and `lag` are in seconds.

        Raises:
            QueryError: The quantity is unknown.
        """
        grid = self._ranks[_require(quantity, RANK_QUANTITIES, "quantity")]
        known = sorted(self._rank_rows)
        chosen = np.array([self._rank_rows[rank] for rank in known], np.intp)
        copy = grid.select(chosen)
        for step, now in sorted(self._open.items()):
            copy.put(step, now.by_rank(quantity, self._rank_rows)[chosen])
        return _encode(copy.pool(columns), [f"rank {rank}" for rank in known], quantity=quantity)

    def num_bytes(self) -> int:
        """Return the memory held in arrays, in bytes."""
        open_bytes = sum(step.moments.nbytes for step in self._open.values())
        return sum(grid.num_bytes for grid in self._grids()) + open_bytes

    def _grids(self) -> tuple[StepGrid, ...]:
        return (self._lines, *self._heat.grids, *self._ranks.values())

    def _begin_attempt(self, step: int) -> None:
        self._progress.first_step = step
        self._summarised = step - 1
        self._open = {earlier: now for earlier, now in self._open.items() if earlier < step}
        for grid in self._grids():
            grid.cut(step)

    def _table(self, header: Header, keys: Sequence[SeriesKey]) -> MergeTable:
        """Return how the rank's series are used; worked out again when its table has changed."""
        rank = header.coordinates.rank
        table = self._tables.get(rank)
        if table is None or table.header is not header or len(table.rows) != len(keys):
            self._rank_rows.setdefault(rank, len(self._rank_rows))
            table = self._tables[rank] = series_table(
                header,
                keys,
                lambda key, place: self._heat.row(header, key, self._order(header, key) if self._order else place),
            )
        return table

    def _places(self, rows: tuple[ShownSeries, ...], coordinates: Mapping[int, Coordinates]) -> Indices:
        """Return the rows of the heat maps for those of stored steps; worked out again when they are others."""
        if self._placed is None or self._placed[0] is not rows:
            headers = {rank: _header_of(coordinates[rank]) for rank, _ in rows}
            places = [
                self._heat.row(headers[rank], key, self._order(headers[rank], key) if self._order else 0)
                for rank, key in rows
            ]
            self._placed = rows, np.array(places, np.intp)
        return self._placed[1]

    def _close_steps(self) -> None:
        """Put the steps that no rank will add to into the grids; if too many wait for a rank, the oldest of them."""
        complete = self._progress.complete_step
        size = 8 * len(STATISTICS) * max(1, len(self._heat))
        max_open = max(2, min(_MAX_OPEN_STEPS, _OPEN_BYTES // size))
        steps = sorted(self._open)
        for place, step in enumerate(steps):
            if complete is None or step <= complete or place < len(steps) - max_open:
                self._close_step(step, self._open.pop(step))

    def _close_step(self, step: int, now: OpenStep | StoredStep) -> None:
        self._heat.put(step, now)
        told = now.quantities
        for quantity, grid in self._ranks.items():
            if quantity in told:
                grid.put(step, now.by_rank(quantity, self._rank_rows))
        summary = now.summary(step)
        self._lines.put(step, _line_values(summary))
        if step > self._summarised:
            self._summarised = step
            self.latest = summary
            self._summaries.append(summary)


def _header_of(coordinates: Coordinates) -> Header:
    return Header(run_id="", attempt=0, coordinates=coordinates, host="", pid=0, started_s=0.0)


def _line_values(summary: StepSummary) -> np.ndarray:
    """Return the values of LINES as the grid, which keeps the largest, holds them: some with the sign changed."""
    values = [getattr(summary, "step_time_s" if name == STEP_TIME else name) for name in LINES]
    return np.array([_turned(name, value) for name, value in zip(LINES, values, strict=True)])


def _turned(line: str, value: float) -> float:
    """Change the sign where of several steps the smallest value is kept; infinity stays."""
    return -value if line in _SMALLEST and math.isfinite(value) else value


def _told(line: str, values: Sequence[float]) -> list[Any]:
    """Return a line for JSON: seven digits, None for nothing, and no list of nothing but None."""
    told = [measured_as_plain(float(f"{_turned(line, value):.7g}")) for value in values]
    return told if any(value is not None for value in told) else []


def _require(name: str, known: Sequence[str], what: str) -> str:
    if name not in known:
        raise QueryError(f"unknown {what} {name!r}; expected one of: {', '.join(known)}")
    return name


def _encode(pooled: PooledGrid, rows: Sequence[str], **what: str) -> bytes:
    """Return uint32 length of the JSON header, the header (padded to a multiple of 4 bytes), float32 cells by row."""
    header = {
        "rows": list(rows),
        "first_step": pooled.first_step,
        "stride": pooled.stride,
        "columns": pooled.values.shape[1],
        **what,
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    return len(text).to_bytes(4, "little") + text + pooled.values.astype("<f4").tobytes()
