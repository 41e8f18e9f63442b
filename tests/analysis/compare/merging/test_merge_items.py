"""Rows of several ranks as rows of the whole, against numpy on the whole tensor."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainermon.analysis.compare.items import OUTPUT, DumpRow
from trainermon.analysis.compare.merging.assembly import TensorAssembly
from trainermon.analysis.compare.merging.merge_items import (
    MergeCounts,
    MergedRow,
    ReferenceRow,
    concatenated,
    merge_row,
    summed,
)
from trainermon.analysis.compare.metrics import relative_size
from trainermon.analysis.compare.noise import roundoff_of


def item_of(array, **more):
    """Return the row of an array, as a dump describes it: over finite elements."""
    finite = array[np.isfinite(array)].astype(np.float64)
    numbers = {
        "max": float(finite.max()) if finite.size else None,
        "min": float(finite.min()) if finite.size else None,
        "mean": float(finite.mean()) if finite.size else None,
        "norm": float(np.linalg.norm(finite)) if finite.size else None,
        "nans": int(np.isnan(array).sum()),
        "infs": int(np.isinf(array).sum()),
    }
    return DumpRow("output.0", OUTPUT, "torch.float32", array.shape, requires_grad=True, **{**numbers, **more})


VALUES = st.one_of(st.floats(-1e6, 1e6, width=32), st.sampled_from([math.nan, math.inf, -math.inf]))


@given(st.lists(VALUES, min_size=24, max_size=24), st.sampled_from([2, 3, 4]), st.sampled_from([0, 1]))
def test_the_statistics_of_the_parts_are_those_of_the_whole(values, ranks, dim):
    whole = np.array(values).reshape(12, 2) if dim == 0 else np.array(values).reshape(2, 12)

    merged = concatenated([item_of(part) for part in np.split(whole, ranks, axis=dim)], dim)

    expected = item_of(whole)
    assert merged.shape == whole.shape
    assert (merged.nans, merged.infs) == (expected.nans, expected.infs)
    for name in ("max", "min", "mean", "norm"):
        ours, theirs = getattr(merged, name), getattr(expected, name)
        assert ours == theirs or ours == pytest.approx(theirs, rel=1e-9, abs=1e-9 * 1e6), name


def test_of_a_sum_only_the_mean_is_known():
    one, other = np.array([1.0, 2.0, 3.0]), np.array([-4.0, 0.5, 1.0])

    merged = summed([item_of(one), item_of(other)])

    assert merged.mean == pytest.approx((one + other).mean())
    assert (merged.max, merged.min, merged.norm) == (None, None, None)


@pytest.mark.parametrize(("dim", "stride"), [(0, 1), (1, 1), (1, 2), (-1, 2)])
def test_parts_are_put_together_as_they_were_dealt_out(dim, stride, tmp_path):
    whole = np.arange(2 * 8 * 3.0).reshape(2, 8, 3) if dim != -1 else np.arange(2 * 3 * 8.0).reshape(2, 3, 8)
    blocks = np.split(whole, stride, axis=dim)
    files = {}
    for rank in range(2):
        part = np.concatenate([np.split(block, 2, axis=dim)[rank] for block in blocks], axis=dim)
        files[tmp_path / f"{rank}"] = part

    assembly = TensorAssembly(parts=tuple(files), dim=dim, stride=stride)

    np.testing.assert_array_equal(assembly.whole(files.__getitem__), whole)


def test_parts_of_a_sum_are_added_up_and_scaled(tmp_path):
    files = {tmp_path / "0": np.array([1.0, 2.0]), tmp_path / "1": np.array([3.0, -1.0])}

    assembly = TensorAssembly(parts=(TensorAssembly(parts=tuple(files)),), scale=0.5)

    np.testing.assert_array_equal(assembly.whole(files.__getitem__), [2.0, 0.5])


RANDOM = np.random.default_rng(5)
SHARES = RANDOM.standard_normal((2, 6, 4)) + 0.3
TOTAL = SHARES.sum(axis=0)


def merged(items, whole, **more):
    """Return the merged row and what was counted, where the other side has `whole`."""
    counts = MergeCounts()
    row = MergedRow(name="row", items=items, reference=ReferenceRow(shape=whole.shape, item=item_of(whole)), **more)
    return merge_row(row, {}, counts), counts


def test_copies_are_one():
    item, counts = merged([item_of(TOTAL), item_of(TOTAL)], TOTAL)

    assert item == item_of(TOTAL, merged="2 copies, tp")
    assert counts.copies == 1


def test_copies_that_differ_are_told_and_the_worst_is_shown():
    item, counts = merged([item_of(TOTAL), item_of(TOTAL * 1.5)], TOTAL)

    assert item == item_of(TOTAL * 1.5, merged="tp 1 of 2 that differ")
    assert counts.diverged == ["row (most: tp 1)"]


def test_values_that_add_up_are_a_sum_where_that_may_be():
    item, counts = merged([item_of(share) for share in SHARES], TOTAL, sums=None)

    assert item.mean == pytest.approx(TOTAL.mean())
    assert counts.sums == 1


def test_a_copy_with_a_fault_is_no_part_of_a_sum():
    _, counts = merged([item_of(TOTAL), item_of(TOTAL * 1.5)], TOTAL, sums=None)

    assert counts.diverged == ["row (most: tp 1)"]


@pytest.mark.parametrize("factor", [0.5, 1.5, -1.0, 3.0])
def test_a_copy_with_a_fault_is_no_part_of_a_sum_though_the_mean_tells_nothing(factor):
    whole = TOTAL - TOTAL.mean()

    _, counts = merged([item_of(whole), item_of(whole * factor)], whole, sums=None)

    assert counts.diverged == ["row (most: tp 1)"]


@pytest.mark.parametrize("terms", [(3.0, 1.0), (0.2, 0.2), (5.0, 0.1)])
def test_what_is_larger_or_smaller_than_terms_can_add_up_to_is_no_sum_of_them(terms):
    whole = TOTAL - TOTAL.mean()

    _, counts = merged([item_of(whole[::-1] * terms[0]), item_of(whole[:, ::-1] * terms[1])], whole, sums=None)

    assert counts.sums == 0


UNITS = {"torch.float32": torch.float32, "torch.bfloat16": torch.bfloat16, "torch.float16": torch.float16}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(UNITS)),
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([(1, 8), (4, 16), (64, 64)]),
    st.sampled_from([(0.0, 0.0), (0.3, 0.0), (3.0, 1.0), (0.0, 4.0)]),
    st.integers(0, 1000),
)
def test_products_whose_terms_ranks_share_are_sums_to_the_rounding_of_their_type(name, ranks, shape, of, seed):
    mean, bias = of
    draw = np.random.default_rng(seed)
    given, weight = draw.standard_normal((shape[0], 8 * ranks)) + mean, draw.standard_normal((8 * ranks, shape[1]))
    parts = [part @ rows for part, rows in zip(np.split(given, ranks, 1), np.split(weight, ranks), strict=True)]
    parts[0] = parts[0] + bias  # which one rank adds

    def row(array):
        return item_of(torch.tensor(array).to(UNITS[name]).double().numpy())._replace(dtype=name)

    whole, counts = row(sum(parts)), MergeCounts()
    reference = ReferenceRow(shape=whole.shape, item=whole)
    total = merge_row(
        MergedRow(name="row", items=[row(part) for part in parts], reference=reference, sums=None), {}, counts
    )

    assert counts.sums == 1
    assert relative_size(total, whole) == relative_size(whole, total) <= 16 * roundoff_of(name)


@pytest.mark.parametrize("name", sorted(UNITS))
def test_a_sum_of_which_one_term_is_off_is_further_from_the_whole_than_rounding(name):
    shares = np.abs(np.random.default_rng(3).standard_normal((2, 64, 64)))
    whole = item_of(shares.sum(axis=0))._replace(dtype=name)
    off = [item_of(shares[0]), item_of(shares[1] * 1.05)]

    total = summed([item._replace(dtype=name) for item in off])

    assert relative_size(total, whole) > 0.25


def test_parts_of_which_none_tells_the_dimension_have_the_statistics_of_all_where_both_sides_deal_alike():
    parts = [item_of(share) for share in SHARES]
    alike = ReferenceRow(shape=SHARES[0].shape, parts=2, is_dealt=True)

    item = merge_row(MergedRow(name="row", items=parts, reference=alike), {}, MergeCounts())

    assert item is not None
    assert (item.max, item.min, item.merged) == (SHARES.max(), SHARES.min(), "2 parts, tp")
    assert item.norm == pytest.approx(np.linalg.norm(SHARES))


def test_what_a_function_makes_of_one_rank_alone_is_left_out():
    item, counts = merged([item_of(SHARES[0] ** 2), item_of(SHARES[1] * 3)], TOTAL, sums=None, is_function=True)

    assert item is None
    assert counts.own == 1


def test_shapes_that_do_not_fit_are_told():
    item, counts = merged([item_of(TOTAL[:1]), item_of(TOTAL[:2])], TOTAL)

    assert item == item_of(TOTAL[:1])
    assert counts.unclear == ["row"]


def test_a_number_that_was_divided_is_that_of_the_whole():
    parts = [DumpRow("input.1", "input", "<class 'int'>", (), None, 24, 24, 24, 24)] * 2
    whole = parts[0]._replace(max=48, min=48, mean=48, norm=48)

    item = merge_row(
        MergedRow(name="row", items=parts, reference=ReferenceRow(shape=(), item=whole)), {}, MergeCounts()
    )

    assert item == whole
