"""The rows of the step that is open, which series each belongs to, and their way into the journal.

A tap says "these tensors are these series"; the statistics are taken at once, on the device, into the open slab. A
series that is taken twice in one step keeps its last row; several series may share one row (one tensor, several names).

A step that has ended may stay open for what the script records after it. The first row of the next step closes it,
whichever tap takes that row.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Protocol, TypeVar

import numpy as np

from trainermon.core.events import GapEvent, WarningEvent
from trainermon.core.journal import JournalWriter
from trainermon.core.journal.frames import BlockFrame
from trainermon.core.values import STATISTICS, BlockHistograms, Placement, SeriesKey, StatBlock
from trainermon.statistics.rows.host_rows import Columns

T = TypeVar("T")

logger = logging.getLogger("trainermon")


class RowSlab(Protocol):
    """Interface of memory for the rows of a step, float64 `[rows, 8]`; `statistics.slabs.Slab` says what each does."""

    step: int

    def take(self, tensors: Sequence[Any]) -> int:
        """Compute the moments of tensors into the next rows; return the index of the first."""

    def count(self, rows: Sequence[int], tensors: Sequence[Any]) -> None:
        """Give rows taken earlier the histograms of their tensors too."""

    def has_histogram(self, row: int) -> bool:
        """Whether a row was given a histogram."""

    def copy_rows(self, first: int, count: int) -> Any:
        """Return a copy of rows taken earlier."""

    def put_rows(self, rows: Any) -> int:
        """Append rows that `copy_rows` returned; return the index of the first."""

    def norm(self, rows: Sequence[int]) -> float:
        """Return the norm of the tensors of `rows`, all together; rows on the host only."""

    def any_nonfinite(self, rows: Sequence[int]) -> bool:
        """Whether one of `rows` counts a NaN or an Inf."""

    def any_nonzero(self, rows: Sequence[int]) -> bool:
        """Whether one of `rows` has a finite element that is not zero."""

    def write_columns(self, columns: Columns, scalars: Collection[float]) -> None:
        """Write rows on the host, and single numbers, into `columns`."""

    def histograms(self) -> tuple[Mapping[int, int], Any]:
        """Return by row the place of its histogram, and these on the host."""


class RowSlabRing(Protocol):
    """Interface of slabs that are used in turn; `statistics.slabs.SlabRing` says what each method does."""

    def begin(self, step: int) -> Any:
        """Open a slab for `step`; None if none is free."""

    def seal(self, slab: Any) -> None:
        """End the step of an open slab."""

    def ready(self) -> Sequence[Any]:
        """Return the sealed slabs whose rows are on the host."""

    def flush(self) -> Sequence[Any]:
        """Wait for every sealed slab, and return them all."""

    def put_back(self, slab: Any) -> None:
        """Make a slab available for another step."""


class SeriesNumbers:
    """Gives each series a number, 0, 1, 2 …, in the order in which they are first seen; the rank's series table."""

    def __init__(self) -> None:
        self.keys: list[SeriesKey] = []
        self.placements: list[Placement | None] = []
        self._ids: dict[SeriesKey, int] = {}
        self._num_written = 0

    def id_of(self, key: SeriesKey, placement: Placement | None = None) -> int:
        """Return the number of the series `key`; a series that is new gets the next one.

        `placement` says how its tensor relates to the whole one.
        """
        found = self._ids.get(key)
        if found is None:
            found = self._ids[key] = len(self.keys)
            self.keys.append(key)
            self.placements.append(placement)
        return found

    def write_new(self, journal: JournalWriter) -> None:
        """Append to the journal the series that it does not know yet."""
        if self._num_written < len(self.keys):
            journal.add_series(self.keys[self._num_written :], self.placements[self._num_written :])
            self._num_written = len(self.keys)


class HistogramChoice(Protocol):
    """Interface of the choice of histograms; `histograms.ChosenHistograms` is one by a configuration."""

    def is_due(self, step: int) -> bool:
        """Whether histograms are taken on `step`."""

    def wants(self, series: int) -> bool:
        """Whether the series with this number has one."""


class _StepRows:
    """What was taken for one step: its slab once it has one, the rows in it by series, and numbers of the host."""

    __slots__ = ("rows", "scalars", "slab", "step")

    def __init__(self, step: int) -> None:
        self.step = step
        self.slab: RowSlab | None = None
        self.rows: dict[int, int] = {}
        self.scalars: dict[int, float] = {}


class RowCollector:
    """Collects the statistics of one step at a time and writes each sealed step to the journal.

    Nothing here waits for a device. `muted` makes every take a no-op, while a replay runs through the same hooks.

    Args:
        ring: Memory for the rows.
        journal: Where they go.
        is_capturing: Tells whether a CUDA graph is being captured: then nothing is taken. None: none ever is.

    Attributes:
        table: Which series there are.
        refused: Tensors that were not read because a CUDA graph was being captured; the log and the journal say so
            once. What is read then would be read at every replay of the graph.
        latest: The newest step that was written; its values are there until the next one is.
        histograms: Which series have a histogram on which steps; None: none on any.
    """

    def __init__(
        self, ring: RowSlabRing, journal: JournalWriter, is_capturing: Callable[[], bool] | None = None
    ) -> None:
        self.table = SeriesNumbers()
        self.muted = False
        self.refused = 0
        self.latest: StatBlock | None = None
        self.histograms: HistogramChoice | None = None
        self._is_capturing = is_capturing
        self._ring = ring
        self._journal = journal
        self._taken = _StepRows(0)
        self._ended: _StepRows | None = None
        self._sealed: deque[_StepRows] = deque()
        self._layout = _BlockLayout({}, {})

    def begin(self, step: int) -> None:
        """Start `step`: rows belong to it from now on; its slab is taken when the first row comes.

        What was taken for the step before stays open for `late` until then, or until it is sealed.
        """
        if self._ended is not None:
            self.seal_ended()
        ended, self._taken = self._taken, _StepRows(step)
        if ended.rows or ended.scalars:
            self._ended = ended
        else:
            self._drop(ended)

    @contextlib.contextmanager
    def late(self, step: int) -> Iterator[None]:
        """Return a context in which rows belong to `step`, which has ended; it is written at the end of the context."""
        ended, self._ended = self._ended or _StepRows(step), None
        coming, self._taken = self._taken, ended
        try:
            yield
        finally:
            self._taken = coming
            self._seal(ended)

    def seal_ended(self) -> None:
        """Write the rows of the step that has ended, if they still wait for values of `late`."""
        ended, self._ended = self._ended, None
        if ended is not None:
            self._seal(ended)

    def take(self, series: Sequence[int], tensors: Sequence[Any]) -> int:
        """Compute the eight moments of each tensor, on its device, as the row of the series at the same position.

        Returns the number of the first row, or -1 if none was made.
        """
        if self._is_capturing is not None and self._is_capturing():
            self._refuse(len(tensors))
            return -1
        taken = self._taken
        slab = taken.slab or self._open()
        if self.muted or slab is None:
            return -1
        first = slab.take(tensors)
        if len(series) == 1:
            taken.rows[series[0]] = first
        else:
            taken.rows.update(zip(series, range(first, first + len(tensors)), strict=True))
        if self.histograms is not None and self.histograms.is_due(taken.step):
            counted = [place for place, number in enumerate(series) if self.histograms.wants(number)]
            if counted:
                slab.count([first + place for place in counted], [tensors[place] for place in counted])
        return first

    def share(self, series: int, row: int, tensor: Any = None) -> None:
        """Give the series number `series` the row `row` of another series of this step: it is the same tensor.

        Where only the new series has a histogram, that of `tensor` is taken now.
        """
        if row < 0 or self.muted:
            return
        taken = self._taken
        taken.rows[series] = row
        if self.histograms is None or tensor is None or taken.slab is None or taken.slab.has_histogram(row):
            return
        if self.histograms.is_due(taken.step) and self.histograms.wants(series):
            taken.slab.count((row,), (tensor,))

    def share_all(self, series: Sequence[int], first: int, tensors: Sequence[Any]) -> None:
        """Do what `share` does, for the series at each position: rows are those from `first` on."""
        if first < 0 or self.muted:
            return
        if self.histograms is None:
            self._taken.rows.update(zip(series, range(first, first + len(series)), strict=True))
            return
        for row, (number, tensor) in enumerate(zip(series, tensors, strict=True), start=first):
            self.share(number, row, tensor)

    def move(self, series: int, to: int | None) -> None:
        """Give the row that `series` has in this step to the series `to`, whose own is replaced.

        Drop it if `to` is None. For values whose series is decided by a later value.
        """
        _move(self._taken.rows, series, to)
        _move(self._taken.scalars, series, to)

    def norm(self, series: Iterable[int]) -> float | None:
        """Return the norm of the tensors of `series`, all together, NaN if there is one in them.

        None if one of them has no row in this step. For models on the CPU: the rows are looked at where they are.
        """
        rows = [*map(self._taken.rows.get, series)]
        if self._taken.slab is None or None in rows:
            return None
        return self._taken.slab.norm(rows)  # type: ignore[arg-type]  # no None is among the rows

    def copy_rows(self, first: int, count: int) -> Any:
        """Return a copy of `count` rows from `first` on, on the device; None if nothing was taken."""
        return None if first < 0 or self._taken.slab is None else self._taken.slab.copy_rows(first, count)

    def repeat(self, series: Sequence[int], rows: Any) -> None:
        """Give `series` the rows that `copy_rows` returned in an earlier step, as their tensors have not changed."""
        if self._is_capturing is not None and self._is_capturing():
            self._refuse(len(series))
            return
        slab = self._open()
        if slab is not None and not self.muted:
            first = slab.put_rows(rows)
            self._taken.rows.update(zip(series, range(first, first + len(series)), strict=True))

    def put(self, series: int, value: float) -> None:
        """Record one number, which is on the host already, as the row of `series`."""
        self._taken.scalars[series] = value

    def any_nonfinite(self, series: Iterable[int]) -> bool:
        """Return whether a row of `series` taken in this step holds a NaN or an Inf. Waits for the device."""
        rows = self._rows_of(series)
        return bool(self._taken.slab is not None and rows and self._taken.slab.any_nonfinite(rows))

    def any_nonzero(self, series: Iterable[int]) -> bool:
        """Return whether a row of `series` in this step has a finite element that is not zero. Waits for the device."""
        rows = self._rows_of(series)
        return bool(self._taken.slab is not None and rows and self._taken.slab.any_nonzero(rows))

    def _rows_of(self, series: Iterable[int]) -> list[int]:
        return [row for row in map(self._taken.rows.get, series) if row is not None]

    @property
    def has_ended(self) -> bool:
        """Whether a step that has ended is still open for `late`."""
        return self._ended is not None

    @property
    def is_empty(self) -> bool:
        """Whether no row was recorded for this step."""
        return not self._taken.rows and not self._taken.scalars

    def reset_step(self, *, but: Set[int] = frozenset()) -> None:
        """Drop the rows of the open step, except those of the series `but`.

        Without any of these its memory is used again.
        """
        self._drop(self._taken, but=but)

    def seal(self) -> None:
        """End the step: start to copy its rows to the host, and write every step whose copy has arrived."""
        self.seal_ended()
        taken, self._taken = self._taken, _StepRows(self._taken.step)
        self._seal(taken)

    def _seal(self, taken: _StepRows) -> None:
        if self._is_capturing is not None and self._is_capturing():
            self._drop(taken)
            return
        if taken.rows or taken.scalars:
            taken.slab = taken.slab or self._ring.begin(taken.step)
        if taken.slab is None or not (taken.rows or taken.scalars):
            self._drop(taken)
        else:
            self._sealed.append(taken)
            self._ring.seal(taken.slab)
        self.write_ready()

    def _drop(self, taken: _StepRows, *, but: Set[int] = frozenset()) -> None:
        taken.rows = {series: row for series, row in taken.rows.items() if series in but}
        taken.scalars = {series: value for series, value in taken.scalars.items() if series in but}
        if not taken.rows and taken.slab is not None:
            self._ring.put_back(taken.slab)
            taken.slab = None

    def write_ready(self, *, wait: bool = False) -> None:
        """Write to the journal the ended steps whose rows have arrived on the host; with `wait`, all of them."""
        for slab in self._ring.flush() if wait else self._ring.ready():
            self.table.write_new(self._journal)
            taken = self._sealed.popleft()
            if not self._layout.is_of(taken.rows, taken.scalars):
                self._layout = _BlockLayout(taken.rows, taken.scalars)
            lies = self._layout
            slab.write_columns(lies.columns, taken.scalars.values())
            histograms = None if self.histograms is None else _histograms(slab, taken.rows, self.histograms)
            self.latest = StatBlock(
                step=taken.step,
                time_s=time.time(),
                series=lies.series,
                values=lies.columns.values,
                histograms=histograms,
            )
            self._journal.append_block(self.latest, lies.frame if histograms is None else None)
            self._ring.put_back(slab)

    def flushed(self) -> StatBlock | None:
        """Return the rows of the newest step that has ended, see `latest`; None: there is none. Waits for a device."""
        self.seal_ended()
        self.write_ready(wait=True)
        return self.latest

    def tell(self, message: str) -> None:
        """Write a message to the log and to the journal."""
        logger.warning(message)
        self._journal.append_event(WarningEvent(message=message))

    def tell_gap(self, first: int, last: int | None, why: str) -> None:
        """Write to log and journal that nothing is collected of the steps from `first` to `last`; None: it goes on."""
        steps = f"from step {first} on" if last is None else f"of steps {first} to {last}"
        logger.warning("nothing is collected %s: %s", steps, why)
        self._journal.append_event(GapEvent(first=first, last=last, message=why))

    def note_unseen(self, first: int, what: str, why: str) -> None:
        """Write to the journal alone what is not looked for from the step `first` on, while all else is collected."""
        self._journal.append_event(GapEvent(first=first, last=None, message=why, what=what))

    def _refuse(self, count: int) -> None:
        if not self.refused:
            self.tell(
                "a CUDA graph is being captured: what runs inside of it is not watched, neither now nor when it is "
                "replayed; capture the graph before set_monitor, or leave what is to be watched out of it"
            )
        self.refused += count

    def _open(self) -> RowSlab | None:
        taken = self._taken
        if taken.slab is None:
            if self._ended is not None:
                self.seal_ended()
            taken.slab = self._ring.begin(taken.step)
        return taken.slab


def _move(taken: dict[int, T], series: int, to: int | None) -> None:
    if series in taken:
        value = taken.pop(series)
        if to is not None:
            taken[to] = value


class _BlockLayout:
    """Which series a block has, which row of the slab each is, and what the block is written into.

    Attributes:
        series: The ids of all series, uint32; nobody may write to it.
        columns: Writes rows and single numbers.
        frame: The record of the journal that they are written into.
    """

    def __init__(self, rows: dict[int, int], scalars: dict[int, float]) -> None:
        self._known = [*rows, *scalars], [*rows.values()]
        self.series = np.array(self._known[0], np.uint32)
        self.frame = BlockFrame(self.series)
        self.columns = Columns(
            self._known[1], len(scalars), np.asarray(self.frame.values).reshape(len(STATISTICS), len(self.series))
        )

    def is_of(self, rows: dict[int, int], scalars: dict[int, float]) -> bool:
        """Return whether it suits these rows and numbers; most steps have those of the step before."""
        return self._known == ([*rows, *scalars], [*rows.values()])


def _histograms(slab: RowSlab, rows: dict[int, int], choice: HistogramChoice) -> BlockHistograms | None:
    """Return the histograms of the rows whose series have one, with counts as narrow as they may be."""
    taken, counts = slab.histograms()
    found = [
        (place, taken[row]) for place, (number, row) in enumerate(rows.items()) if row in taken and choice.wants(number)
    ]
    if not found:
        return None
    places, counted = np.array(found, np.intp).T
    chosen = np.asarray(counts)[counted]
    narrow = np.uint32 if chosen.max() < 1 << 32 else np.uint64
    return BlockHistograms(places=places.astype(np.uint32), counts=chosen.astype(narrow))
