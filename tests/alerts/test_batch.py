"""Steps of several ranks that are evaluated together give what they give one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.alerts.series import INF, NAN, PATIENT, block, feed, grad, header, rules
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import AlertRule, load_rules
from trainermon.core.values import Alert, Kind, SeriesKey, StatBlock

KEYS = [SeriesKey(Kind.LOSS, "loss"), *(grad(name) for name in "abc"), SeriesKey(Kind.UPDATE, "a")]
CONDITIONS = {
    "nonfinite": ("{kind: grad_reduced}", "{nonfinite: true}, inhibits: [spike]"),
    "spike": (
        "{kind: [grad_reduced, update], statistic: rms}",
        "{spike: {score: 8, window: 16, warmup: 8, adopt: 10}}, for: 2",
    ),
    "half": ("{kind: grad_reduced, statistic: rms}", "{threshold: {above: 9}}, share: 0.5"),
    "mean": ("{kind: loss, statistic: mean}", "{threshold: {above: 2, over: 4}}, keep: {steps: 3}"),
    "largest": ("{kind: update, statistic: absmax}", "{exceeds: {times: 4, warmup: 8}}"),
    "stands": ("{kind: loss, statistic: mean}", "{flat: {relative_change: 1e-3, steps: 3}}"),
    "still": ("{kind: loss, statistic: mean}", "{not_decreasing: {steps: 5}}"),
    "drift": (
        "{kind: grad_reduced, statistic: rms}",
        "{drift: {factor: 2, steps: 3, levels: 2, warmup: 1, score: 3}}",
    ),
}
TEXT = "rules:\n" + "".join(
    f'  - {{name: {name}, severity: info, on: {on}, when: {when}, summary: "{{k}} {{worst}} {{value}} {{usual}}"}}\n'
    for name, (on, when) in CONDITIONS.items()
)


def run(num_ranks: int, seed: int) -> Iterator[list[tuple[int, int, StatBlock]]]:
    """Yield rounds of `(rank, attempt, block)` of a training with faults, gaps, and a restart that ranks see apart."""
    random = np.random.default_rng(seed)
    begins = random.integers(20, 40, num_ranks)
    faulty = random.integers(0, num_ranks)
    for step in range(60):
        shown = []
        for rank in random.permutation(num_ranks).tolist():
            own = np.exp(random.normal(0.0, 0.1, (len(KEYS), 2)))
            if rank == faulty and step % 13 < 4:
                own[random.integers(0, len(KEYS))] = random.choice([NAN, INF, 40.0, 0.0, 12.0])
            ids = [number for number in range(len(KEYS)) if random.random() > 0.1]
            if ids and random.random() > 0.1:
                attempt = int(step >= begins[rank])
                shown.append((rank, attempt, block(step, {number: own[number] for number in ids})))
        yield shown


def together(steps: Sequence[tuple[int, int, StatBlock]], engine: RuleEngine) -> list[Alert]:
    for rank, attempt, step in steps:
        engine.take(header(rank, attempt), KEYS, step)
    return engine.settle()


@pytest.fixture(scope="module", params=["of every kind", "default"])
def chosen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[AlertRule, ...]:
    return load_rules() if request.param == "default" else rules(tmp_path_factory.mktemp("rules"), TEXT)


@given(num_ranks=st.integers(1, 5), seed=st.integers(0, 10_000))
@settings(PATIENT, max_examples=15)
def test_steps_taken_together_give_the_alerts_of_each_by_itself(
    chosen: tuple[AlertRule, ...], num_ranks: int, seed: int
) -> None:
    one_by_one, at_once = RuleEngine(chosen), RuleEngine(chosen)
    for shown in run(num_ranks, seed):
        expected = [
            alert for rank, attempt, step in shown for alert in one_by_one.evaluate(header(rank, attempt), KEYS, step)
        ]
        assert repr(together(shown, at_once)) == repr(expected)  # a NaN is not equal to itself
    assert repr(at_once.firing() + at_once.pending()) == repr(one_by_one.firing() + one_by_one.pending())


def test_a_new_attempt_of_one_rank_leaves_what_is_counted_of_the_others(tmp_path: Path) -> None:
    engine = RuleEngine(rules(tmp_path, TEXT))
    for step in range(3):  # the fourth value completes the mean of four
        together([(rank, 0, block(step, {0: 5.0 + step})) for rank in (0, 1)], engine)

    changed = together([(0, 1, block(3, {0: 9.0})), (1, 0, block(3, {0: 9.0}))], engine)

    assert [(alert.rule, alert.rank) for alert in changed] == [("mean", 1)]


def test_a_damaged_block_of_one_rank_costs_the_others_nothing(tmp_path: Path) -> None:
    engine = RuleEngine(rules(tmp_path, TEXT))
    engine.take(header(0), KEYS, block(0, {1: [NAN]}))
    with pytest.raises(IndexError):
        engine.take(header(1), KEYS, block(0, {99: [1.0]}))
    engine.take(header(2), KEYS, block(0, {1: [INF]}))

    assert [(alert.rule, alert.rank) for alert in engine.settle()] == [("nonfinite", 0), ("nonfinite", 2)]
    assert [alert.rank for alert in feed(engine, KEYS, [block(1, {1: [NAN]})], rank=1)] == [1]  # it goes on


def test_a_damaged_block_that_begins_an_attempt_loses_no_end_of_an_alert(tmp_path: Path) -> None:
    engine = RuleEngine(rules(tmp_path, TEXT))
    feed(engine, KEYS, [block(0, {1: [NAN]})])
    with pytest.raises(IndexError):
        engine.evaluate(header(0, 1), KEYS, block(0, {99: [1.0]}))

    changed = engine.evaluate(header(0, 1), KEYS, block(1, {1: [1.0]}))

    assert [(alert.rule, alert.attempt, alert.state.value) for alert in changed] == [("nonfinite", 0, "resolved")]


def test_a_second_step_of_a_rank_must_wait(tmp_path: Path) -> None:
    engine = RuleEngine(rules(tmp_path, TEXT))
    engine.take(header(3), KEYS, block(0, {1: [1.0]}))

    with pytest.raises(ValueError, match="second step of rank 3"):
        engine.take(header(3), KEYS, block(1, {1: [1.0]}))
