"""Compares two dumps, or all those of two runs: reads, matches, measures and judges. Writes nothing."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path

from trainermon.analysis.compare.causes.judge import CallJudge, JudgedDumps
from trainermon.analysis.compare.causes.premises import run_types
from trainermon.analysis.compare.causes.step_before import StepBefore, step_before
from trainermon.analysis.compare.causes.unseen_arguments import with_unseen_argument
from trainermon.analysis.compare.causes.whole_model import with_whole_model
from trainermon.analysis.compare.items import DumpRows, RecomputedPart, read_rows
from trainermon.analysis.compare.mappings import NameMappings
from trainermon.analysis.compare.matching import match_calls
from trainermon.analysis.compare.merging.joining import join_sides
from trainermon.analysis.compare.merging.merge import read_sides
from trainermon.analysis.compare.merging.places import DumpLocation, PairedPlaces, PlacePair, find_places, pair_places
from trainermon.analysis.compare.merging.splits import find_pairs
from trainermon.analysis.compare.metrics import (
    DumpRowDifference,
    ItemPair,
    checksum_differences,
    statistics_differences,
)
from trainermon.analysis.compare.naming import unused_names
from trainermon.analysis.compare.noise import ELEMENTWISE_SAFETY, SAFETY
from trainermon.analysis.compare.siblings import SiblingMatch, match_siblings
from trainermon.analysis.compare.verdicts import CallResult, Measure, ResultRow, all_compared
from trainermon.core.errors import DumpError
from trainermon.core.terminal.progress import Report, no_report, stage, tell
from trainermon.dump.files.reader import gap_notes

_REPORT_ROWS = 256


class Mode(str, Enum):
    """What of the tensors is compared.

    `tensor`: their elements. `checksum`: the CRC-32 of their bytes. `statistics`: max, min, mean and norm.
    """

    STATISTICS = "statistics"
    CHECKSUM = "checksum"
    TENSOR = "tensor"


_SAFETY = {Mode.STATISTICS: SAFETY, Mode.CHECKSUM: 0.0, Mode.TENSOR: ELEMENTWISE_SAFETY}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """The options of a comparison of two dumps, the target (in question) and the golden one (taken to be right).

    Attributes:
        mode: What is compared; None takes tensors, else checksums, else statistics, whichever both dumps have.
        fuzzy: Pair also calls whose numbers or prefixes differ.
        baseline: Two dumps of the same side: what these differ by is taken for noise.
        stack: Give the call stack with every first row of a call.
        mappings: Names of the target, and what they are called in the golden dump.
        target_sizes: The target's numbers of ranks by axis (`tp`, `dp`, `pp`), if its dumps do not tell them.
        golden_sizes: Likewise, those of the golden side.
        merged: Axes (`tp`, `pp`) along which ranks are put together though both sides have as many.
        ray: Address of the Ray cluster on which the dumps of two runs are compared; None: in processes of this machine.
    """

    mode: Mode | None = None
    fuzzy: bool = False
    baseline: tuple[Path, Path] | None = None
    stack: bool = True
    mappings: NameMappings = field(default_factory=NameMappings)
    ray: str | None = None
    target_sizes: Mapping[str, int] = field(default_factory=dict)
    golden_sizes: Mapping[str, int] = field(default_factory=dict)
    merged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of comparing one dump (the target) with another (the golden one).

    Attributes:
        target: Folder of the target's dump.
        golden: Folder of the golden dump.
        label: Step and rank, `step3 rank1`, as far as they are known.
        mode: What was compared: tensors, checksums or statistics.
        calls: All calls of the target in its order, and after them those that only the golden dump has.
        stacks: By the key of a call, the lines of the script that made it, innermost first; the target's.
        notes: What a reader should know of how the two were brought together; the gaps stand first.
        gaps: What is known to be missing in the dumps, see `gap_notes`.
        step_before: What is known of the step before where weights differ in this one; None: nothing.
        empty: The dump without a single call; "" if both have some.
        members: By the key of a call that several were joined into, the keys of these; of both sides.
        parents: Key of the enclosing call, by a call's key; the target's.
        recomputed: By the keys of the target's backwards whose forward ran once more for them, which part of the model
            ran again at once; None where that is not known.
        replaced: The target's paths of modules that have another class in the golden dump.
        golden_keys: Keys of all calls of the golden dump, in its order.
        place: Where the target's dump is, or those of all ranks that it was put together from.
        assumed: What nobody tells of how ranks share the model and was taken for granted, as clauses.
    """

    target: Path
    golden: Path
    label: str
    mode: Mode
    calls: tuple[CallResult, ...]
    stacks: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()
    step_before: StepBefore | None = None
    empty: str = ""
    members: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    parents: Mapping[str, str] = field(default_factory=dict)
    recomputed: Mapping[str, RecomputedPart | None] = field(default_factory=dict)
    replaced: frozenset[str] = frozenset()
    golden_keys: tuple[str, ...] = ()
    place: DumpLocation
    assumed: tuple[str, ...] = ()

    def rows(self) -> Iterator[ResultRow]:
        """Yield the rows (one compared tensor or argument each) of all calls, in order."""
        for call in self.calls:
            yield from call.rows

    def members_of(self, key: str) -> tuple[str, ...]:
        """Return the keys of the calls that the call `key` was joined from; its own where it was dumped as one."""
        return self.members.get(key, (key,))

    @property
    def blamed(self) -> tuple[CallResult, ...]:
        """The calls in which a difference arose, rather than being passed on; in the order in which they ran."""
        return tuple(call for call in self.calls if call.blamed)

    @property
    def is_whole(self) -> bool:
        """Whether every row of both dumps was compared, and nothing is known to be missing in them."""
        return not self.gaps and all_compared(self.row_counts())

    def row_counts(self) -> Counter[str]:
        """Return how many rows have each result (`pass`, `warning`, `error`, `unmatched`)."""
        return Counter(row.result for row in self.rows())

    def call_counts(self) -> Counter[str]:
        """Return how many calls have each result (`pass`, `warning`, `error`, `unmatched`)."""
        return Counter(call.result for call in self.calls)


def pairs_of(target: Path, golden: Path, options: CompareOptions) -> PairedPlaces:
    """Return which dumps below the folder `target` are compared with which below `golden`, and which with none.

    Raises:
        DumpError: a side has no dump, none of them belong together, or ranks of a model are missing.
    """
    return find_pairs(
        target,
        golden,
        target_sizes=options.target_sizes,
        golden_sizes=options.golden_sizes,
        merged=options.merged,
    )


def num_cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compare_pair(pair: PlacePair, options: CompareOptions, *, threads: int = 1, report: Report = tell) -> Comparison:
    """Compare the two dumps of `pair` call by call; return the comparison.

    `threads` is how many read tensors at a time; `report(done, total, what)` is called as rows are done.

    Raises:
        DumpError: a dump is damaged, or has not what the mode asks for.
    """
    with collector_off():
        comparison = _compare_pair(pair, options, threads, report)

        def calls_of(before: PlacePair) -> tuple[CallResult, ...]:
            return _compare_pair(before, replace(options, mode=Mode.STATISTICS), threads, no_report).calls

        return replace(comparison, step_before=step_before(pair, comparison.calls, calls_of))


@contextmanager
def collector_off() -> Iterator[None]:
    """Return a context in which Python's garbage collector is off: it would look at millions of rows again and again.

    They hold no cycles.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _compare_pair(pair: PlacePair, options: CompareOptions, threads: int, report: Report) -> Comparison:
    stage("reading dumps")
    target, golden, notes = read_sides(pair.target, pair.golden)
    gaps = gap_notes(*pair.target.folders, *pair.golden.folders)
    members: Mapping[str, tuple[str, ...]] = {}
    matched: Mapping[str, str] = {}
    if options.mappings.joins:
        target, golden, members, matched, joined = join_sides(target, golden, options.mappings.joins)
        notes = (*notes, *joined)
    mode = _mode(target, golden, options.mode)
    measure = _measure(target, golden, mode, threads)
    siblings = _siblings(target, golden, options)
    mappings = replace(options.mappings, modules=siblings.names)
    pairs = match_calls(target, golden, fuzzy=options.fuzzy, mappings=mappings, matched=matched)
    types = run_types(pairs)
    calls = CallJudge(
        pairs,
        dumps=JudgedDumps(
            target.parents,
            is_same=not (target.scoped or golden.scoped),
            types=types.products | types.given,
            find_nan=partial(_first_nan, target.directory),
        ),
        measure=partial(_reported, measure, report),
        baseline=_baseline(pair, options, mode, threads),
        safety=_SAFETY[mode],
    ).judge()
    calls = with_unseen_argument(calls) if mode is Mode.STATISTICS else calls
    calls = with_whole_model(calls, target, golden, measure)
    return Comparison(
        target=target.directory,
        golden=golden.directory,
        label=pair.label,
        mode=mode,
        calls=tuple(calls),
        stacks=target.stacks if options.stack else {},
        notes=(
            *gaps,
            *map(_type_note, sorted(types.products)),
            *map(_given_note, sorted(types.given)),
            *notes,
            *siblings.notes,
            *unused_names(options.mappings, target),
        ),
        gaps=gaps,
        members=members,
        parents=target.parents,
        recomputed=target.recomputed,
        replaced=siblings.replaced,
        golden_keys=tuple(call.key for call in golden.calls),
        place=pair.target,
        assumed=tuple(side.assumed for side in pair if side.assumed),
        empty=next((str(side.directory) for side in (target, golden) if not side.calls), ""),
    )


def _siblings(target: DumpRows, golden: DumpRows, options: CompareOptions) -> SiblingMatch:
    """Return which modules stand in the same place under another name, where the user has not said it."""
    is_said = bool(options.mappings) or target.scoped or golden.scoped or target.framework != golden.framework
    return (
        SiblingMatch({}, ()) if is_said else match_siblings(target, golden, across_classes=not options.mappings.joins)
    )


def _type_note(types: tuple[str | None, str | None]) -> str:
    return "the target runs in {}, the golden dump in {}".format(*types)


def _given_note(types: tuple[str | None, str | None]) -> str:
    return "products of matrices are given {} in the target, and {} in the golden dump".format(*types)


def _first_nan(directory: Path) -> str:
    """Return the key of the call in which the first value of a dump arose that is not finite.

    "" if none did, or the folder holds no dump of one rank.
    """
    from trainermon.analysis.diagnosis.origin import find_origin  # brings all that a diagnosis needs
    from trainermon.dump.files.reader import read_dump

    try:
        origin = find_origin(read_dump(directory))
    except DumpError:
        return ""
    return origin.key if origin is not None else ""


def _mode(target: DumpRows, golden: DumpRows, wanted: Mode | None) -> Mode:
    possible = [Mode.STATISTICS]
    if target.has_checksums and golden.has_checksums:
        possible.insert(0, Mode.CHECKSUM)
    if target.has_tensors and golden.has_tensors:
        possible.insert(0, Mode.TENSOR)
    if wanted is None:
        return possible[0]
    if wanted not in possible:
        raise DumpError(
            f"cannot compare by {wanted.value}: {target.directory} and {golden.directory} have in common "
            f"{', '.join(mode.value for mode in possible)} only"
        )
    return wanted


def _measure(target: DumpRows, golden: DumpRows, mode: Mode, threads: int) -> Measure:
    if mode is Mode.TENSOR:
        from trainermon.analysis.compare.tensors import tensor_differences  # perhaps torch, only when needed

        return partial(tensor_differences, target=target, golden=golden, threads=threads)
    return checksum_differences if mode is Mode.CHECKSUM else statistics_differences


def _reported(measure: Measure, report: Report, pairs: Sequence[ItemPair]) -> Iterator[DumpRowDifference]:
    for done, difference in enumerate(measure(pairs)):
        if done % _REPORT_ROWS == 0:
            report(done, len(pairs), "rows")
        yield difference


def _baseline(place: PlacePair, options: CompareOptions, mode: Mode, threads: int) -> dict[str, float]:
    """Return for every row how far two runs of the same side are apart, on the step and rank that are compared."""
    if options.baseline is None:
        return {}
    pairs = pair_places(*(find_places(Path(path)) for path in options.baseline))
    same = [pair for pair in pairs if pair.target[1:3] in (place.target[1:3], place.golden[1:3])]
    if not same and len(pairs) > 1:
        raise DumpError(
            f"the baseline has no dump of {place.label}: only {', '.join(pair.label for pair in pairs[:4])}"
        )
    pair = (same or pairs)[0]
    one, other = read_rows(pair.target.directory), read_rows(pair.golden.directory)
    rows = [
        (f"{calls.target.key}.{ours.place}", (ours, theirs))
        for calls in match_calls(one, other, fuzzy=options.fuzzy)
        for ours, theirs in calls.rows()
        if calls.target and ours and theirs
    ]
    differences = _measure(one, other, mode, threads)([pair for _, pair in rows])
    noise = ((name, difference.relative) for (name, _), difference in zip(rows, differences, strict=True))
    return {name: relative for name, relative in noise if relative}
