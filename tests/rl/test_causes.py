"""Causes of made-up faults, over seeds that the limits were not chosen on; and that clean steps raise nothing."""

import dataclasses

import numpy as np
import pytest

from tests.rl.policies import FAULTS, SEQUENCES, Step, normal
from trainermon.rl.causes import Limits
from trainermon.rl.judging import judge
from trainermon.rl.tokens import pair, read_side
from trainermon.rl.values import VERDICT_OF, Cause, Floor, Sampling, Verdict, WeightCheck, WeightDifference

SEEDS = range(1000, 1010)


@pytest.mark.parametrize(("fault", "cause"), FAULTS.items())
def test_the_cause_of_a_fault_is_named(fault, cause):
    reports = [Step(seed, fault).report() for seed in SEEDS]

    assert [str(report.causes[0].cause) for report in reports] == [cause] * len(SEEDS)
    expected = VERDICT_OF.get(Cause(cause), Verdict.POLICY_DIFFERS)
    assert {report.verdict for report in reports} == {expected}


@pytest.mark.parametrize("fault", ["padding of its own", "padding by the end token", "a prompt that counts"])
def test_padding_is_found_without_ids(fault):
    assert {str(Step(seed, fault).report(with_ids=False).causes[0].cause) for seed in SEEDS} == {"padding"}


@pytest.mark.parametrize("noise", [0.0, 0.002, 0.02, 0.05])
def test_clean_steps_raise_nothing(noise):
    reports = [Step(seed, noise=noise).report() for seed in range(2000, 2025)]

    assert [report.causes for report in reports] == [()] * len(reports)
    assert {report.verdict for report in reports} <= {Verdict.CONSISTENT, Verdict.NOISE}


def test_a_policy_that_has_become_nearly_certain_raises_nothing():
    """Ratios then differ from 1 in a few tokens only, and so do their errors: 8 standard errors mean nothing."""
    random = np.random.default_rng(0)
    for _ in range(30):
        rollout = -random.exponential(1e-6, (128, 30))
        train = rollout - (random.random((128, 30)) < 0.02) * random.exponential(1e-3, (128, 30))
        tokens = pair(read_side(rollout), read_side(train))
        known = random.random(128) < 0.5

        report = judge(
            0, tokens, floor=Floor(mean_abs=0.02, source="dtype"), sampling=Sampling(), limits=Limits(),
            known_before=known,
        )  # fmt: skip

        assert report.causes == ()


TABLE = Floor(mean_abs=0.06, source="dtype")


@pytest.mark.parametrize("fault", ["routing", "one engine"])
def test_what_needs_no_floor_is_found_below_it(fault):
    floor = dataclasses.replace(TABLE, mean_abs=0.3)
    reports = [Step(seed, fault, noise=0.002).report(floor=floor) for seed in SEEDS]

    assert all(
        max(part.mean_abs for part in report.engines or [report.measures]) < 3 * floor.mean_abs for report in reports
    )
    assert [str(report.causes[0].cause) if report.causes else "" for report in reports] == [fault] * len(SEEDS)


def test_a_cache_that_is_stale_is_found_below_the_floor_by_the_prompts_that_were_known():
    for seed in SEEDS:
        step, known = Step(seed, "stale cache", noise=0.002), np.arange(SEQUENCES) % 2 == 0
        noise = np.random.default_rng(seed).normal(0, 0.003, step.train.shape)
        step.train = np.where(known[:, None], step.train, step.rollout + noise)

        size = np.abs(step.train - step.rollout)[known].mean()

        report = step.report(floor=dataclasses.replace(TABLE, mean_abs=2 * size), known=known)

        assert [str(cause.cause) for cause in report.causes] == ["stale cache"]
        assert step.report(floor=TABLE, known=~known).causes == ()
        assert step.report(floor=dataclasses.replace(TABLE, mean_abs=10 * size), known=known).causes == ()


def test_sequences_that_are_nearly_certain_do_not_accuse_the_engine_of_the_others():
    """Rounding moves uncertain tokens further: an engine that has all uncertain prompts is no worse for it."""
    for seed in SEEDS:
        random, certain = np.random.default_rng(seed), np.arange(SEQUENCES) % 4 != 2
        doubt = np.where(certain[:, None], 0.02, 0.6) * random.uniform(0.5, 1.5, (SEQUENCES, 40))
        train = np.log1p(-doubt)
        tokens = pair(read_side(train + 0.01 * doubt * random.normal(size=doubt.shape)), read_side(train))

        report = judge(
            0, tokens, floor=TABLE, sampling=Sampling(), limits=Limits(),
            engines=[("abcd"[n % 4], 1) for n in range(SEQUENCES)],
        )  # fmt: skip

        assert report.causes == ()


@pytest.mark.parametrize("known", [None, np.zeros(SEQUENCES, bool)])
def test_where_nothing_can_be_stale_the_context_is_another(known):
    for seed in SEEDS:
        step = Step(seed, "stale cache")
        step.engines = [("a", 0 if known is None else 3)] * SEQUENCES

        (found,) = step.report(known=known).causes

        assert str(found.cause) == "other context"
        assert "no cache can be stale" in found.evidence


def test_what_a_table_hides_is_said():
    equal = WeightCheck(version=1, engines=("a",), equal=3)
    step = Step(1, noise=0.002)

    reports = [step.report(floor=TABLE, weights=weights) for weights in (None, equal)]

    assert [report.verdict for report in reports] == [Verdict.NOISE] * 2
    assert all(
        report.sentence.endswith("a fault that keeps the mean below 0.18 may not be seen.") for report in reports
    )
    assert ", and the weights were not compared; " in reports[0].sentence
    assert step.report(weights=equal).verdict is Verdict.CONSISTENT
    unchecked = step.report()
    assert unchecked.verdict is Verdict.CONSISTENT
    assert ", and the weights were not compared; " in unchecked.sentence


KNOWN, NEW = np.ones(SEQUENCES, bool), np.zeros(SEQUENCES, bool)


@pytest.mark.parametrize(
    ("known", "version", "factor", "is_consistent"),
    [
        (None, 1, 0.9, True),
        (None, 1, 1.5, False),
        (KNOWN, 1, 1.5, False),
        (NEW, 1, 1.5, True),
        (None, 0, 1.5, True),
    ],
)
def test_equal_weights_alone_make_nothing_above_rounding_consistent(known, version, factor, is_consistent):
    step = Step(1)
    step.engines = [("a", version)] * SEQUENCES
    measured = step.report().measures.mean_abs

    report = step.report(
        known=known,
        weights=WeightCheck(version=version, engines=("a",), equal=3),
        floor=Floor(mean_abs=measured / factor, source="measured"),
    )

    assert report.causes == ()
    assert report.verdict is (Verdict.CONSISTENT if is_consistent else Verdict.NOISE)
    assert ("a cache of the engine may hold older ones" in report.sentence) is not is_consistent


@pytest.mark.parametrize(("share", "factor", "causes"), [(0.2, 3.5, ["routing"]), (0.03, 3.5, []), (0.2, 1.9, [])])
def test_other_experts_are_named_below_the_floor_where_they_add_a_quarter_of_it(share, factor, causes):
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        differ = random.random((SEQUENCES, 40)) < share
        train = np.log(random.uniform(0.05, 0.6, differ.shape))
        noise = random.normal(0, 0.1, differ.shape) * np.where(differ, factor, 1.0)
        tokens = pair(read_side(train - noise, experts=differ.astype(int)), read_side(train, experts=differ * 0))

        report = judge(0, tokens, floor=TABLE, sampling=Sampling(temperature=0), limits=Limits())

        assert report.measures.mean_abs < 3 * TABLE.mean_abs
        assert [str(cause.cause) for cause in report.causes] == causes


def test_the_temperature_is_stated():
    step = Step(1, "temperature forgotten")

    (found,) = step.report().causes

    said = float(found.evidence.split("temperature near ")[1].split(";")[0])
    assert said == pytest.approx(step.temperature, abs=0.12)


def test_the_kept_mass_is_stated():
    step = Step(1, "top_p")

    (found,) = step.report().causes

    kept = float(found.evidence.split("renormalised over ")[1].split("%")[0]) / 100
    assert kept == pytest.approx(step.top_p, abs=0.04)


def test_few_sequences_leave_the_mean_ratio_out_and_say_so():
    step = Step(5, "top_p")
    for name in ("rollout", "train", "mask", "ids", "experts"):
        setattr(step, name, getattr(step, name)[:20])
    step.engines = step.engines[:20]

    report = step.report()

    assert "too few sequences for the mean ratio: 20, expected 64" in report.notes
    assert str(report.causes[0].cause) != "truncated support"


def test_the_worst_tokens_are_the_worst():
    step = Step(3, "old weights")

    report = step.report()

    size = np.abs(step.train - step.rollout)[step.mask]
    assert [abs(token.train - token.rollout) for token in report.worst] == sorted(size)[::-1][:20]
    first = report.worst[0]
    assert step.ids[first.sequence][first.position] == first.id
    assert tuple(step.ids[first.sequence][max(0, first.position - 8) : first.position]) == first.before


def test_positions_and_histogram_hold_every_token():
    report = Step(4).report()

    assert sum(part.tokens for part in report.positions) == sum(report.histogram) == report.measures.tokens
    assert [(part.first, part.last) for part in report.positions] == [(0, 7), (8, 15), (16, 31), (32, 63)]


def test_a_greedy_engine_is_not_held_to_a_mean_ratio():
    """The likeliest of noisy logits is likelier there than in the trainer: a mean ratio below 1 that is no error."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(SEQUENCES, 40, 50))
    engine = normal(logits + 0.02 * random.normal(size=logits.shape))
    rollout = engine.max(-1)
    train = np.take_along_axis(normal(logits), engine.argmax(-1)[..., None], -1)[..., 0]
    reports = [
        judge(
            0, pair(read_side(rollout), read_side(train)), floor=Floor(mean_abs=0.02, source="measured"),
            sampling=Sampling(temperature=temperature), limits=Limits(ratio_z=3, ratio_difference=0),
        )
        for temperature in (0.0, 1.0)
    ]  # fmt: skip

    assert (reports[0].causes, str(reports[1].causes[0].cause)) == ((), "unexplained")
    assert "the engine is greedy: nothing was sampled, and the mean ratio says nothing" in reports[0].notes


@pytest.mark.parametrize(
    ("equal", "said"),
    [
        (0, ", and the weights could not be compared; "),
        (2, ", and 2 of 3 weights are known to be equal (the order within rows was not checked); "),
    ],
)
def test_weights_of_another_type_are_no_cause(equal, said):
    names = ("a", "b", "c")[equal:]
    check = WeightCheck(version=1, engines=("a",), equal=equal, uncompared=names, uncompared_types=("float32",))

    report = Step(1).report(weights=check)

    assert report.causes == ()
    assert said in report.sentence
    assert report.notes[-1] == check.advice


def test_weights_of_which_only_sums_were_compared_are_not_called_equal():
    check = WeightCheck(version=1, engines=("a",), equal=3, unordered=("a.k_proj", "a.v_proj"))

    report = Step(1).report(weights=check)

    assert report.causes == ()
    assert ", and the weights have equal sums; the order within 2 of them was not checked; " in report.sentence
    assert report.notes[-1] == check.advice


def test_that_nothing_was_sent_is_said():
    report = Step(1).report(weights=WeightCheck(version=4, engines=("a",), equal=0))

    assert str(report.causes[0].cause) == "weights differ"
    assert report.causes[0].evidence == "as version 4 no tensor was sent"


def test_an_engine_that_is_a_version_ahead_of_its_counter_is_said_to_be():
    differing = tuple(
        WeightDifference(name=name, engine="vllm", found="already those of version 1", version=1) for name in "abc"
    )
    report = Step(1, "old weights").report(
        weights=WeightCheck(version=0, engines=("vllm",), equal=0, differing=differing)
    )

    (found,) = [each for each in report.causes if each.cause is Cause.WEIGHTS_DIFFER]
    assert found.evidence == "vllm should have version 0, and all 3 tensors that differ are those of version 1"
    assert "counter" in found.advice


def test_one_stale_tensor_among_those_as_sent_is_named_and_no_counter_is_blamed():
    stale = WeightDifference(name="h.weight", engine="e0", found="still those of version 0", version=0)

    report = Step(1, "old weights").report(weights=WeightCheck(version=5, engines=("e0",), equal=6, differing=(stale,)))

    (found,) = [each for each in report.causes if each.cause is Cause.WEIGHTS_DIFFER]
    assert found.evidence == (
        "of version 5, 1 of 7 tensors is not in the engine as it was sent: h.weight (e0: still those of version 0)"
    )
    assert "counter" not in found.advice


@pytest.mark.parametrize("value", [-np.inf, np.nan])
@pytest.mark.parametrize("side", ["rollout", "train"])
def test_log_probabilities_that_are_not_finite_are_a_cause(value, side):
    step = Step(1)
    values = np.array(getattr(step, side), np.float64)
    values[:2] = value
    setattr(step, side, values)

    report = step.report()

    assert (report.verdict, str(report.causes[0].cause)) == (Verdict.BOOKKEEPING, "non-finite")
    assert f"in {'the rollout' if side == 'rollout' else 'the trainer'};" in report.causes[0].evidence


def test_equal_weights_leave_numerics():
    equal = WeightCheck(version=1, engines=("a",), equal=3)
    in_part = dataclasses.replace(equal, uncompared=("b",), uncompared_types=("float32",))
    step = Step(1, "old weights")
    tokens = pair(read_side(step.rollout, mask=step.mask), read_side(step.train, mask=step.mask))

    for weights, cause in ((equal, "numerics"), (in_part, "unexplained"), (None, "unexplained")):
        report = judge(
            0, tokens, floor=Floor(mean_abs=0.02, source="measured"), sampling=Sampling(), limits=Limits(),
            weights=weights,
        )  # fmt: skip

        assert (str(report.causes[0].cause), report.verdict) == (cause, Verdict.POLICY_DIFFERS)


def test_equal_weights_of_an_engine_that_is_behind_are_not_those_of_the_trainer():
    equal = WeightCheck(version=1, engines=("a",), equal=3)
    step = Step(1, "old weights")

    (found,) = step.report(weights=equal, version_lag=1).causes

    assert str(found.cause) == "unexplained"
    assert "the oldest engine is 1 version behind what was sent" in found.evidence
    assert "ahead of the engine" in found.advice
    sound = Step(1).report(weights=equal, version_lag=2).sentence
    assert (
        "the weights are equal (the order within rows was not checked), and the oldest engine is 2 versions behind"
        in sound
    )


def test_equal_weights_of_one_engine_are_not_those_of_another():
    equal = WeightCheck(version=3, engines=("a",), equal=3)
    step = Step(1, noise=0.002)
    step.engines = [("a" if number % 2 else "b", 3) for number in range(SEQUENCES)]

    one, both = (step.report(floor=TABLE, weights=dataclasses.replace(equal, engines=tuple(of))) for of in ("a", "ab"))

    assert ", and the weights of b were not compared; " in one.sentence
    assert ", and the weights are equal (the order within rows was not checked); " in both.sentence


def test_the_worst_sequences_are_the_worst():
    step = Step(3, "old weights")

    found = step.report().sequences

    size = np.abs(step.train - step.rollout)
    means = [row[kept].mean() for row, kept in zip(size, step.mask, strict=True)]
    assert [part.mean_abs for part in found] == pytest.approx(sorted(means)[::-1][:8])
    for part in found:
        kept = step.mask[part.sequence]
        row = size[part.sequence][kept]
        assert part.tokens == len(row)
        assert part.log_ratio == pytest.approx((step.train - step.rollout)[part.sequence][kept].sum())
        assert part.first_diverging == next((n for n, one in enumerate(row) if one > 0.2), None)
