"""What may be the matter with tensors that differ: equal to another one, scaled, transposed, halves exchanged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from trainermon.analysis.checkpoint.boxes import Overlap, coverage, intersections
from trainermon.analysis.checkpoint.placed import PlacedTensor, RowMove, rows_of, transposed
from trainermon.analysis.checkpoint.sums import MappedFiles, sums_of
from trainermon.analysis.checkpoint.verdicts import WeightComparison, WeightVerdict

MAX_TENSORS = 24
"""So many tensors are looked into: each is read up to a dozen times."""
_SCALED = 1e-5  # what may be left of a tensor after it was scaled, relative to it: float32's rounding, many times
_ALIKE = 0.99  # cosine
_SAME_NORM = 1e-9  # of the same elements in another order, relative
_MAX_ROWS = 1 << 16
_ODD = (WeightVerdict.DIFFERENT, WeightVerdict.SHAPE)


class PairOfTensors(Protocol):
    """Two tensors that were compared."""

    @property
    def ours(self) -> PlacedTensor:
        """That of the first checkpoint."""

    @property
    def theirs(self) -> PlacedTensor:
        """That of the second."""


def hints_of(
    found: Sequence[WeightComparison], pairs: Mapping[tuple[str, str], PairOfTensors]
) -> dict[int, tuple[str, ...]]:
    """Return hints for the first tensors that differ, by their places in `found`; only what holds to the last bit."""
    files, hints = MappedFiles(), {}
    odd = [number for number, tensor in enumerate(found) if tensor.verdict in _ODD]
    for number in odd[:MAX_TENSORS]:
        tensor = found[number]
        pair = pairs[tensor.kind, tensor.name]
        if all(_is_whole(side) for side in (pair.ours, pair.theirs)):
            hints[number] = tuple(_hints(files, tensor, pair, found, pairs))
            files.let_go()
    return hints


def _is_whole(tensor: PlacedTensor) -> bool:
    return bool(tensor.shape) and not coverage(tensor.views, tensor.shape).num_missing


def _hints(
    files: MappedFiles,
    tensor: WeightComparison,
    pair: PairOfTensors,
    found: Sequence[WeightComparison],
    pairs: Mapping[tuple[str, str], PairOfTensors],
) -> Iterator[str]:
    yield from _scaled(tensor)
    if tensor.cosine is not None and tensor.cosine > _ALIKE:
        return  # changed a little: nothing has been moved
    yield from _elsewhere(files, tensor, pair, found, pairs)
    if len(pair.ours.shape) == 2 and are_equal(files, pair.ours, transposed(pair.theirs)):
        yield "transposed"
    if tensor.norms is None or not math.isclose(*tensor.norms, rel_tol=_SAME_NORM):
        return  # not the same elements, in whichever order
    for said, order in _orders(pair.theirs):
        if are_equal(files, pair.ours, order):
            yield said
            return
    if _are_permuted(files, pair):
        yield "the same rows in another order"


def _scaled(tensor: WeightComparison) -> Iterator[str]:
    if tensor.norms is None or tensor.cosine is None or not all(tensor.norms):
        return
    ratio = tensor.norms[1] / tensor.norms[0]
    rest = math.sqrt(max(0.0, 1.0 - tensor.cosine**2))
    if rest <= _SCALED and (abs(ratio - 1) > _SCALED or tensor.cosine < 0):
        yield f"scaled by {math.copysign(ratio, tensor.cosine):.6g}"


def _elsewhere(
    files: MappedFiles,
    tensor: WeightComparison,
    pair: PairOfTensors,
    found: Sequence[WeightComparison],
    pairs: Mapping[tuple[str, str], PairOfTensors],
) -> Iterator[str]:
    """Yield the name of another tensor of the second checkpoint that this one equals: a layer, an expert off by one."""
    if tensor.norms is None:
        return
    for other in found:
        is_other = other is not tensor and other.kind == tensor.kind and other.norms is not None
        if not is_other or other.norms is None or other.shapes[1] != tensor.shapes[0]:
            continue
        alike = math.isclose(other.norms[1], tensor.norms[0], rel_tol=_SAME_NORM)
        if alike and are_equal(files, pair.ours, pairs[other.kind, other.name].theirs):
            yield f"equal to {other.other_name} of the second"
            return


def _orders(tensor: PlacedTensor) -> Iterator[tuple[str, PlacedTensor]]:
    rows = tensor.shape[0]
    if rows % 2 == 0:
        half = rows // 2
        yield (
            "the two halves (gate and up) are exchanged",
            rows_of(tensor, tensor.name, [RowMove(0, half, half), RowMove(half, half, 0)]),
        )
    if rows % 3 == 0:
        third = rows // 3
        for said, order in (
            ("k, q, v", (1, 0, 2)),
            ("v, k, q", (2, 1, 0)),
            ("k, v, q", (2, 0, 1)),
            ("v, q, k", (1, 2, 0)),
        ):
            moves = [RowMove(part * third, third, to * third) for part, to in enumerate(order)]
            yield f"q, k, v are in the order {said} in one of them", rows_of(tensor, tensor.name, moves)
    for parts in (2, 3):
        if rows % parts == 0:
            yield from _interleaved(tensor, parts)


def _interleaved(tensor: PlacedTensor, parts: int) -> Iterator[tuple[str, PlacedTensor]]:
    """Yield a tensor whose `parts` parts are cut into blocks that take turns, and the other way round."""
    rows = tensor.shape[0]
    said = "gate and up" if parts == 2 else "q, k and v"
    for blocks in (2, 4, 8, 16, 32, 64):
        size = rows // parts // blocks
        if rows % (parts * blocks) or not size:
            continue
        there = [
            RowMove((part * blocks + block) * size, size, (block * parts + part) * size)
            for part in range(parts)
            for block in range(blocks)
        ]
        back = [RowMove(move.to, size, move.start) for move in there]
        for moves in (there, back):
            yield f"{said} take turns in {blocks} blocks in one of them", rows_of(tensor, tensor.name, moves)


def _are_permuted(files: MappedFiles, pair: PairOfTensors) -> bool:
    """Whether both have the same rows: those of equal norms are compared to the last bit."""
    rows = pair.ours.shape[0]
    if len(pair.ours.shape) < 2 or not 1 < rows <= _MAX_ROWS:
        return False
    norms = [[_row_norm(files, side, row) for row in range(rows)] for side in (pair.ours, pair.theirs)]
    orders = [sorted(range(rows), key=side.__getitem__) for side in norms]
    both = list(zip(*orders, strict=True))
    if any(not math.isclose(norms[0][one], norms[1][other], rel_tol=_SAME_NORM) for one, other in both):
        return False
    moves = [RowMove(other, 1, one) for one, other in both]
    return are_equal(files, pair.ours, rows_of(pair.theirs, pair.theirs.name, moves))


def _row_norm(files: MappedFiles, tensor: PlacedTensor, row: int) -> float:
    only = rows_of(tensor, tensor.name, [RowMove(row, 1, 0)])
    views = list(only.views)
    return sums_of(files, list(intersections(views, views))).our_norm


def are_equal(files: MappedFiles, ours: PlacedTensor, theirs: PlacedTensor) -> bool:
    """Whether two tensors are equal to the last bit. A corner is looked at before the whole.

    Raises:
        CheckpointError: a file is gone, or shorter than it was.
    """
    if ours.shape != theirs.shape:
        return False
    views = [coverage(side.views, side.shape).views for side in (ours, theirs)]
    overlaps = list(intersections(views[0], views[1]))
    if not overlaps:
        return False
    corner = tuple(min(size, 8) for size in overlaps[0].ours.sizes)
    few = Overlap(*(view._replace(sizes=corner) for view in overlaps[0]))
    return not sums_of(files, [few]).unequal and not sums_of(files, overlaps).unequal
