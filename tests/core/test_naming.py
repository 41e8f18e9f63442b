"""Series under msprobe's names: files, names and columns are those of docs/msprobe.md, numbers those of numpy."""

import math

import numpy as np
import pytest

from tests.moments import numpy_moments
from trainermon.core.naming import (
    COLUMNS,
    FEATURE_FILES,
    FILES,
    SeriesNames,
    SeriesPlace,
    dtype_of,
    feature_value,
    shape_of,
    statistics_row,
    tag_of,
    with_shape,
)
from trainermon.core.values import NO_ELEMENTS, Kind, Moments, Placement, SeriesKey


def place_of(key, *others):
    return SeriesNames().places([key, *others])[0]


def moments(elements):
    return Moments(*numpy_moments(elements).tolist())


@pytest.mark.parametrize(
    ("key", "file", "name", "micro_step"),
    [
        (SeriesKey(Kind.ACTV, "fc1", "output.0"), "actv", "fc1.output", 0),
        (SeriesKey(Kind.ACTV, "fc1", "output.0", 1, 2), "actv", "fc1.output#1", 2),
        (SeriesKey(Kind.ACTV_GRAD, "fc1", "input.0"), "actv_grad", "fc1.input", 0),
        (SeriesKey(Kind.GRAD_UNREDUCED, "fc1.weight", micro_step=3), "grad_unreduced", "fc1.weight", 3),
        (SeriesKey(Kind.GRAD_UNREDUCED, "fc1.weight"), "grad_unreduced", "fc1.weight", None),
        (SeriesKey(Kind.GRAD_REDUCED, "fc1.weight"), "grad_reduced", "fc1.weight", None),
        (SeriesKey(Kind.STATE, "fc1.weight", "momentum_buffer"), "state", "fc1.weight.momentum_buffer", None),
        (SeriesKey(Kind.MG_DIRECTION, "fc1.weight"), "other", "fc1.weight", None),
        (SeriesKey(Kind.COMM, "dp.all_reduce", "post.0", 3), "other", "dp.all_reduce.post.0#3", None),
        (SeriesKey(Kind.COMM, "dp.all_reduce", "pre.0", 0, 1), "other", "dp.all_reduce.pre.0:micro1", None),
        (SeriesKey(Kind.LOSS, "loss"), "scalars", "loss", None),
        (SeriesKey(Kind.LOSS, "loss", micro_step=2), "scalars", "loss", 2),
        (SeriesKey(Kind.STEP, "learning_rate.0"), "scalars", "learning_rate.0", None),
    ],
)
def test_a_series_has_the_file_and_name_of_the_manual(key, file, name, micro_step):
    place = place_of(key)

    assert (place.file, place.name, place.micro_step) == (file, name, micro_step)


@pytest.mark.parametrize(
    ("slot", "file", "name", "micro_step", "column"),
    [
        ("attention_entropy", "attention_hook", "attn.attention", 0, "entropy"),
        ("spectral_norm", "linear_hook", "attn.linear", None, "kernel_norm"),
        ("attention_largest_logit", "feature", "attn.attention_largest_logit", None, ""),
    ],
)
def test_a_feature_of_msprobe_has_a_column_in_its_file_and_any_other_a_row(slot, file, name, micro_step, column):
    place = place_of(SeriesKey(Kind.FEATURE, "attn", slot))

    assert place == SeriesPlace(file, name, 0, micro_step, column)


def test_tensors_are_numbered_only_on_a_side_of_a_module_that_has_several():
    keys = [SeriesKey(Kind.ACTV, "attn", slot) for slot in ("input.0", "input.mask.1", "output.0")]

    names = [place.name for place in SeriesNames().places(keys)]

    assert names == ["attn.input_0", "attn.input_mask_1", "attn.output"]


def test_stages_are_modules_of_their_own():
    here, there = (SeriesKey(Kind.ACTV, "attn", f"input.{stage}", stage=stage) for stage in (0, 1))

    assert [(place.name, place.stage) for place in SeriesNames().places([here, there])] == [
        ("attn.input", 0),
        ("attn.input", 1),
    ]


def test_a_series_keeps_its_name_when_another_tensor_joins():
    first, second = (SeriesKey(Kind.ACTV, "attn", f"input.{number}") for number in (0, 1))
    names = SeriesNames()

    before = [place.name for place in names.places([first])]
    after = [place.name for place in names.places([first, second])]

    assert before == ["attn.input"]
    assert after == ["attn.input", "attn.input_1"]


@pytest.mark.parametrize(
    ("key", "tag"),
    [
        (SeriesKey(Kind.GRAD_REDUCED, "fc1.weight"), "0:fc1.weight/rank0/post_grad"),
        (SeriesKey(Kind.ACTV, "fc1", "input.0", micro_step=1), "0:fc1.input:1/rank0/actv"),
    ],
)
def test_a_tag_is_that_of_the_calls_of_msprobe(key, tag):
    assert tag_of(place_of(key), key.kind, 0) == tag


@pytest.mark.parametrize("elements", [[3.0, -4.0, 0.0, 0.5], [1.0, np.nan, np.inf, -np.inf, 0.0]])
def test_columns_are_taken_over_the_finite_elements(elements):
    finite = np.asarray([value for value in elements if math.isfinite(value)])
    found = {name: column(moments(elements)) for name, column in COLUMNS.items()}

    assert found == pytest.approx(
        {
            "norm": np.linalg.norm(finite),
            "min": finite.min(),
            "max": finite.max(),
            "mean": finite.mean(),
            "zeros": elements.count(0.0) / len(elements),
            "nans": len(elements) - len(finite),
            "infs": sum(map(math.isinf, elements)),
            "rms": np.sqrt(np.square(finite).mean()),
            "std": finite.std(),
            "count": len(elements),
            "sum": finite.sum(),
            "sum_sq": np.square(finite).sum(),
        }
    )


@pytest.mark.parametrize("row", [NO_ELEMENTS, moments([np.nan, np.inf])])
def test_without_a_finite_element_a_statistic_is_nan(row):
    assert all(math.isnan(COLUMNS[name](row)) for name in ("norm", "min", "max", "mean", "rms", "std"))
    assert COLUMNS["nans"](row) == row.count


def test_a_share_of_zeros_among_no_elements_is_nan():
    assert math.isnan(COLUMNS["zeros"](NO_ELEMENTS))


def test_shape_and_dtype_are_added_once():
    assert with_shape(("norm", "max")) == ("norm", "max", "shape", "dtype")
    assert with_shape(("dtype", "norm")) == ("dtype", "norm", "shape")


def test_a_share_of_signs_is_shown_as_that_one_number():
    signs = SeriesKey(Kind.MG_DIRECTION, "fc1.weight")
    row = moments([1.0, 1.0, 1.0, 0.0])

    shown = {name: column(statistics_row(signs, row)) for name, column in COLUMNS.items()}

    assert [shown[name] for name in ("norm", "min", "max", "mean", "count")] == [0.75, 0.75, 0.75, 0.75, 1.0]
    assert statistics_row(SeriesKey(Kind.GRAD_REDUCED, "fc1.weight"), row) is row
    assert statistics_row(signs, NO_ELEMENTS) is NO_ELEMENTS


def test_a_scalar_shows_what_it_was():
    loss = place_of(SeriesKey(Kind.LOSS, "loss"))

    assert feature_value(loss, moments([2.5])) == 2.5
    assert math.isnan(feature_value(loss, moments([np.nan])))
    assert feature_value(loss, moments([np.inf])) == math.inf


def test_the_stable_rank_is_shown_as_a_ratio_of_norms():
    place = place_of(SeriesKey(Kind.FEATURE, "fc1", "stable_rank"))

    assert feature_value(place, moments([6.25])) == 2.5  # 2.5 is ‖w‖_F / ‖w‖_2; the series has its square
    assert feature_value(place_of(SeriesKey(Kind.FEATURE, "fc1", "spectral_norm")), moments([6.25])) == 6.25


@pytest.mark.parametrize(
    ("placement", "count", "shape", "dtype"),
    [
        (Placement(dtype="float32", shape=(2, 3)), 6, [2, 3], "torch.float32"),
        (Placement(dtype="torch.bfloat16", shape=(2, 3), length=4), 4, [4], "torch.bfloat16"),
        (Placement(dtype="", shape=()), 1, None, None),
        (None, 1, None, None),
    ],
)
def test_a_shard_is_flat_and_what_is_unknown_is_left_open(placement, count, shape, dtype):
    assert shape_of(placement, moments(np.ones(count))) == shape
    assert dtype_of(placement) == dtype


def test_no_kind_of_tensor_shares_a_file_with_another():
    assert len(set(FILES.values())) == len(FILES)
    assert not set(FILES.values()) & set(FEATURE_FILES)
