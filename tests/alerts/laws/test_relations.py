"""Laws on rows that numpy makes in float64: what rounding explains breaks none of them, and what it does not does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.alerts.across_ranks.test_across import places
from tests.alerts.series import row
from trainermon.alerts.laws.clipping import OneFactor
from trainermon.alerts.laws.gradients import BeginEmpty, EveryRankGradient, Reached, SomeGradient
from trainermon.alerts.laws.inputs import DistinctInputs, NewInputs
from trainermon.alerts.laws.law import LawStep, TensorPlace
from trainermon.alerts.laws.reductions import Linear, OwnData, UsualScale
from trainermon.alerts.laws.registry import LAWS
from trainermon.alerts.laws.replicas import EqualCopies
from trainermon.alerts.laws.updates import Copied, Moves, NoLeap
from trainermon.core.config import MonitorConfig
from trainermon.core.values import Coordinates, Kind, Placement

Elements = Sequence[np.ndarray | None]
SETTINGS = settings(deadline=None, max_examples=60)
WHOLE = Placement(dtype="float32", shape=(8,), replicated_over=("dp",))
RATE = TensorPlace("learning_rate", 0, "0", 0, None)


def tensor(name: str, micro_step: int | None = None) -> TensorPlace:
    return TensorPlace(name, 0, "", 0, micro_step)


def step_of(
    rows: Mapping[Kind, Sequence[Elements]],
    *,
    number: int = 0,
    tensors: Sequence[TensorPlace] = (),
    placement: Placement | Mapping[Kind, Sequence[Placement]] = WHOLE,
    at: Sequence[Coordinates] | None = None,
) -> LawStep:
    """Return a step in which `rows[kind][rank][tensor]` are the elements that a rank holds; None: no row."""
    num_ranks, num_tensors = len(next(iter(rows.values()))), len(next(iter(rows.values()))[0])
    moments = {
        kind: np.array([[row(e) if e is not None else [np.nan] * 8 for e in of_rank] for of_rank in held])
        .reshape(num_ranks, num_tensors, 8)
        .transpose(0, 2, 1)
        for kind, held in rows.items()
    }
    placed = placement if isinstance(placement, Mapping) else dict.fromkeys(rows, [placement] * num_ranks)
    return LawStep(
        step=number,
        attempt=1,
        places=at or places(num_ranks),
        tensors=tensors or [tensor(f"t{n}") for n in range(num_tensors)],
        rows=moments,
        placements={kind: [[placed[kind][rank]] * num_tensors for rank in range(num_ranks)] for kind in rows},
    )


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Return values rounded to the nearest number of eight bits, as float64."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(mantissa * 256) / 256, exponent)


def gradients(seed: int, *, num_ranks: int, size: int, tensors: int = 3) -> list[list[np.ndarray]]:
    draw = np.random.default_rng(seed)
    scales = 10.0 ** draw.uniform(-6, 2, tensors)
    return [[draw.standard_normal(size) * scale for scale in scales] for _ in range(num_ranks)]


def mean_of(given_rows: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    return [np.mean(held, axis=0) for held in zip(*given_rows, strict=True)]


class TestLinear:
    @SETTINGS
    @given(st.integers(0, 1 << 30), st.sampled_from([2, 4, 8]), st.sampled_from([1, 7, 300]), st.booleans())
    def test_a_reduction_in_any_precision_breaks_nothing(
        self, seed: int, num_ranks: int, size: int, is_summed: bool
    ) -> None:
        own = gradients(seed, num_ranks=num_ranks, size=size)
        factor = num_ranks if is_summed else 1
        for rounded in (np.float32, bfloat16):
            reduced = [rounded(value * factor).astype(np.float64) for value in mean_of(own)]
            rows = {Kind.GRAD_UNREDUCED: own, Kind.GRAD_REDUCED: [reduced] * num_ranks}
            verdict = Linear({}).judge(step_of(rows))
            assert verdict.judged.all()
            assert not verdict.broken.any()

    @SETTINGS
    @given(st.integers(0, 1 << 30), st.sampled_from([2, 4]), st.integers(0, 2))
    def test_a_tensor_that_was_not_reduced_breaks_it_and_only_that_one(
        self, seed: int, num_ranks: int, wrong: int
    ) -> None:
        own = gradients(seed, num_ranks=num_ranks, size=300)
        reduced = mean_of(own)
        held = [[*reduced] for _ in range(num_ranks)]
        held[0][wrong] = own[0][wrong] * 3 + 1e-3 * np.abs(own[0][wrong]).max()
        for rank in range(num_ranks):
            held[rank][wrong] = held[0][wrong]
        verdict = Linear({}).judge(step_of({Kind.GRAD_UNREDUCED: own, Kind.GRAD_REDUCED: held}))
        assert verdict.broken[:, wrong].all()
        assert not np.delete(verdict.broken, wrong, axis=1).any()

    def test_shards_are_put_together_first(self) -> None:
        own = gradients(3, num_ranks=2, size=8, tensors=2)
        reduced = mean_of(own)
        shards = [
            Placement(dtype="float32", shape=(8,), offset=4 * r, length=4, partitioned_over=("dp",)) for r in (0, 1)
        ]
        held = [[value[:4] for value in reduced], [value[4:] for value in reduced]]
        placement = {Kind.GRAD_UNREDUCED: [WHOLE] * 2, Kind.GRAD_REDUCED: shards}
        rows = {Kind.GRAD_UNREDUCED: own, Kind.GRAD_REDUCED: held}
        verdict = Linear({}).judge(step_of(rows, placement=placement))
        assert verdict.judged.all()
        assert not verdict.broken.any()

    def test_of_ranks_on_another_node_nothing_is_said(self) -> None:
        own = gradients(3, num_ranks=2, size=8)
        rows = {Kind.GRAD_UNREDUCED: own, Kind.GRAD_REDUCED: own}
        elsewhere = [Coordinates(rank=r, world_size=4, dp=r, dp_size=4) for r in range(2)]
        assert not Linear({}).judge(step_of(rows, at=elsewhere)).judged.any()

    def test_of_ranks_that_no_framework_joins_nothing_is_said(self) -> None:
        own = gradients(3, num_ranks=2, size=300)
        alone = Placement(dtype="float32", shape=(300,))
        step = step_of({Kind.GRAD_UNREDUCED: own, Kind.GRAD_REDUCED: own}, placement=alone)
        assert not Linear({}).judge(step).judged.any()
        assert Linear({}).judge(step_of({Kind.GRAD_UNREDUCED: own, Kind.GRAD_REDUCED: own})).broken.any()

    def test_copies_that_tensor_parallel_ranks_sum_may_be_summed_over_them_too(self) -> None:
        own = gradients(5, num_ranks=2, size=8)
        summed = [2 * value for value in mean_of(own)]
        at = [Coordinates(rank=r, world_size=2, tp=r, tp_size=2) for r in range(2)]
        shared = Placement(dtype="float32", shape=(8,), replicated_over=("tp",))
        rows = {Kind.GRAD_UNREDUCED: own, Kind.GRAD_REDUCED: [summed] * 2}
        verdict = Linear({}).judge(step_of(rows, at=at, placement=shared))
        assert verdict.judged.all()
        assert not verdict.broken.any()


class TestUsualScale:
    @SETTINGS
    @given(
        st.integers(0, 1 << 30),
        st.sampled_from([2, 4, 8]),
        st.sampled_from([300, 10_000]),
        st.sampled_from(["sum", "mean", "tokens", "mean of means", "twice", "times"]),
    )
    def test_only_a_factor_that_counts_ranks_twice_breaks_it(
        self, seed: int, num_ranks: int, size: int, how: str
    ) -> None:
        own = gradients(seed, num_ranks=num_ranks, size=size, tensors=5)
        factors = {
            "sum": float(num_ranks),
            "mean": 1.0,
            "tokens": num_ranks / 1537,
            "mean of means": 1 / num_ranks,
            "twice": 2.0,
            "times": float(num_ranks**2),
        }
        is_sum = how == "twice" and num_ranks == 2
        for rounded in (np.float32, bfloat16):
            reduced = [rounded(value * factors[how]).astype(np.float64) for value in mean_of(own)]
            rows = {Kind.GRAD_UNREDUCED: own, Kind.GRAD_REDUCED: [reduced] * num_ranks}
            verdict = UsualScale({}).judge(step_of(rows))
            assert verdict.judged.all()
            assert verdict.broken.all() == verdict.broken.any()
            assert verdict.broken.any() == (how in ("mean of means", "twice", "times") and not is_sum)
            assert not Linear({}).judge(step_of(rows)).broken.any()

    def test_what_is_no_reduction_at_all_has_no_factor(self) -> None:
        own, other = gradients(1, num_ranks=2, size=300, tensors=5), gradients(2, num_ranks=1, size=300, tensors=5)
        rows = {Kind.GRAD_UNREDUCED: own, Kind.GRAD_REDUCED: other * 2}
        assert not UsualScale({}).judge(step_of(rows)).broken.any()


class TestEqualCopies:
    @SETTINGS
    @given(st.integers(0, 1 << 30), st.sampled_from([2, 3, 8, 40]), st.sampled_from([1, 7, 300]))
    def test_sums_in_another_order_and_type_break_nothing(self, seed: int, num_ranks: int, size: int) -> None:
        draw, (reduced,) = np.random.default_rng(seed), gradients(seed, num_ranks=1, size=size)
        for dtype, rounded in (("float32", np.float32), ("bfloat16", bfloat16)):
            unit = {"float32": 2.0**-22, "bfloat16": 2.0**-9}[dtype]
            held = [
                [rounded(value * (1 + draw.choice([-unit, 0, unit], size))).astype(np.float64) for value in reduced]
                for _ in range(num_ranks)
            ]
            placement = Placement(dtype=dtype, shape=(size,), replicated_over=("dp",))
            verdict = EqualCopies({}).judge(step_of({Kind.GRAD_REDUCED: held}, placement=placement))
            assert verdict.judged.all()
            assert not verdict.broken.any()

    @SETTINGS
    @given(
        st.integers(0, 1 << 30),
        st.sampled_from([2, 3, 5, 8, 40]),
        st.integers(0, 2),
        st.sampled_from([0.0, 0.5, -1.0, 1.01]),
    )
    def test_a_copy_that_is_another_one_breaks_it_on_the_ranks_that_are_outvoted(
        self, seed: int, num_ranks: int, wrong: int, factor: float
    ) -> None:
        reduced = [np.abs(value) for value in gradients(seed, num_ranks=1, size=300)[0]]
        held = [[*reduced] for _ in range(num_ranks)]
        held[-1][wrong] = held[-1][wrong] * factor
        verdict = EqualCopies({}).judge(step_of({Kind.GRAD_REDUCED: held}))
        expected = np.zeros((num_ranks, 3), bool)
        is_only_noise = np.linalg.norm(reduced[wrong]) < 1e-3 * max(np.linalg.norm(value) for value in reduced)
        expected[slice(None) if num_ranks == 2 else -1, wrong] = True
        assert is_only_noise or (verdict.broken == expected).all()

    @pytest.mark.parametrize(
        "placed",
        [
            [Placement(dtype="float32", shape=(16,), offset=8 * r, length=8, partitioned_over=("dp",)) for r in (0, 1)],
            [Placement(dtype="float32", shape=(8,), partitioned_over=("tp",), replicated_over=("dp",))] * 2,
        ],
        ids=["pieces", "parts of tensor-parallel ranks"],
    )
    def test_of_what_no_other_rank_holds_nothing_is_said(self, placed: Sequence[Placement]) -> None:
        at = places(2)
        if "tp" in placed[0].partitioned_over:
            at = [Coordinates(rank=r, world_size=2, tp=r, tp_size=2) for r in range(2)]
        held = gradients(1, num_ranks=2, size=8)
        step = step_of({Kind.GRAD_REDUCED: held}, placement={Kind.GRAD_REDUCED: placed}, at=at)
        assert not EqualCopies({}).judge(step).judged.any()

    def test_what_is_rounding_beside_the_other_gradients_breaks_nothing(self) -> None:
        noise = [np.array([3e-9, -1e-9]), np.array([-2e-9, 1e-9])]
        rows = {Kind.GRAD_REDUCED: [[np.ones(8), noise[rank]] for rank in range(2)]}
        assert not EqualCopies({}).judge(step_of(rows)).broken.any()

    def test_a_copy_that_is_not_finite_is_another_rules(self) -> None:
        held = [[np.ones(8), np.full(8, np.nan)], [np.ones(8), np.ones(8)]]
        verdict = EqualCopies({}).judge(step_of({Kind.GRAD_REDUCED: held}))
        assert verdict.judged.tolist() == [[True, False]] * 2


def test_a_parameter_without_elements_needs_no_gradient() -> None:
    empty = Placement(dtype="float32", shape=(0, 3), replicated_over=("dp",))
    rows: dict[Kind, list[Elements]] = {Kind.GRAD_REDUCED: [[np.zeros(0)]]}

    verdict = Reached({"steps": 0}).judge(step_of(rows, placement={Kind.GRAD_REDUCED: [empty]}))

    assert not verdict.judged.any()


class TestMoves:
    def rows(self, after: np.ndarray, gradient: float, rate: float) -> dict[Kind, list[Elements]]:
        weight = np.linspace(-1, 1, 8)
        return {
            Kind.PARAM_UPDATED: [[after, None]],
            Kind.PARAM_ORIGIN: [[weight, None]],
            Kind.GRAD_REDUCED: [[np.full(8, gradient), None]],
            Kind.EXP_AVG_SQ: [[None, None]],
            Kind.STEP: [[None, np.array([rate])]],
        }

    @pytest.mark.parametrize(
        ("gradient", "rate", "broken", "judged"),
        [
            (1e-2, 1e-3, True, True),
            (0.0, 1e-3, False, False),
            (1e-2, 0.0, False, False),
            (1e-6, 1e-3, False, True),  # 1e-9 of the largest weight, which float32 rounds away
        ],
    )
    def test_standing_still_is_broken_unless_rounding_explains_it(
        self, gradient: float, rate: float, broken: bool, judged: bool
    ) -> None:
        still = np.linspace(-1, 1, 8)
        step = step_of(self.rows(still, gradient, rate), tensors=[tensor("w"), RATE])
        verdict = Moves({}).judge(step)
        assert verdict.broken[0, 0] == broken
        assert verdict.judged[0, 0] == judged

    def test_a_single_element_that_moved_is_enough(self) -> None:
        moved = np.linspace(-1, 1, 8)
        moved[3] += 1e-7
        step = step_of(self.rows(moved, 1e-2, 1e-3), tensors=[tensor("w"), RATE])
        assert not Moves({}).judge(step).broken.any()


class TestNoLeap:
    def broken(self, *sides: tuple[float, float], rate: float | None = 1e-3) -> list[bool]:
        """Return of each step whether it breaks the law, given the largest magnitude before and after it."""
        relation, found = NoLeap({"factor": 1e4}), []
        for number, (origin, updated) in enumerate(sides):
            rows: dict[Kind, list[Elements]] = {
                Kind.PARAM_ORIGIN: [[np.array([-origin, 0.0]), None]],
                Kind.PARAM_UPDATED: [[np.array([0.0, updated]), None]],
                Kind.STEP: [[None, None if rate is None else np.array([rate])]],
            }
            verdict = relation.judge(step_of(rows, number=number, tensors=[tensor("w"), RATE]))
            found.append(bool(verdict.broken[0, 0]))
        return found

    def test_a_leap_in_a_step_or_between_two_is_told_and_only_once(self) -> None:
        assert self.broken((0.1, 0.1), (0.1, 0.1), (3e37, 3e37), (3e37, 3e37)) == [False, False, True, False]
        assert self.broken((0.1, 1001.0), (1001.0, 1001.0)) == [True, False]
        assert self.broken((0.1, 999.0), (999.0, 0.1)) == [False, False]

    def test_what_begins_at_zero_may_become_anything_and_what_begins_near_it_ten_thousand_rates(self) -> None:
        assert self.broken((0.0, 1e-12), (1e-12, 1e-3), (1e-3, 9.9)) == [False, False, False]
        assert self.broken((0.0, 0.0), (0.5, 0.5)) == [False, False]
        assert self.broken((1e-12, 11.0)) == [True]
        assert self.broken((1e-12, 1e-7), rate=None) == [True]


class TestCopied:
    @SETTINGS
    @given(st.integers(0, 1 << 30), st.sampled_from([1, 5, 400]), st.floats(-3, 3))
    def test_a_rounded_copy_breaks_nothing_and_another_one_does(self, seed: int, size: int, offset: float) -> None:
        main = np.random.default_rng(seed).standard_normal(size) * 0.1 + offset
        model = Placement(dtype="bfloat16", shape=(size,), replicated_over=("dp",))
        placement = {Kind.PARAM_USED: [model], Kind.PARAM_ORIGIN: [WHOLE]}
        for used, broken in ((bfloat16(main), False), (bfloat16(main * 1.05), True)):
            rows = {Kind.PARAM_USED: [[used]], Kind.PARAM_ORIGIN: [[main]]}
            verdict = Copied({}).judge(step_of(rows, placement=placement))
            assert verdict.judged.all()
            assert verdict.broken.all() == broken


class TestData:
    def test_equal_gradients_of_two_ranks_break_it_on_both_and_not_on_a_third(self) -> None:
        own = gradients(1, num_ranks=2, size=8)
        verdict = OwnData({}).judge(step_of({Kind.GRAD_UNREDUCED: [own[0], own[1], own[0]]}))
        assert verdict.broken.all(axis=1).tolist() == [True, False, True]

    def test_of_ranks_that_no_framework_joins_nothing_is_said(self) -> None:
        (own,) = gradients(1, num_ranks=1, size=8)
        alone = Placement(dtype="float32", shape=(8,))
        assert not OwnData({}).judge(step_of({Kind.GRAD_UNREDUCED: [own, own]}, placement=alone)).judged.any()

    def test_zeros_are_not_data(self) -> None:
        nothing = [np.zeros(8)] * 3
        assert not OwnData({}).judge(step_of({Kind.GRAD_UNREDUCED: [nothing, nothing]})).broken.any()

    def test_positions_are_equal_by_design_and_what_changes_is_not(self) -> None:
        relation, positions = DistinctInputs({}), np.arange(8.0)
        for number in range(3):
            ids = [np.arange(8.0) * number, np.arange(8.0) * number]
            verdict = relation.judge(step_of({Kind.ACTV: [[positions, value] for value in ids]}, number=number))
        assert verdict.judged.tolist() == [[False, True]] * 2
        assert verdict.broken[:, 1].all()

    def test_micro_steps_of_one_batch_break_it(self) -> None:
        relation = DistinctInputs({})
        columns = [tensor("embed", 0), tensor("embed", 1)]
        for number in (1, 2):
            same = np.arange(8.0) * number
            verdict = relation.judge(step_of({Kind.ACTV: [[same, same]]}, number=number, tensors=columns))
        assert verdict.broken.all()

    def test_twin_models_in_a_list_are_given_the_same_by_design(self) -> None:
        """As the two critics of a learner of control, which each are a stage of what is watched."""
        relation = DistinctInputs({})
        columns = [TensorPlace("0", stage, "input.0", 0, None) for stage in range(2)]
        for number in (1, 2):
            same = np.arange(8.0) * number
            verdict = relation.judge(step_of({Kind.ACTV: [[same, same]]}, number=number, tensors=columns))
        assert not verdict.broken.any()

    def test_what_was_taken_for_the_data_before_it_first_changed_does_not_count(self) -> None:
        """Ten steps are made with each batch, as of rollouts; activations change in each, and are taken for it."""
        relation = NewInputs({"share": 0.25, "lag": 4})
        for number in range(80):
            batch = np.random.default_rng(number // 10).integers(0, 100, 16).astype(float)
            hidden = np.random.default_rng(1000 + number).integers(0, 100, 16).astype(float)
            verdict = relation.judge(step_of({Kind.ACTV: [[batch, hidden]]}, number=number))
            assert not verdict.broken.any(), number

    @pytest.mark.parametrize(
        ("batches", "broken"),
        [
            ([n // 2 for n in range(80)], True),  # each comes twice
            (list(range(80)), False),
            ([n % 3 for n in range(80)], False),  # three, again and again
            ([0] * 80, False),
        ],
    )
    def test_a_share_of_batches_that_come_twice_breaks_it(self, batches: Sequence[int], broken: bool) -> None:
        relation = NewInputs({"share": 0.25, "lag": 4})
        for number, batch in enumerate(batches):
            ids = np.random.default_rng(batch).integers(0, 100, 16).astype(float)
            verdict = relation.judge(step_of({Kind.ACTV: [[ids]]}, number=number))
        assert verdict.broken.any() == broken


class TestGradients:
    def test_a_tensor_that_no_rank_ever_had_a_gradient_of_is_told_after_so_many_steps(self) -> None:
        relation = Reached({"steps": 5})
        for number in range(7):
            held = [[np.zeros(8), np.ones(8), None], [np.zeros(8), np.zeros(8), None]]
            verdict = relation.judge(step_of({Kind.GRAD_REDUCED: held}, number=number))
            assert verdict.broken.tolist() == [[number >= 5, False, number >= 5]] * 2

    @pytest.mark.parametrize(
        ("names", "gradient", "told"),
        [
            (("2.weight", "2.bias"), np.zeros(1), False),
            (("weight", "bias"), np.zeros(1), False),
            (("2.weight", "2.bias"), None, True),  # cut off
            (("2.weight", "2.bias"), np.zeros(4), True),  # of several outputs
            (("1.weight", "2.bias"), np.zeros(1), True),
            (("2.weight", "2.scale"), np.zeros(1), True),
        ],
    )
    def test_a_bias_that_the_loss_does_not_depend_on_is_none_that_is_not_reached(
        self, names: tuple[str, str], gradient: np.ndarray | None, told: bool
    ) -> None:
        """As the last one of a critic, whose loss is the difference of its means over two batches."""
        relation = Reached({"steps": 5})
        for number in range(8):
            rows = {Kind.GRAD_REDUCED: [[np.ones(8), gradient]]}
            verdict = relation.judge(step_of(rows, tensors=[*map(tensor, names)], number=number))
        assert verdict.broken.tolist() == [[False, told]]

    def test_experts_may_wait(self) -> None:
        relation = Reached({"steps": 0})
        names = [tensor("mlp.experts.3.weight")]
        assert not relation.judge(step_of({Kind.GRAD_REDUCED: [[np.zeros(8)]]}, tensors=names)).broken.any()

    def test_what_a_backward_found_breaks_it_unless_it_is_zero(self) -> None:
        columns = [TensorPlace(name, 0, slot, 0, None) for name, slot in (("a", "gradient_kept"), ("a", "momentum"))]
        for found, broken in ((np.array([0.0, 1e-9]), True), (np.zeros(2), False), (np.array([np.nan, 0.0]), True)):
            verdict = BeginEmpty({}).judge(step_of({Kind.STATE: [[found, np.ones(2)]]}, tensors=columns))
            assert verdict.broken.tolist() == [[broken, False]]
            assert verdict.judged.tolist() == [[True, False]]

    @pytest.mark.parametrize("others", [True, False])
    def test_a_rank_whose_gradients_are_all_zero_breaks_it_if_others_are_not(self, others: bool) -> None:
        held = [[np.ones(8) * others, np.zeros(8)], [np.zeros(8), np.zeros(8)], [np.ones(8) * others, None]]
        verdict = EveryRankGradient({}).judge(step_of({Kind.GRAD_UNREDUCED: held}))
        assert verdict.broken.all(axis=1).tolist() == [False, others, False]
        assert not verdict.broken[[0, 2]].any()

    @pytest.mark.parametrize("alive", [True, False])
    def test_a_step_needs_one_gradient_on_one_rank(self, alive: bool) -> None:
        rate = np.array([1e-3])
        rows = {
            Kind.GRAD_REDUCED: [[np.zeros(8), None], [np.ones(8) * alive, None]],
            Kind.STEP: [[None, rate], [None, rate]],
        }
        verdict = SomeGradient({}).judge(step_of(rows, tensors=[tensor("w"), RATE]))
        assert verdict.broken[:, 0].all() != alive


class TestOneFactor:
    def verdict(self, ratios: Sequence[float], gradients_of_ranks: Sequence[np.ndarray], dtype: str = "float32"):
        rows = {
            Kind.STEP: [[None, np.array([ratio])] for ratio in ratios],
            Kind.GRAD_REDUCED: [[gradient, None] for gradient in gradients_of_ranks],
        }
        columns = [tensor("w"), TensorPlace("clip_ratio", 0, "", 0, None)]
        placement = Placement(dtype=dtype, shape=(8,), replicated_over=("dp",))
        return OneFactor({}).judge(step_of(rows, tensors=columns, placement=placement))

    def test_who_has_the_same_gradients_clips_them_alike(self) -> None:
        verdict = self.verdict([0.5, 0.5 + 1e-6, 0.6], [np.ones(8)] * 3)
        assert verdict.broken[:, 1].tolist() == [False, False, True]
        assert not verdict.judged[:, 0].any()

    @SETTINGS
    @given(st.integers(0, 1 << 30), st.floats(1e-3, 1e3))
    def test_clipping_each_part_by_its_own_norm_breaks_it_and_by_the_norm_of_all_does_not(
        self, seed: int, limit: float
    ) -> None:
        parts = [np.random.default_rng((seed, rank)).standard_normal(8) * (rank + 1) * 1e4 for rank in range(3)]
        own = [limit / np.linalg.norm(part) for part in parts]
        both = [limit / np.linalg.norm(parts)] * 3
        assert self.verdict(own, parts).broken[:, 1].all()
        verdict = self.verdict(both, parts)
        assert not verdict.broken.any()

    def test_different_factors_of_different_parts_may_be_meant(self) -> None:
        verdict = self.verdict([0.5, 0.7], [np.ones(8), np.ones(8) * 3])
        assert not verdict.judged.any()

    def test_the_rounding_of_sixteen_bits_breaks_nothing(self) -> None:
        assert not self.verdict([0.5, 0.5 * (1 + 2**-8)], [np.ones(8)] * 2, "bfloat16").broken.any()
        assert self.verdict([0.5, 0.5 * (1 + 2**-8)], [np.ones(8)] * 2).broken.any()

    def test_a_factor_that_is_not_a_number_is_not_judged(self) -> None:
        assert not self.verdict([np.nan, np.nan], [np.ones(8)] * 2).judged.any()

    def test_without_any_factor_nothing_is_said(self) -> None:
        rows = {Kind.STEP: [[None, np.ones(1)]] * 2, Kind.GRAD_REDUCED: [[np.ones(8), None]] * 2}
        assert OneFactor({}).judge(step_of(rows, tensors=[tensor("w"), RATE])) is None


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_a_law_says_what_it_needs(law) -> None:
    assert set(law.needs) <= {field.name for field in dataclasses.fields(MonitorConfig)}
    assert law.sentence.endswith(".")
