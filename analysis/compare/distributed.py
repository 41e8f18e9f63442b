"""Compares all dumps of two sides, each pair in a process of its own, from which only a summary comes back."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trainermon.analysis.compare.comparison import CompareOptions, compare_pair, num_cores, pairs_of
from trainermon.analysis.compare.files import Destination, as_document, write_files
from trainermon.analysis.compare.places import PlacePair
from trainermon.analysis.compare.progress import Report, no_report
from trainermon.analysis.compare.ray_pool import ray_map
from trainermon.analysis.compare.summary import Outcome, summarise

_T = TypeVar("_T")
_Function = Callable[..., _T]
"""Compares a pair of places; takes `threads` and `report` where it is called in this process."""


def compare_distributed(
    target: Path | str,
    golden: Path | str,
    output: Path | str | None = None,
    *,
    options: CompareOptions | None = None,
    formats: tuple[str, ...] = ("csv", "json"),
) -> list[Outcome]:
    """Compare every rank and step of two runs, write a set of files for each, and return the outcomes in their order.

    One process per core, at most as many as there are pairs; a single pair is compared in this process. With
    `options.ray` the processes of that cluster do it.

    Raises:
        DumpError: a side has no dump, none of them belong together, or one is damaged.
        ConfigError: there is no such cluster.
    """
    destination = Destination(folder=Path(output), formats=formats) if output is not None else None
    return list(outcomes(Path(target), Path(golden), destination, options=options or CompareOptions()))


def outcomes(
    target: Path,
    golden: Path,
    destination: Destination | None,
    *,
    options: CompareOptions,
    report: Report = no_report,
) -> Iterator[Outcome]:
    """Yield the outcome of every pair as soon as it and those before it are done.

    `report` is told of every pair that is done; of a single pair, which rows.

    Raises:
        DumpError: a side has no dump, none of them belong together, or one is damaged.
        ConfigError: no Ray cluster answers at `options.ray`.
    """
    if destination is not None:
        destination = replace(destination, folder=destination.folder.absolute())
    return _apply(partial(_outcome, options=options, destination=destination), target, golden, options, report)


def documents(target: Path, golden: Path, *, options: CompareOptions) -> Iterator[Any]:
    """Yield what a JSON file would hold of every pair; see `outcomes`."""
    return _apply(partial(_document, options=options), target, golden, options)


def _apply(
    function: _Function[_T], target: Path, golden: Path, options: CompareOptions, report: Report = no_report
) -> Iterator[_T]:
    if options.ray is None:
        pairs = pairs_of(target, golden, options)
        workers = min(len(pairs), num_cores())
        results = _pool_map(workers, function, pairs) if workers > 1 else _map_here(function, pairs, report)
        yield from _counted(results, len(pairs), report)
        return
    pairs = pairs_of(target.absolute(), golden.absolute(), options)
    with ray_map(options.ray) as apply:
        yield from _counted(apply(function, pairs), len(pairs), report)


def _counted(results: Iterable[_T], total: int, report: Report) -> Iterator[_T]:
    for done, result in enumerate(results, start=1):
        report(done, total, "dumps")
        yield result


def _map_here(function: _Function[_T], pairs: list[PlacePair], report: Report) -> Iterator[_T]:
    for pair in pairs:
        yield function(pair, threads=num_cores(), report=report if len(pairs) == 1 else no_report)


def _pool_map(workers: int, function: _Function[_T], pairs: list[PlacePair]) -> Iterator[_T]:
    # spawned: the caller may hold threads and accelerators, which a forked process must not inherit
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(function, pairs)


def _outcome(
    pair: PlacePair,
    *,
    options: CompareOptions,
    destination: Destination | None,
    threads: int = 1,
    report: Report = no_report,
) -> Outcome:
    comparison = compare_pair(pair, options, threads=threads, report=report)
    return summarise(comparison, write_files(comparison, destination) if destination else ())


def _document(pair: PlacePair, *, options: CompareOptions, threads: int = 1, report: Report = no_report) -> Any:
    return as_document(compare_pair(pair, options, threads=threads, report=report))
