"""Boxes against numpy: every position of a tensor is painted, and counted."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.checkpoint.splits import SHAPES, part_of, regions
from trainermon.analysis.checkpoint import boxes
from trainermon.analysis.checkpoint.boxes import coverage, dense_strides, flat_boxes, intersections, views_of
from trainermon.analysis.checkpoint.pieces import Box, FlatRange, Piece, StoredArray, TensorPieces


def tensor_of(shape, parts):
    """Return pieces whose files are not there: the places alone count."""
    pieces = []
    for number, region in enumerate(parts):
        part = part_of(np.empty(shape, np.uint8), region)
        stored = StoredArray(Path(f"{number}.raw"), 0, "uint8", part.shape, dense_strides(part.shape))
        pieces.append(Piece(region, stored, f"rank {number}"))
    return TensorPieces("w", shape, "uint8", tuple(pieces))


def positions_of(view):
    """Return the places in its array that a view reads, in C order."""
    places = np.full(view.sizes, view.first)
    for dim, stride in enumerate(view.strides):
        places += stride * np.arange(view.sizes[dim]).reshape(-1, *(1,) * (len(view.sizes) - dim - 1))
    return places.reshape(-1)


@given(SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), st.data())))
def test_a_flat_range_is_a_few_boxes_in_its_order(case):
    shape, data = case
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    region = FlatRange(start, data.draw(st.integers(0, total - start)))
    numbers = np.arange(total).reshape(shape)

    found = [part_of(numbers, Box(*box)).reshape(-1) for box in flat_boxes(region, shape)]

    assert np.concatenate([[], *found]).tolist() == list(range(start, start + region.length))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@pytest.fixture(params=[True, False], ids=["kept", "too many to keep"], autouse=True, scope="module")
def layouts(request):
    """Whether it is kept what was found of a layout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "_MAX_KEPT", boxes._MAX_KEPT if request.param else -1)
        yield


@given(SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), regions(shape), regions(shape))))
def test_intersections_of_two_splits_cover_the_whole_once_and_point_to_the_same_elements(case):
    shape, ours, theirs = case
    numbers = np.arange(math.prod(shape)).reshape(shape)
    files = [{f"{i}.raw": part_of(numbers, part).reshape(-1) for i, part in enumerate(side)} for side in (ours, theirs)]
    seen = np.zeros(shape, int)

    for mine, other in intersections(views_of(tensor_of(shape, ours)), views_of(tensor_of(shape, theirs))):
        seen[tuple(slice(s, s + n) for s, n in zip(mine.starts, mine.sizes, strict=True))] += 1
        read = [
            file[view.stored.path.name][positions_of(view)] for view, file in zip((mine, other), files, strict=True)
        ]
        assert read[0].tolist() == read[1].tolist()

    assert (seen == 1).all()


@given(SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), regions(shape), regions(shape), st.data())))
def test_whatever_covers_a_tensor_is_cut_to_cover_it_once_and_what_is_missing_is_counted(case):
    shape, parts, more, data = case
    chosen = data.draw(st.lists(st.sampled_from([*parts, *more]), max_size=6))
    painted = np.zeros(shape, int)
    for part in chosen:
        part_of(painted, part)[...] += 1

    found = coverage(views_of(tensor_of(shape, chosen)), shape)

    again = np.zeros(shape, int)
    for view in found.views:
        part_of(again, Box(view.starts, view.sizes))[...] += 1
    assert (again == np.minimum(painted, 1)).all()
    assert found.num_missing == (painted == 0).sum()
    assert bool(found.copies) == (painted > 1).any()
    if found.gap is not None:
        assert (part_of(painted, found.gap) == 0).all()
    assert (found.gap is None) == (found.num_missing == 0)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_slices_are_the_whole_in_any_order_and_only_if_all_are_there_once(dim):
    shape = (4, 5, 6)
    cuts = [(0, 1), (1, 3), (3, shape[dim])]
    slices = [
        Box(tuple(low if d == dim else 0 for d in range(3)), (*shape[:dim], high - low, *shape[dim + 1 :]))
        for low, high in cuts
    ]

    def is_whole(parts):
        found = coverage(views_of(tensor_of(shape, parts)), shape)
        return not (found.num_missing or found.copies)

    assert is_whole(slices[::-1])
    for number in range(3):
        assert not is_whole([*slices[:number], *slices[number + 1 :]])
        assert not is_whole([*slices, slices[number]])


def test_a_replica_is_named_with_the_one_that_it_should_equal():
    whole = Box((0, 0), (2, 3))

    found = coverage(views_of(tensor_of((2, 3), [whole, whole])), (2, 3))

    assert [(copy.ours.label, copy.theirs.label) for copy in found.copies] == [("rank 0", "rank 1")]


def test_many_pieces_are_intersected_in_time_that_grows_as_they_do():
    shape = (4_000, 3)
    ours = [Box((row, 0), (1, 3)) for row in range(4_000)]
    theirs = [FlatRange(start, 4) for start in range(0, 12_000, 4)]

    found = list(intersections(views_of(tensor_of(shape, ours)), views_of(tensor_of(shape, theirs))))

    assert sum(mine.num_elements for mine, _ in found) == 12_000
