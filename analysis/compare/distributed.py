"""Compares all dumps of two sides, each pair in a process of its own, from which only a summary comes back."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trainermon.analysis.compare.comparison import CompareOptions, compare_pair
from trainermon.analysis.compare.files import Destination, as_document, write_files
from trainermon.analysis.compare.places import PlacePair, find_places, pair_places
from trainermon.analysis.compare.ray_pool import ray_map
from trainermon.analysis.compare.summary import Outcome, summarise

_T = TypeVar("_T")


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
    target: Path, golden: Path, destination: Destination | None, *, options: CompareOptions
) -> Iterator[Outcome]:
    """Yield the outcome of every pair as soon as it and those before it are done.

    Raises:
        DumpError: a side has no dump, none of them belong together, or one is damaged.
        ConfigError: no Ray cluster answers at `options.ray`.
    """
    if destination is not None:
        destination = replace(destination, folder=destination.folder.absolute())
    return _apply(partial(_outcome, options=options, destination=destination), target, golden, options.ray)


def documents(target: Path, golden: Path, *, options: CompareOptions) -> Iterator[Any]:
    """Yield what a JSON file would hold of every pair; see `outcomes`."""
    return _apply(partial(_document, options=options), target, golden, options.ray)


def _apply(function: Callable[[PlacePair], _T], target: Path, golden: Path, ray: str | None) -> Iterator[_T]:
    if ray is None:
        pairs = pair_places(find_places(target), find_places(golden))
        yield from local_map(len(pairs))(function, pairs)
        return
    pairs = pair_places(find_places(target.absolute()), find_places(golden.absolute()))
    with ray_map(ray) as apply:
        yield from apply(function, pairs)


def local_map(num_pairs: int) -> Callable[[Callable[[PlacePair], _T], Iterable[PlacePair]], Iterator[_T]]:
    """Return what applies a function in a pool of processes, or in this one if there is but one pair or core."""
    workers = min(num_pairs, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return map if workers < 2 else partial(_pool_map, workers)


def _pool_map(workers: int, function: Callable[[PlacePair], _T], pairs: Iterable[PlacePair]) -> Iterator[_T]:
    # spawned: the caller may hold threads and accelerators, which a forked process must not inherit
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(function, pairs)


def _outcome(pair: PlacePair, *, options: CompareOptions, destination: Destination | None) -> Outcome:
    comparison = compare_pair(pair, options)
    return summarise(comparison, write_files(comparison, destination) if destination else ())


def _document(pair: PlacePair, *, options: CompareOptions) -> Any:
    return as_document(compare_pair(pair, options))
