"""Reads many graphs, in processes of their own where that is worth it, and from the index where they are known."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial

from trainermon.analysis.compare.comparison import num_cores
from trainermon.analysis.graph.index import GraphIndex, size_of
from trainermon.analysis.graph.reading import GraphPlace
from trainermon.analysis.graph.report import GraphReport, ReportMaker, without_graph
from trainermon.core.errors import DumpError
from trainermon.core.terminal.interrupts import end_workers, leave_interrupts
from trainermon.core.terminal.progress import counted

_BYTES_PER_WORKER = 32 << 20
"""What takes about as long to read as it takes to start another process."""


def report_on(
    places: Sequence[GraphPlace], maker: ReportMaker, *, jobs: int | None = None, index: GraphIndex | None = None
) -> Iterator[GraphReport]:
    """Yield the report of each graph, in order; what the `index` has is not read.

    At most `jobs` processes read at the same time (None: one for each core, of small dumps fewer). Each holds one graph
    at a time: memory grows with their number, not with that of the graphs.

    Of several dumps, one that is damaged gets a report without a node that says so.

    Raises:
        DumpError: No dump can be read, or a process was killed.
    """
    known = [None if index is None else index.find(maker, place) for place in places]
    missing = [place for place, report in zip(places, known, strict=True) if report is None]
    workers = min(len(missing), _num_workers(missing) if jobs is None else jobs)
    read = partial(_read, maker, index, is_alone=len(places) == 1)
    made = iter(_in_pool(read, missing, workers) if workers > 1 else map(read, missing))
    for report in counted(known, len(places), "dumps"):
        yield next(made) if report is None else report
    if missing and index is not None:
        index.tidy()


def _num_workers(places: Sequence[GraphPlace]) -> int:
    return min(num_cores(), 1 + sum(map(size_of, places)) // _BYTES_PER_WORKER)


def _read(maker: ReportMaker, index: GraphIndex | None, place: GraphPlace, *, is_alone: bool) -> GraphReport:
    path = None if index is None else index.path_of(maker, place)  # before: what is written meanwhile is another state
    try:
        report = maker(place)
    except DumpError as error:
        if is_alone:
            raise
        return without_graph(place.label, place.level, f"Not judged: {error}.")
    if index is not None and path is not None:
        index.keep(path, report)
    return report


def _in_pool(read: partial[GraphReport], places: Iterable[GraphPlace], workers: int) -> Iterator[GraphReport]:
    # spawned: the caller may hold threads, which a forked process must not inherit
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=leave_interrupts)
    try:
        yield from pool.map(read, places)
    except BrokenProcessPool as error:
        raise DumpError("a process that reads dumps was killed: memory may be short, try fewer with --jobs") from error
    finally:
        end_workers(pool)
