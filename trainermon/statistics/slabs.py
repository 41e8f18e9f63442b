"""Tables of moments that leave the device once per step, a step late, without anybody waiting.

A slab holds the rows of one step. While it is open, rows are computed into its table on the device, and histograms of
some of them into a second one. `seal` starts one asynchronous copy to pinned host memory on a side stream (on a CPU
there is nothing to copy); when the copy's event has passed, the ring hands the slab out. What the rows mean, and where
they go, is decided elsewhere.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainermon.core.values import NUM_BINS, STATISTICS
from trainermon.statistics import histograms
from trainermon.statistics.kernel import write
from trainermon.statistics.merge import NUM_STATISTICS
from trainermon.statistics.rows import host_rows
from trainermon.statistics.rows.host_rows import Columns, Rows

logger = logging.getLogger("trainermon")


class Slab:
    """Memory for the rows of moments of one step: open, then sealed (being copied to the host), ready, and released.

    Attributes:
        step: the step that the rows belong to.
        num_rows: rows taken so far.
    """

    def __init__(self, device: torch.device, *, capacity: int) -> None:
        self.step = -1
        self.num_rows = 0
        self._capacity = capacity
        self._table = torch.empty((capacity, NUM_STATISTICS), dtype=torch.float64, device=device)
        self._counts = torch.empty((0, NUM_BINS), dtype=torch.int64, device=device)
        self._counted: dict[int, int] = {}  # by row, its place in the counts
        self._host_counts = self._counts
        self._copy = None if device.type == "cpu" else _AsyncCopy(device)
        self._hold(self._table if self._copy is None else self._table.new_empty((0, NUM_STATISTICS), device="cpu"))

    def take(self, tensors: Sequence[Tensor]) -> int:
        """Compute the moments of `tensors` into the next rows and return the index of the first of them.

        The tensors are read before this returns (CPU) or in the order of the current stream (accelerator): they may be
        changed or freed right after. Costs no host-device synchronisation.
        """
        first, self.num_rows = self.num_rows, self.num_rows + len(tensors)
        if self.num_rows > self._capacity:
            self._grow(first)
        write(tensors, self._table, first)
        if self._copy is not None:
            self._copy.was_written(self._table)
        return first

    def count(self, rows: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Give rows taken earlier, which have none, the histograms of their tensors too. No synchronisation."""
        first = len(self._counted)
        self._counted.update(zip(rows, range(first, first + len(rows)), strict=True))
        if len(self._counted) > len(self._counts):
            self._join()
            self._counts = _grown(self._counts, first, len(self._counted))
            if self._copy is None:
                self._host_counts = self._counts
        histograms.count(tensors, self._counts, first)
        if self._copy is not None:
            self._copy.was_written(self._table, self._counts)

    def has_histogram(self, row: int) -> bool:
        """Whether a row was given a histogram."""
        return row in self._counted

    def copy_rows(self, first: int, count: int) -> Tensor:
        """Return a copy of rows taken earlier, float64 `[count, 8]` on the device. No synchronisation."""
        self._join()
        return self._table[first : first + count].clone()

    def put_rows(self, rows: Tensor) -> int:
        """Append rows that `copy_rows` of any slab of this device returned; return the index of the first."""
        first, self.num_rows = self.num_rows, self.num_rows + len(rows)
        if self.num_rows > self._capacity:
            self._grow(first)
        self._table[first : self.num_rows] = rows
        if self._copy is not None:
            self._copy.was_written(self._table)
        return first

    def any_nonfinite(self, rows: Sequence[int]) -> bool:
        """Whether one of `rows` counts a NaN or an Inf. Waits for the device: one synchronisation, two if one does."""
        first, last = min(rows), max(rows)  # few other rows are among these
        if self._copy is None and not host_rows.any_nonfinite(self._host, self._address, first, last + 1 - first):
            return False
        counts = self._seen()[:, NUM_STATISTICS - 2 :]
        return bool(counts[first : last + 1].any()) and bool(counts[list(rows)].any())

    def any_nonzero(self, rows: Sequence[int]) -> bool:
        """Whether one of `rows` has a finite element that is not zero. Waits for the device: one synchronisation."""
        return bool(self._seen()[list(rows), STATISTICS.index("sum_sq")].any())

    def seal(self) -> None:
        """End the step: start to copy the rows to the host. No row may be added any more."""
        if self._copy is not None:
            tables = self._table[: self.num_rows], self._counts[: len(self._counted)]
            host, self._host_counts = self._copy.start(*tables)
            self._hold(host)

    def is_ready(self) -> bool:
        """Return whether the rows of a sealed slab have arrived on the host. Never waits."""
        return self._copy is None or self._copy.done()

    def norm(self, rows: Sequence[int]) -> float:
        """Return the norm of the tensors of rows taken earlier, all together; NaN if there is one in them. CPU only."""
        return host_rows.norm(self._host, self._address, rows)

    def write_columns(self, columns: Columns, scalars: Collection[float]) -> None:
        """Write rows of a ready slab, and single numbers, into `columns`."""
        columns.write(self._host, self._address, scalars)

    def rows(self) -> Rows:
        """Return the rows of a ready slab, float64 `[num_rows, 8]` in host memory, valid until it is released."""
        return self._host[: self.num_rows]

    def histograms(self) -> tuple[Mapping[int, int], Tensor]:
        """Return by row the place of its histogram, and these, int64 `[n, 128]` in host memory, of a ready slab."""
        return self._counted, self._host_counts[: len(self._counted)]

    def _open(self, step: int) -> None:
        self.step = step
        self.num_rows = 0
        self._counted = {}

    def _grow(self, used: int) -> None:
        self._join()
        self._table = _grown(self._table, used, self.num_rows)
        self._capacity = len(self._table)
        if self._copy is None:
            self._hold(self._table)

    def _hold(self, host: Tensor) -> None:
        self._host: Rows = host.numpy()
        self._address = host.data_ptr()

    def _seen(self) -> Any:
        """Return the table, for the current stream to look at; on a CPU as numpy's, whose calls take half the time."""
        self._join()
        return self._host if self._copy is None else self._table

    def _join(self) -> None:
        """Let the current stream see the rows that were written in others."""
        if self._copy is not None:
            self._copy.join()

    def _wait(self) -> None:
        if self._copy is not None:
            self._copy.wait()


def _grown(table: Tensor, used: int, needed: int) -> Tensor:
    """Return a table with room for `needed` rows, and at least twice as many as before, that begins with those used."""
    grown = table.new_empty((max(needed, 2 * len(table)), table.shape[1]))
    grown[:used] = table[:used]
    return grown


class _AsyncCopy:
    """A copy to pinned host memory on a side stream, and the event that tells when it is over.

    Works with the module that torch has registered for the kind of device (`torch.cuda`, `torch.xpu`, `torch.npu`):
    its streams, events and pinned memory, no other of its names.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._event = self._module.Event()
        self._writers: list[Any] = []
        self._hosts: dict[int, Tensor] = {}  # by place among the tables

    def was_written(self, table: Tensor, counts: Tensor | None = None) -> None:
        """Remember that the current stream writes to `table`: backward hooks may run in streams of their own.

        And to `counts`, which may have been made in the stream of another hook.
        """
        stream = self._module.current_stream(self._device)
        if stream not in self._writers:
            if self._writers:
                table.record_stream(stream)
            self._writers.append(stream)
        if counts is not None and len(self._writers) > 1:
            counts.record_stream(stream)

    def join(self) -> None:
        """Let the current stream wait, on the device, for all that have written."""
        current = self._module.current_stream(self._device)
        for stream in self._writers:
            if stream != current:
                current.wait_stream(stream)

    def start(self, *tables: Tensor) -> list[Tensor]:
        """Start to copy tables that are whole; return where on the host they will be."""
        hosts = [self._host_of(place, table) for place, table in enumerate(tables)]
        for stream in self._writers:
            self._stream.wait_stream(stream)
        self._writers.clear()
        with self._module.stream(self._stream):
            for host, table in zip(hosts, tables, strict=True):
                if len(table):
                    host.copy_(table, non_blocking=True)
                    table.record_stream(self._stream)
            self._event.record(self._stream)
        return hosts

    def _host_of(self, place: int, table: Tensor) -> Tensor:
        num_rows = len(table)
        if place not in self._hosts or len(self._hosts[place]) < num_rows:
            self._hosts[place] = _pinned(1 << (num_rows - 1).bit_length() if num_rows else 0, table)
        return self._hosts[place][:num_rows]

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


def _pinned(num_rows: int, table: Tensor) -> Tensor:
    """Return host memory for rows as in `table`, pinned where the device has such memory; else the copy to it waits."""
    shape = num_rows, table.shape[1]
    try:
        return torch.empty(shape, dtype=table.dtype, device="cpu", pin_memory=num_rows > 0)
    except (RuntimeError, NotImplementedError) as error:
        logger.warning("no pinned host memory, so the copy of statistics waits for the device: %s", error)
        return torch.empty(shape, dtype=table.dtype, device="cpu")


def capture_check(device: torch.device) -> Callable[[], bool] | None:
    """Return a function that tells whether the current stream of `device` is being captured; None: never, on a CPU.

    What a capture records runs again at every replay, and it forbids waiting, so nothing may be taken meanwhile.
    """
    if device.type == "cpu":
        return None
    return getattr(torch.get_device_module(device), "is_current_stream_capturing", None)


class SlabRing:
    """A fixed number of slabs (memory for the rows of one step each) that are used in turn.

    Args:
        device: where the monitored tensors are.
        num_slabs: at least 3: one open, one whose copy is in flight, one that is being written out.
        capacity: rows that a slab starts with; it grows as needed and stays grown.

    Attributes:
        skipped: steps on which no slab was free. A step is skipped rather than waited for.
    """

    def __init__(self, device: torch.device | str = "cpu", *, num_slabs: int = 3, capacity: int = 1024) -> None:
        if num_slabs < 3:
            raise ValueError(f"num_slabs is {num_slabs}, expected at least 3: open, in flight, being written out")
        self.skipped = 0
        self._free = [Slab(torch.device(device), capacity=capacity) for _ in range(num_slabs)]
        self._sealed: deque[Slab] = deque()

    def begin(self, step: int) -> Slab | None:
        """Open a slab for `step`; None, counted in `skipped`, if none is free. Several may be open at a time."""
        if not self._free:
            self.skipped += 1
            return None
        slab = self._free.pop()
        slab._open(step)
        return slab

    def seal(self, slab: Slab) -> None:
        """End the step of an open slab: its rows are copied to the host, and `ready` returns it when they are there."""
        slab.seal()
        self._sealed.append(slab)

    def ready(self) -> list[Slab]:
        """Return the sealed slabs whose rows have arrived, oldest first. Never waits. Give each back by `release`."""
        slabs = []
        while self._sealed and self._sealed[0].is_ready():
            slabs.append(self._sealed.popleft())
        return slabs

    def flush(self) -> list[Slab]:
        """Wait for every sealed slab and return them all, oldest first. For the end of a run only."""
        slabs = list(self._sealed)
        self._sealed.clear()
        for slab in slabs:
            slab._wait()
        return slabs

    def put_back(self, slab: Slab) -> None:
        """Make a slab available for another step: one that is open, or that `ready` or `flush` returned.

        Its rows are valid no more.
        """
        self._free.append(slab)
