"""Compares all dumps of two sides, each pair in a process of its own, from which only a summary comes back."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trainermon.analysis.compare.answer.summary import RESULTS, ComparisonOutcome, failed, summarise
from trainermon.analysis.compare.comparison import CompareOptions, compare_pair, num_cores, pairs_of
from trainermon.analysis.compare.merging.places import LonePlace, PairedPlaces, PlacePair
from trainermon.analysis.compare.output.files import OutputDestination, as_document, write_files
from trainermon.analysis.compare.ray_pool import ray_map
from trainermon.core.errors import DumpError
from trainermon.core.terminal.interrupts import end_workers, leave_interrupts
from trainermon.core.terminal.progress import Report, no_report

_T = TypeVar("_T")
_Function = Callable[..., _T]
"""Compares a pair of places; takes `threads` and `report` where it is called in this process."""


def outcomes(
    target: Path,
    golden: Path,
    destination: OutputDestination | None,
    *,
    options: CompareOptions,
    report: Report = no_report,
) -> Iterator[ComparisonOutcome]:
    """Compare all pairs of dumps below two folders, several at a time.

    Yield each outcome, in order, as soon as it is there.

    Args:
        target: Folder of the dumps in question.
        golden: Folder of those taken to be right.
        destination: Where the files of each comparison are written; None: nowhere.
        options: How they are compared.
        report: Told of every pair that is done; of a single pair, of its rows.

    If one dump among several is damaged, its outcome says so; at the end are dumps that one side alone has.

    Raises:
        DumpError: a side has no dump, none of them belong together, or the only one is damaged.
        ConfigError: no Ray cluster answers at `options.ray`.
    """
    if destination is not None:
        destination = replace(destination, folder=destination.folder.absolute())
    pairs, lone = _pairs(target, golden, options)
    yield from _apply(_outcome, pairs, options, report, destination=destination)
    yield from (failed(one.target, one.golden, one.place.label, one.why) for one in lone)


def documents(target: Path, golden: Path, *, options: CompareOptions) -> Iterator[Any]:
    """Compare all pairs of dumps below two folders.

    Yield, in order, what the JSON file of each would hold (see README.md); at the end dumps that one side alone has.

    Raises:
        DumpError: As `outcomes` does.
    """
    pairs, lone = _pairs(target, golden, options)
    yield from _apply(_document, pairs, options)
    yield from map(_failure, lone)


def _pairs(target: Path, golden: Path, options: CompareOptions) -> PairedPlaces:
    if options.ray is not None:  # its processes work elsewhere
        target, golden = target.absolute(), golden.absolute()
    return pairs_of(target, golden, options)


def _apply(
    function: _Function[_T],
    pairs: list[PlacePair],
    options: CompareOptions,
    report: Report = no_report,
    **more: Any,
) -> Iterator[_T]:
    bound = partial(function, options=options, is_alone=len(pairs) == 1, **more)
    if options.ray is not None:
        with ray_map(options.ray) as apply:
            yield from _counted(apply(bound, pairs), len(pairs), report)
    else:
        workers = min(len(pairs), num_cores())
        results = _pool_map(workers, bound, pairs) if workers > 1 else _map_here(bound, pairs, report)
        yield from _counted(results, len(pairs), report)


def _counted(results: Iterable[_T], total: int, report: Report) -> Iterator[_T]:
    for done, result in enumerate(results, start=1):
        report(done, total, "dumps")
        yield result


def _map_here(function: _Function[_T], pairs: list[PlacePair], report: Report) -> Iterator[_T]:
    for pair in pairs:
        yield function(pair, threads=num_cores(), report=report if len(pairs) == 1 else no_report)


def _pool_map(workers: int, function: _Function[_T], pairs: list[PlacePair]) -> Iterator[_T]:
    # spawned: the caller may hold threads and accelerators, which a forked process must not inherit
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=leave_interrupts)
    try:
        yield from pool.map(function, pairs)
    finally:
        end_workers(pool)


def _outcome(
    pair: PlacePair,
    *,
    options: CompareOptions,
    is_alone: bool,
    destination: OutputDestination | None,
    **how: Any,
) -> ComparisonOutcome:
    try:
        comparison = compare_pair(pair, options, **how)
    except DumpError as error:
        if is_alone:
            raise
        return failed(pair.target.directory, pair.golden.directory, pair.label, str(error))
    return summarise(comparison, write_files(comparison, destination) if destination else ())


def _document(pair: PlacePair, *, options: CompareOptions, is_alone: bool, **how: Any) -> Any:
    try:
        return as_document(compare_pair(pair, options, **how))
    except DumpError as error:
        if is_alone:
            raise
        return _failure(LonePlace(pair.target, str(pair.target.directory), str(pair.golden.directory), str(error)))


def _failure(lone: LonePlace) -> Any:
    places = {"target": lone.target, "golden": lone.golden, "label": lone.place.label}
    return {**places, "failure": lone.why, "whole": False, "rows": dict.fromkeys(RESULTS, 0)}
