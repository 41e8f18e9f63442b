"""Two checkpoints compared: pairs of tensors, from the pieces of both to a verdict each; other values too."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from trainermon.analysis.checkpoint.boxes import Coverage, coverage, intersections
from trainermon.analysis.checkpoint.changes import refuse_changed, stamps_of
from trainermon.analysis.checkpoint.fused import glu_block, head_layout, with_halves
from trainermon.analysis.checkpoint.merged import AdapterMerge, check_merge, merged_side
from trainermon.analysis.checkpoint.names import NamePairs, pair_names, same_rows
from trainermon.analysis.checkpoint.opening import opened
from trainermon.analysis.checkpoint.pieces import MAIN, Checkpoint, TensorPieces
from trainermon.analysis.checkpoint.placed import PlacedTensor, placed, with_ranks_placed
from trainermon.analysis.checkpoint.sums import MappedFiles, are_rounded, place_of, sums_of, values_at
from trainermon.analysis.checkpoint.values import tensors_beside, value_differences
from trainermon.analysis.checkpoint.verdicts import (
    WEIGHTS,
    CheckpointComparison,
    CheckpointSide,
    WeightComparison,
    WeightVerdict,
    are_integers,
)
from trainermon.core.errors import CheckpointError
from trainermon.statistics.pairs import PairSums

RTOL = 1e-5
"""Relative distance of two tensors up to which they are `close`, if nothing else is asked for."""
MOST_RTOL = 0.25
"""No tolerance makes tensors `close` that are further apart: zeros are by 1, and the other sign is by 2."""
PRECISIONS = ("model", "main")
_BATCH, _BATCH_ELEMENTS = 64, 1 << 18  # of tensors that a thread takes at once
_COARSE = 2.0**-7  # relative distance beyond which no rounding to 16 bits explains it
_NARROWER = {"float64": ("float32", "bfloat16", "float16"), "float32": ("bfloat16", "float16")}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """What to compare, and how.

    Attributes:
        rtol: Norm of the difference over the larger norm up to which two tensors are `close`.
        scheme: To which names those are translated that differ: `megatron` or `hf`.
        renamed: Names of the first checkpoint, by names of the second.
        match: Which tensors: those in whose name this is found; None: all.
        weights_only: Whether to leave out all else: optimizer state, tensors outside the model, values.
        precision: Which weights: `model`, as the model has them, or `main`, the optimizer's copy where there is one.
        jobs: How many threads; 0: one per core.
    """

    rtol: float = RTOL
    scheme: str = "megatron"
    renamed: Mapping[str, str] = field(default_factory=dict)
    match: re.Pattern[str] | None = None
    weights_only: bool = False
    precision: str = "model"
    jobs: int = 0


def compare_checkpoints(
    ours: Path | str | Checkpoint,
    theirs: Path | str | Checkpoint,
    *,
    options: CheckpointOptions | None = None,
    report: Callable[[int, int], None] | None = None,
) -> CheckpointComparison:
    """Return how two checkpoints differ, whatever their formats and however each is split.

    `report` is told after each tensor how many of how many are done. Cost: both are read once, at the pace of memory;
    tensors that differ in part up to three times. Memory does not grow with them: what was read is let go.

    A side may be `BASE+ADAPTER`: a base with a LoRA adapter merged into it, for which disk is taken meanwhile.

    Raises:
        CheckpointError: one is no checkpoint, is damaged such that no tensor can be told, or was written meanwhile.
    """
    options = options or CheckpointOptions()
    with contextlib.ExitStack() as stack:
        sides = [side if isinstance(side, Checkpoint) else stack.enter_context(opened(side)) for side in (ours, theirs)]
        return _comparison(sides, options, report)


def _comparison(
    sides: list[Checkpoint], options: CheckpointOptions, report: Callable[[int, int], None] | None
) -> CheckpointComparison:
    stamps = stamps_of(sides)
    work, lonely, notes = _work(sides[0], sides[1], options)
    tensors = [*_compared(work, options, report), *lonely]
    refuse_changed(stamps)
    if not tensors:
        raise CheckpointError(f"nothing to compare: {sides[0].path} has no tensor that is asked for")
    found = CheckpointComparison(
        ours=_side(sides[0], sides[1], options),
        theirs=_side(sides[1], sides[0], options),
        tensors=tuple(_without_chance(tensors, options.rtol)),
        values=() if options.weights_only else tuple(value_differences(sides[0].values, sides[1].values)),
        notes=tuple(notes),
    )
    return _with_hints(found, work)


@dataclass(frozen=True, slots=True)
class TensorPair:
    """Two tensors to be compared, of one kind: weights, or one of optimizer state; `merge` if one was merged here."""

    kind: str
    ours: PlacedTensor
    theirs: PlacedTensor
    merge: AdapterMerge | None = None


def _work(
    ours: Checkpoint, theirs: Checkpoint, options: CheckpointOptions
) -> tuple[list[TensorPair], list[WeightComparison], list[str]]:
    """Return what to compare, what one side alone has, and what is to say about it."""
    pairing = _Pairing(ours, theirs, options)
    work: list[TensorPair] = []
    lonely: list[WeightComparison] = []
    notes: list[str] = []
    for kind, first, second in _kinds(ours, theirs, options):
        found = pairing.of(first, second)
        has_merged = kind == WEIGHTS and (ours.before or theirs.before)
        before = pairing.of({**first, **ours.before}, {**second, **theirs.before}).pairs if has_merged else ()
        known = [{pair[side].name: pair[side] for pair in before} for side in (0, 1)]
        for pair in found.pairs:
            one, other = with_ranks_placed(*pair)
            work.append(TensorPair(kind, one, other, merged_side(one, other, known)))
        lonely += [_lonely(kind, tensor, is_ours=True) for tensor in found.ours]
        lonely += [_lonely(kind, tensor, is_ours=False) for tensor in found.theirs]
        notes += [note for note in found.notes if note not in notes]
    return work, lonely, [*notes, *_not_compared(ours, theirs, options)]


class _Pairing:
    """Which tensors of two checkpoints belong together, by what both say of heads and blocks."""

    def __init__(self, ours: Checkpoint, theirs: Checkpoint, options: CheckpointOptions) -> None:
        self._options = options
        self._heads = head_layout(ours.values, theirs.values)
        blocks = [glu_block(side.values) for side in (ours, theirs)]
        self._blocks = blocks if blocks[0] != blocks[1] else [None, None]

    def of(self, *sides: Mapping[str, TensorPieces]) -> NamePairs:
        """Return the pairs of those that are asked for."""
        chosen = []
        for side, block in zip(sides, self._blocks, strict=True):
            tensors = {name: placed(tensor) for name, tensor in side.items() if _is_chosen(name, self._options)}
            chosen.append(with_halves(tensors, block) if block else tensors)
        options = self._options
        return pair_names(*chosen, scheme=options.scheme, heads=self._heads, renamed=options.renamed)


def _not_compared(ours: Checkpoint, theirs: Checkpoint, options: CheckpointOptions) -> list[str]:
    """Return what is to say about tensors beside the model that are not compared."""
    first, second = (tensors_beside(side).keys() for side in (ours, theirs))
    if options.weights_only:
        both = sorted(first | second)
        return [f"left out by --weights-only: {', '.join((*both, 'other values'))}"]
    sides = (("first", first - second), ("second", second - first))
    return [f"not compared, as only the {side} has it: {', '.join(sorted(kinds))}" for side, kinds in sides if kinds]


def _kinds(
    ours: Checkpoint, theirs: Checkpoint, options: CheckpointOptions
) -> Iterator[tuple[str, Mapping[str, TensorPieces], Mapping[str, TensorPieces]]]:
    sides = (ours, theirs)
    if options.precision == "main":
        first, second = ({**side.tensors, **side.optimizer.get(MAIN, {})} for side in sides)
        yield WEIGHTS, first, second
    else:
        yield WEIGHTS, ours.tensors, theirs.tensors
    if options.weights_only:
        return
    beside = [tensors_beside(side) for side in sides]
    for kind in sorted(beside[0].keys() & beside[1].keys()):
        if not (kind == MAIN and options.precision == "main"):
            yield kind, beside[0][kind], beside[1][kind]


def _is_chosen(name: str, options: CheckpointOptions) -> bool:
    return options.match is None or options.match.search(name) is not None


def _lonely(kind: str, tensor: PlacedTensor, *, is_ours: bool) -> WeightComparison:
    return WeightComparison(
        kind=kind,
        name=tensor.name,
        is_ours=is_ours,
        verdict=WeightVerdict.UNMATCHED,
        shapes=(tensor.shape, None) if is_ours else (None, tensor.shape),
        dtypes=(tensor.dtype, None) if is_ours else (None, tensor.dtype),
        notes=tensor.notes,
    )


def _compared(
    work: list[TensorPair], options: CheckpointOptions, report: Callable[[int, int], None] | None
) -> Iterator[WeightComparison]:
    local = threading.local()

    def compare(pairs: list[TensorPair]) -> list[WeightComparison]:
        files = local.__dict__.setdefault("files", MappedFiles())
        found = []
        for pair in pairs:
            found.append(compare_pair(files, pair, rtol=options.rtol))
            files.let_go()
        return found

    jobs = options.jobs or os.cpu_count() or 1
    number = 0
    with ThreadPoolExecutor(jobs) as pool:
        for batch in pool.map(compare, _batches(work)):
            for found in batch:
                number += 1
                if report is not None:
                    report(number, len(work))
                yield found


def _batches(work: list[TensorPair]) -> Iterator[list[TensorPair]]:
    """Yield pairs of tensors in order, small ones several at a time: a task of its own costs as much as they do."""
    batch: list[TensorPair] = []
    num_elements = 0
    for pair in work:
        batch.append(pair)
        num_elements += pair.ours.num_elements
        if len(batch) == _BATCH or num_elements >= _BATCH_ELEMENTS:
            yield batch
            batch, num_elements = [], 0
    if batch:
        yield batch


def compare_pair(files: MappedFiles, pair: TensorPair, *, rtol: float) -> WeightComparison:
    """Return how two tensors differ. A side that is not whole, or says two things, is `damaged`."""
    ours, theirs = pair.ours, pair.theirs
    notes = dict.fromkeys((*ours.notes, *theirs.notes))
    plain = partial(
        WeightComparison,
        kind=pair.kind,
        name=ours.name,
        other_name=theirs.name,
        shapes=(ours.shape, theirs.shape),
        dtypes=(ours.dtype, theirs.dtype),
    )
    if ours.shape != theirs.shape:
        cut = same_rows(ours, theirs)
        if cut is None:
            return plain(verdict=WeightVerdict.SHAPE, notes=tuple(notes))
        ours, theirs = cut[:2]
        notes[cut[2]] = None
    try:
        covers = [coverage(side.views, side.shape) for side in (ours, theirs)]
        faults = [
            fault for cover, side in zip(covers, (ours, theirs), strict=True) for fault in faults_of(files, cover, side)
        ]
        if faults:
            return plain(verdict=WeightVerdict.DAMAGED, notes=(*notes, *faults))
        judged = _judged(files, covers, (ours.dtype, theirs.dtype), tuple(notes), rtol)
        return plain(**(_with_merge(judged, pair) if pair.merge is not None else judged))
    except CheckpointError as error:
        return plain(verdict=WeightVerdict.DAMAGED, notes=(*notes, str(error)))


def _with_merge(judged: dict[str, Any], pair: TensorPair) -> dict[str, Any]:
    """Return the fields of a tensor that was merged here by how much of the adapter the other side holds."""
    assert pair.merge is not None
    if judged["verdict"] in (WeightVerdict.IDENTICAL, WeightVerdict.NONFINITE):
        return judged
    sides = (pair.ours, pair.theirs) if pair.merge.is_first else (pair.theirs, pair.ours)
    check = check_merge(pair.merge.before, *sides)
    if check.is_merged and judged["verdict"] is WeightVerdict.ROUNDING:
        return judged | {"notes": (*judged["notes"], check.text)}
    verdict = WeightVerdict.CLOSE if check.is_merged else WeightVerdict.DIFFERENT
    return judged | {"verdict": verdict, "rounded_to": None, "notes": (*judged["notes"], check.text)}


def faults_of(files: MappedFiles, cover: Coverage, tensor: PlacedTensor) -> Iterator[str]:
    """Yield in words what no file holds, and where two files say different things.

    Raises:
        CheckpointError: a file is gone, or shorter than it was.
    """
    if cover.num_missing:
        where = f", first at {list(cover.gap.starts)} to {_end(cover.gap)}" if cover.gap is not None else ""
        have = ", ".join(sorted({view.label for view in cover.views})[:4]) or "nothing"
        yield f"{cover.num_missing:,} of {tensor.num_elements:,} elements are in no file{where}; there is: {have}"
    for copy in cover.copies:
        if copy.ours.stored == copy.theirs.stored and copy.ours.first == copy.theirs.first:
            continue
        sums = sums_of(files, [copy])
        if sums.unequal and not (tensor.ranks and 2 * sums.unequal > sums.count):  # parts have little in common
            place = place_of([copy], sums.first_unequal)
            labels = f"{copy.theirs.label} ({copy.theirs.stored.path.name}) and {copy.ours.label}"
            yield (
                f"{labels} ({copy.ours.stored.path.name}) both hold {list(copy.ours.starts)}, {sums.unequal:,} elements"
                f" differ, first {list(place)}"
            )


def _end(box: Any) -> list[int]:
    return [start + size for start, size in zip(box.starts, box.sizes, strict=True)]


def _judged(
    files: MappedFiles, covers: list[Coverage], dtypes: tuple[str, str], notes: tuple[str, ...], rtol: float
) -> dict[str, Any]:
    """Return the fields of a `WeightComparison` that are found by reading both sides."""
    overlaps = list(intersections(covers[0].views, covers[1].views))
    sums = sums_of(files, overlaps)
    found: dict[str, Any] = {
        "count": sums.count,
        "unequal": sums.unequal,
        "norms": (sums.our_norm, sums.their_norm),
        "nonfinite": (sums.our_nans + sums.our_infs, sums.their_nans + sums.their_infs),
    }
    if sums.nonfinite < sums.count or any(found["norms"]):  # else no element is finite on both sides
        found |= {
            "relative": sums.relative,
            "cosine": sums.cosine,
            "distance": sums.distance,
            "largest": sums.largest,
            "largest_at": place_of(overlaps, sums.largest_at) if sums.largest_at >= 0 else None,
            "ulps": sums.ulps,
        }
    if sums.first_unequal >= 0:
        place = place_of(overlaps, sums.first_unequal)
        found |= {"first_at": place, "first_values": values_at(overlaps, place)}
    verdict, target, note = _verdict(files, overlaps, sums, dtypes, rtol)
    return found | {"verdict": verdict, "rounded_to": target, "notes": (*notes, *note)}


def _verdict(
    files: MappedFiles, overlaps: list[Any], sums: PairSums, dtypes: tuple[str, str], rtol: float
) -> tuple[WeightVerdict, str | None, tuple[str, ...]]:
    if not sums.unequal:
        return WeightVerdict.IDENTICAL, None, ()
    if are_integers(dtypes):
        return WeightVerdict.DIFFERENT, None, ()
    if dtypes[0] == dtypes[1] and sums.our_nans == sums.their_nans == sums.count:
        return WeightVerdict.NONFINITE, None, ("every element is NaN on both sides, some in other bits",)
    has_as_many = (sums.our_nans, sums.our_infs) == (sums.their_nans, sums.their_infs)
    was_finite = sums.distance or dtypes[0] != dtypes[1] or not sums.nonfinite  # else NaN or Inf differ, and no more
    if has_as_many and was_finite and sums.relative <= _COARSE:
        for direction, said in ((0, "the second is the first"), (1, "the first is the second")):
            wide, narrow = dtypes[direction], dtypes[1 - direction]
            turned = overlaps if direction == 0 else [type(pair)(pair.theirs, pair.ours) for pair in overlaps]
            for target in _targets(wide, narrow):
                if are_rounded(files, turned, target):
                    return WeightVerdict.ROUNDING, target, (f"{said} rounded to {target}",)
    if sums.nonfinite:
        return WeightVerdict.NONFINITE, None, ()
    return _by_distance(sums.relative, rtol), None, ()


def _without_chance(tensors: list[WeightComparison], rtol: float) -> Iterator[WeightComparison]:
    """Yield the tensors; what is `rounding` in one number alone, and in no other tensor, is judged by its distance.

    Norms that are all ones would else be rounded ones of any that were trained for some steps.
    """
    sure = {None, *(tensor.rounded_to for tensor in tensors if not tensor.rests_on_one_number)}
    for tensor in tensors:
        if tensor.rounded_to in sure or tensor.relative is None:
            yield tensor
            continue
        yield replace(
            tensor,
            verdict=_by_distance(tensor.relative, rtol),
            rounded_to=None,
            notes=tuple(note for note in tensor.notes if not note.endswith(f" rounded to {tensor.rounded_to}")),
        )


def _by_distance(relative: float, rtol: float) -> WeightVerdict:
    return WeightVerdict.CLOSE if relative <= min(rtol, MOST_RTOL) else WeightVerdict.DIFFERENT


def _targets(wide: str, narrow: str) -> tuple[str, ...]:
    """Return to which types numbers of one type may have been rounded, if they are in the other now."""
    targets = _NARROWER.get(wide, ())
    if narrow == wide:
        return targets
    return tuple(target for target in targets if target == narrow or target in _NARROWER.get(narrow, ()))


def _side(checkpoint: Checkpoint, other: Checkpoint, options: CheckpointOptions) -> CheckpointSide:
    alone: dict[str, int] = {}
    if not options.weights_only:
        others = {*tensors_beside(other), *([MAIN] if options.precision == "main" else [])}
        chosen = {
            kind: sum(_is_chosen(name, options) for name in of) for kind, of in tensors_beside(checkpoint).items()
        }
        alone = {kind: number for kind, number in chosen.items() if number and kind not in others}
    return CheckpointSide(
        path=str(checkpoint.path),
        format=checkpoint.format,
        step=checkpoint.step,
        layout=dict(checkpoint.layout),
        num_unread=len(checkpoint.unread),
        alone=alone,
        notes=checkpoint.all_notes(),
    )


def _with_hints(found: CheckpointComparison, work: list[TensorPair]) -> CheckpointComparison:
    from trainermon.analysis.checkpoint.hints import hints_of

    hints = hints_of(found.tensors, {(pair.kind, pair.ours.name): pair for pair in work})
    for number, typical in found.outliers().items():
        hints[number] = (f"stands out: ΔW/W of its like is {typical:.2%}", *hints.get(number, ()))
    tensors = list(found.tensors)
    for number, said in hints.items():
        tensors[number] = replace(tensors[number], hints=said)
    return replace(found, tensors=tuple(tensors))
