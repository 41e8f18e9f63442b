"""Comparisons of checkpoints against float64 numpy over whole tensors, whatever the pieces."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis.checkpoint.splits import SHAPES, checkpoint_of, pieces_in, regions
from trainermon.analysis.checkpoint.comparison import CheckpointOptions, compare_checkpoints
from trainermon.analysis.checkpoint.pieces import MAIN, Box, Checkpoint, Piece
from trainermon.analysis.checkpoint.verdicts import WeightVerdict
from trainermon.statistics import pairs

ONE_JOB = CheckpointOptions(jobs=1)


@pytest.fixture(params=["compiled", "numpy"])
def kernel(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(pairs, "is_available", lambda: False)
    elif not pairs.is_available():
        pytest.skip("the compiled library is not there, or an old one")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pieces")


def noise(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def only(found):
    (tensor,) = found.tensors
    return tensor


def compared(tmp_path, ours, theirs, options=ONE_JOB):
    return compare_checkpoints(
        checkpoint_of(tmp_path / "ours", {"w": ours}),
        checkpoint_of(tmp_path / "theirs", {"w": theirs}),
        options=options,
    )


@settings(max_examples=60)
@given(
    SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), regions(shape), regions(shape))),
    st.sampled_from(["float32", "float64", "float16", "int16", "bool"]),
    st.data(),
)
def test_any_two_splits_are_identical_and_one_flipped_bit_is_found_where_it_is(folder, case, dtype, data):
    shape, ours, theirs = case
    array = np.array(noise(*shape) * 100, dtype, ndmin=len(shape))
    first = pieces_in(folder / "w.raw", array, ours)
    changed = array.copy()
    place = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    changed.reshape(-1).view(np.uint8)[int(np.ravel_multi_index(place, shape)) * array.itemsize if shape else 0] ^= 1

    found = [
        only(
            compare_checkpoints(
                Checkpoint(path=folder, format="folder", tensors={"w": first}),
                Checkpoint(
                    path=folder, format="folder", tensors={"w": pieces_in(folder / f"{number}.raw", side, theirs)}
                ),
                options=ONE_JOB,
            )
        )
        for number, side in enumerate((array, changed))
    ]

    assert (found[0].verdict, found[0].unequal, found[0].count) == (WeightVerdict.IDENTICAL, 0, array.size)
    assert (found[1].unequal, found[1].first_at, found[1].name) == (1, place, "w")


def test_numbers_are_those_of_float64(tmp_path, kernel):
    ours, theirs = noise(70, 90), noise(70, 90) + noise(70, 90, seed=1)
    a, b = ours.astype(np.float64), theirs.astype(np.float64)

    found = only(compared(tmp_path, ours, theirs))

    assert found.verdict is WeightVerdict.DIFFERENT
    assert found.distance == pytest.approx(np.linalg.norm(a - b))
    assert found.cosine == pytest.approx(float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)))
    assert found.relative == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(b))
    assert found.largest == pytest.approx(np.abs(a - b).max())
    assert found.largest_at == tuple(np.unravel_index(np.abs(a - b).argmax(), a.shape))
    assert found.norms == pytest.approx((np.linalg.norm(a), np.linalg.norm(b)))
    assert found.unequal == (a != b).sum()


@pytest.mark.parametrize("wide", [np.float32, np.float64])
@pytest.mark.parametrize("turned", [False, True], ids=["first wider", "second wider"])
def test_rounded_weights_are_told_from_others(tmp_path, kernel, wide, turned):
    ours = noise(50, 40, dtype=wide)
    sides = [ours, ours.astype(np.float16)]

    found = only(compared(tmp_path, *(reversed(sides) if turned else sides)))

    assert (found.verdict, found.rounded_to) == (WeightVerdict.ROUNDING, "float16")
    said = "the first is the second" if turned else "the second is the first"
    assert f"{said} rounded to float16" in found.notes


def test_rounding_is_seen_where_the_numbers_are_stored_wide(tmp_path, kernel):
    ours = noise(50, 40)
    bits = ours.view(np.uint32)
    theirs = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)

    whole = compared(tmp_path, ours, theirs)

    assert whole.headline == "the same after rounding to bfloat16"


@pytest.mark.parametrize("turned", [False, True])
def test_ones_are_no_rounded_weights_unless_others_are_rounded_too(tmp_path, turned):
    trained = {"norm": 1 + noise(64) * np.float32(1e-4), "w": noise(50, 40)}
    bits = trained["w"].view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    ones = np.ones(64, np.float32)

    found = []
    for number, w in enumerate((trained["w"], rounded)):
        sides = [
            checkpoint_of(tmp_path / f"{number}{name}", tensors)
            for name, tensors in (("trained", trained), ("ones", {"norm": ones, "w": w}))
        ]
        whole = compare_checkpoints(*(reversed(sides) if turned else sides), options=ONE_JOB)
        found.append({tensor.name: tensor.verdict.value for tensor in whole.tensors})

    assert found == [{"norm": "different", "w": "identical"}, {"norm": "rounding", "w": "rounding"}]


def test_the_same_values_in_another_type_are_identical(tmp_path, kernel):
    theirs = noise(50, 40, dtype=np.float16)

    assert compared(tmp_path, theirs.astype(np.float32), theirs).headline == "the same model"


def test_up_to_the_limit_tensors_are_close(tmp_path, kernel):
    ours = noise(50, 40)
    theirs = ours + ours * np.float32(1e-4) * noise(50, 40, seed=1)

    found = [
        only(compared(tmp_path / str(rtol), ours, theirs, replace(ONE_JOB, rtol=rtol))).verdict for rtol in (1e-3, 1e-6)
    ]

    assert found == [WeightVerdict.CLOSE, WeightVerdict.DIFFERENT]


def test_nan_is_counted_on_each_side_and_leaves_the_other_numbers_alone(tmp_path, kernel):
    ours, theirs = noise(300), noise(300)
    ours[7], theirs[9], theirs[11] = math.nan, math.inf, math.nan

    found = only(compared(tmp_path, ours, theirs))

    assert (found.verdict, found.nonfinite, found.relative) == (WeightVerdict.NONFINITE, (1, 2), 0.0)


def test_tensors_of_other_shapes_and_of_one_side_are_told(tmp_path):
    ours = checkpoint_of(tmp_path / "ours", {"a": noise(3, 4), "b": noise(2)})
    theirs = checkpoint_of(tmp_path / "theirs", {"a": noise(3, 5), "c": noise(2)})

    found = compare_checkpoints(ours, theirs, options=ONE_JOB)

    assert [(t.name, t.verdict.value, t.is_ours) for t in found.tensors] == [
        ("a", "shape", True),
        ("b", "unmatched", True),
        ("c", "unmatched", False),
    ]
    assert found.headline == "differs in 3 of 3 tensors, first a"


def test_padding_of_the_vocabulary_is_left_out_and_said(tmp_path):
    name = "embedding.word_embeddings.weight"
    table = noise(10, 4)
    ours = checkpoint_of(tmp_path / "ours", {name: table})
    theirs = checkpoint_of(tmp_path / "theirs", {name: np.concatenate([table, np.ones((6, 4), np.float32)])})

    found = only(compare_checkpoints(ours, theirs, options=ONE_JOB))

    assert (found.verdict, found.count) == (WeightVerdict.IDENTICAL, 40)
    assert "6 rows that pad the vocabulary" in found.notes[-1]


def test_a_missing_piece_is_damage_and_names_who_is_there(tmp_path):
    array = noise(6, 4)
    whole = checkpoint_of(tmp_path / "whole", {"w": array})
    halves = pieces_in(tmp_path / "w.raw", array, [Box((0, 0), (3, 4)), Box((3, 0), (3, 4))])
    half = replace(whole, tensors={"w": replace(halves, pieces=halves.pieces[1:])})

    found = only(compare_checkpoints(whole, half, options=ONE_JOB))

    assert found.verdict is WeightVerdict.DAMAGED
    assert found.notes == ("12 of 24 elements are in no file, first at [0, 0] to [3, 4]; there is: rank 1",)


def test_replicas_that_differ_are_damage_and_named(tmp_path):
    array, other = noise(6, 4), noise(6, 4)
    other[2, 3] += 1
    box = Box((0, 0), (6, 4))
    whole = checkpoint_of(tmp_path / "whole", {"w": array})
    stored = [pieces_in(tmp_path / f"{n}.raw", side, [box]).pieces[0].stored for n, side in enumerate((array, other))]
    twice = replace(
        whole.tensors["w"], pieces=tuple(Piece(box, part, f"rank {rank}") for rank, part in enumerate(stored))
    )

    found = only(compare_checkpoints(whole, replace(whole, tensors={"w": twice}), options=ONE_JOB))

    assert found.verdict is WeightVerdict.DAMAGED
    assert found.notes == ("rank 1 (1.raw) and rank 0 (0.raw) both hold [0, 0], 1 elements differ, first [2, 3]",)


def test_trained_on_is_said_with_the_whole_change_and_the_largest(tmp_path):
    before = {f"layers.{layer}.weight": noise(20, 20, seed=layer) for layer in range(4)}
    after = {name: array * np.float32(1.01) + 0.001 * noise(20, 20, seed=9) for name, array in before.items()}
    after["layers.2.weight"] = before["layers.2.weight"] * np.float32(1.1) + 0.02 * noise(20, 20, seed=7)
    a, b = (np.concatenate([side[name].ravel() for name in before]).astype(np.float64) for side in (before, after))

    found = compare_checkpoints(
        checkpoint_of(tmp_path / "a", before, step=10), checkpoint_of(tmp_path / "b", after, step=20), options=ONE_JOB
    )

    change = re.match(r"trained on: ΔW/W ([\d.]+)%, largest in layers.2.weight .*; steps 10 and 20", found.headline)
    assert change is not None
    assert float(change[1]) == pytest.approx(100 * np.linalg.norm(a - b) / np.linalg.norm(b), rel=0.02)


def change_of(found):
    change = re.match(r"trained on: ΔW/W ([\d.]+)%", found.headline)
    assert change is not None, found.headline
    return float(change[1]) / 100


BUFFERS = {
    "norm.num_batches_tracked": np.array([10]),
    "norm.running_mean": 10 * np.ones(8, "f4"),
    "norm.running_var": 10 * np.ones(8, "f4"),
    "bn1.moving_variance": 10 * np.ones(8, "f4"),  # MindSpore's
}


@given(buffers=st.sets(st.sampled_from(list(BUFFERS)), min_size=1), factor=st.sampled_from([2, 3, 100]))
def test_counters_and_running_statistics_are_no_part_of_the_change_of_weights(tmp_path_factory, buffers, factor):
    folder = tmp_path_factory.mktemp("buffers")
    before = {f"layers.{layer}.weight": noise(20, 20, seed=layer) for layer in range(4)}
    before |= {name: BUFFERS[name] for name in sorted(buffers)}
    after = {name: array * (factor if name in buffers else np.float32(1.01)) for name, array in before.items()}

    found = compare_checkpoints(
        checkpoint_of(folder / "a", before, step=10), checkpoint_of(folder / "b", after, step=20), options=ONE_JOB
    )

    assert change_of(found) == pytest.approx(0.01 / 1.01, abs=5e-5)


def test_what_moves_without_a_state_of_the_optimizer_is_no_weight_where_others_have_one(tmp_path):
    before = {f"layers.{layer}.weight": noise(20, 20, seed=layer) for layer in range(4)}
    sides = []
    for number, factor in enumerate((1.0, 1.01)):
        trained = {name: array * np.float32(factor) for name, array in before.items()}
        buffer = {"codebook.average": (1 + number) * 10 * np.ones((8, 8), "f4")}
        side = checkpoint_of(tmp_path / str(number), {**trained, **buffer}, step=10 * number)
        moments = checkpoint_of(tmp_path / f"moments{number}", trained).tensors
        sides.append(replace(side, optimizer={"exp_avg": moments}))

    assert change_of(compare_checkpoints(*sides, options=ONE_JOB)) == pytest.approx(0.01 / 1.01, abs=5e-5)


def test_two_trainings_at_one_step_are_not_said_to_follow_each_other(tmp_path):
    before = {f"layers.{layer}.weight": noise(20, 20, seed=layer) for layer in range(4)}
    after = {name: array * np.float32(1.01) for name, array in before.items()}

    found = compare_checkpoints(
        checkpoint_of(tmp_path / "a", before, step=2000),
        checkpoint_of(tmp_path / "b", after, step=2000),
        options=ONE_JOB,
    )

    assert found.headline.startswith("trained apart, both at step 2,000: ΔW/W 0.99%, largest in layers.")


def test_a_tensor_that_is_another_one_stands_first_and_in_the_headline(tmp_path):
    before = {f"layers.{layer}.weight": noise(20, 20, seed=layer) for layer in range(6)} | {"head.weight": noise(9, 9)}
    after = {name: array + 0.01 * noise(*array.shape, seed=30) for name, array in before.items()}
    after["layers.4.weight"], after["head.weight"] = noise(20, 20, seed=8), noise(9, 9, seed=9)

    found = compare_checkpoints(
        checkpoint_of(tmp_path / "a", before), checkpoint_of(tmp_path / "b", after), options=ONE_JOB
    )

    assert {tensor.name for tensor in found.ranked()[:2]} == {"layers.4.weight", "head.weight"}
    assert [tensor.name for tensor in found.ranked()[2:]] == [f"layers.{layer}.weight" for layer in (0, 1, 2, 3, 5)]
    assert re.match(
        r"trained on: ΔW/W 1\.0.%, but 2 stand out, first (layers.4|head).weight \(ΔW/W 1[34]", found.headline
    )
    assert all("stands out" in tensor.hints[0] for tensor in found.ranked()[:2])
    assert not any(tensor.hints for tensor in found.ranked()[2:])


def test_a_vector_that_began_at_zero_does_not_stand_out(tmp_path):
    before = {f"layers.{layer}.weight": noise(20, 20, seed=layer) for layer in range(6)} | {"bias": np.zeros(9, "f4")}
    after = {name: array + 0.01 * noise(*array.shape, seed=30) for name, array in before.items()}

    found = compare_checkpoints(
        checkpoint_of(tmp_path / "a", before), checkpoint_of(tmp_path / "b", after), options=ONE_JOB
    )

    assert found.outliers() == {}


def test_where_no_element_is_finite_on_both_sides_no_number_is_said(tmp_path, kernel):
    ours, theirs = noise(6), noise(6, seed=1)
    ours[:3], theirs[3:] = np.nan, np.inf

    found = only(compared(tmp_path, ours, theirs))

    assert (found.verdict, found.nonfinite) == (WeightVerdict.NONFINITE, (3, 3))
    assert (found.relative, found.cosine, found.distance, found.largest) == (None,) * 4


def test_optimizer_state_and_values_count_unless_weights_alone_are_asked_for(tmp_path):
    sides = []
    for number in range(2):
        state = checkpoint_of(tmp_path / f"state{number}", {"w": noise(5, seed=number)}).tensors
        values = {"args": {"lr": 0.1 * number, "seed": 1}}
        sides.append(
            checkpoint_of(tmp_path / str(number), {"w": noise(5)}, optimizer={"exp_avg": state}, values=values)
        )

    found = compare_checkpoints(*sides, options=ONE_JOB)
    weights = compare_checkpoints(*sides, options=replace(ONE_JOB, weights_only=True))

    assert found.headline == "the same model; optimizer state differs in 1 of 1, 1 other value differs"
    assert [(value.key, value.ours, value.theirs) for value in found.values] == [("args.lr", "0.0", "0.1")]
    assert (weights.headline, weights.values) == ("the same model", ())


def test_main_weights_stand_in_for_those_of_the_model(tmp_path):
    main = noise(40)
    state = {MAIN: checkpoint_of(tmp_path / "main", {"w": main}).tensors}
    ours = checkpoint_of(tmp_path / "ours", {"w": main.astype(np.float16)}, optimizer=state)
    theirs = checkpoint_of(tmp_path / "theirs", {"w": main})

    found = [
        only(compare_checkpoints(ours, theirs, options=replace(ONE_JOB, precision=precision))).verdict.value
        for precision in ("model", "main")
    ]

    assert found == ["rounding", "identical"]


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (lambda w: w * np.float32(2), "scaled by 2"),
        (lambda w: -w, "scaled by -1"),
        (lambda w: w.T, "transposed"),
        (lambda w: np.concatenate([w[8:], w[:8]]), "the two halves (gate and up) are exchanged"),
        (lambda w: w.reshape(2, 4, 2, 16).swapaxes(0, 1).reshape(16, 16), "gate and up take turns in 4 blocks"),
        (lambda w: w[np.random.default_rng(3).permutation(16)], "the same rows in another order"),
    ],
)
def test_what_may_be_the_matter_is_said(tmp_path, change, hint):
    ours = noise(16, 16)

    found = only(compared(tmp_path, ours, np.ascontiguousarray(change(ours))))

    assert found.verdict is WeightVerdict.DIFFERENT
    assert any(said.startswith(hint) for said in found.hints), found.hints


def test_a_tensor_that_is_another_one_there_is_said_to_be(tmp_path):
    experts = {f"experts.{number}.weight": noise(6, 4, seed=number) for number in range(3)}
    names = list(experts)
    off = {names[(number + 1) % 3]: array for number, array in enumerate(experts.values())}

    found = compare_checkpoints(
        checkpoint_of(tmp_path / "a", experts), checkpoint_of(tmp_path / "b", off), options=ONE_JOB
    )

    assert found.tensors[0].hints == ("equal to experts.1.weight of the second",)


def test_the_report_counts_every_tensor(tmp_path):
    both = checkpoint_of(tmp_path / "a", {"a": noise(3), "b": noise(4)})
    told = []

    compare_checkpoints(both, both, options=replace(ONE_JOB, jobs=2), report=lambda *numbers: told.append(numbers))

    assert told == [(1, 2), (2, 2)]
