from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.alerts.series import INF, NAN, PATIENT, block, feed, grad, header, rules
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.log import AlertLog
from trainermon.alerts.rules import load_rules
from trainermon.core.catalogue import GRADIENT_AT_STEP
from trainermon.core.values import Alert, AlertState, Kind, SeriesKey, Severity, StatBlock

FIRING, RESOLVED = AlertState.FIRING, AlertState.RESOLVED
LOSS = SeriesKey(Kind.LOSS, "loss")

SMALL = """
rules:
  - name: nonfinite
    severity: critical
    on: {kind: grad_reduced}
    when: {nonfinite: true}
    keep: {steps: 2}
    inhibits: ["*-spike"]
    summary: "{k} of {n} gradients at step {step} on rank {rank}, worst {worst} ({nans} NaN, {infs} Inf of {count})"
  - name: gradient-spike
    severity: warning
    on: {kind: grad_reduced, statistic: rms}
    when: {spike: {score: 8, window: 16, warmup: 8, adopt: 12}}
    for: 2
    keep: {steps: 2}
    summary: "{worst} {value}, usually {usual}, {times} times"
  - name: loss-spike
    severity: warning
    on: {kind: loss, statistic: mean}
    when: {spike: {score: 8, window: 16, warmup: 8, direction: up}}
    for: 2
    summary: "{value}"
"""


@pytest.fixture
def engine(tmp_path: Path) -> RuleEngine:
    return RuleEngine(rules(tmp_path, SMALL))


def calm(steps: range, num_series: int, *, level: float = 1.0) -> list[StatBlock]:
    """Return blocks in which every series varies by a few percent."""
    random = np.random.default_rng(steps.start)
    return [block(step, {i: level * random.uniform(0.9, 1.1) for i in range(num_series)}) for step in steps]


def summary(alerts: Sequence[Alert]) -> list[tuple[str, AlertState, int, int]]:
    return [(alert.rule, alert.state, alert.step, alert.num_series) for alert in alerts]


def test_example_from_the_defaults_reads_well() -> None:
    keys = [grad(f"h.{number}.weight") for number in range(148)]
    rows = {number: [NAN, NAN, INF, 1.0] for number in range(148)}

    (alert,) = RuleEngine(load_rules()).evaluate(header(), keys, block(12, rows))

    assert alert.message == (
        "gradient-nonfinite: NaN or Inf in 148 of 148 gradients at step 12 on rank 0, "
        "worst h.0.weight (2 NaN, 1 Inf of 4)"
    )
    assert (alert.severity, alert.state, alert.kind) == (Severity.FATAL, FIRING, Kind.GRAD_REDUCED)
    assert (alert.step, alert.first_step, alert.time_s) == (12, 12, 1012.0)
    assert (alert.value, alert.baseline, alert.num_series, len(alert.findings)) == (3.0, 0.0, 148, 20)


def test_one_alert_lists_its_series_worst_first(engine: RuleEngine) -> None:
    keys = [grad("a"), grad("b"), grad("c"), grad("d")]
    rows = {0: [NAN, 1.0, 1.0, 1.0], 1: [1.0], 2: [NAN, INF, 1.0], 3: [INF, 1.0]}

    (alert,) = engine.evaluate(header(rank=3), keys, block(0, rows))

    assert [finding.series.name for finding in alert.findings] == ["c", "d", "a"]
    assert alert.message == "nonfinite: 3 of 4 gradients at step 0 on rank 3, worst c (1 NaN, 1 Inf of 3)"


def test_spike_tells_value_usual_value_and_ratio(engine: RuleEngine) -> None:
    keys = [grad("a"), grad("b")]
    feed(engine, keys, calm(range(40), 2))

    found = feed(engine, keys, [block(40, {0: 1.0, 1: 50.0}), block(41, {0: 1.0, 1: 50.0})])

    (alert,) = found
    assert (alert.step, alert.first_step, alert.value) == (41, 40, 50.0)
    assert alert.baseline == pytest.approx(1.0, rel=0.1)
    assert alert.message.startswith("gradient-spike: b 50, usually ")
    assert engine.firing() == [alert]


def test_fault_on_rank_0_and_step_0_is_found(engine: RuleEngine) -> None:
    (alert,) = engine.evaluate(header(rank=0), [grad("a")], block(0, {0: NAN}))

    assert (alert.rank, alert.step, alert.first_step) == (0, 0, 0)


def test_series_without_elements_give_no_alert() -> None:
    keys = [grad("a"), LOSS, SeriesKey(Kind.ACTV, "m", "output.0"), SeriesKey(Kind.UPDATE, "a")]
    nothing: dict[int, Sequence[float]] = {number: [] for number in range(4)}

    assert feed(RuleEngine(load_rules()), keys, [block(step, nothing) for step in range(200)]) == []


def test_group_that_grows_is_reported_again_with_its_id(engine: RuleEngine) -> None:
    keys = [grad(name) for name in "abc"]

    found = feed(
        engine,
        keys,
        [
            block(0, {0: NAN, 1: 1.0, 2: 1.0}),
            block(1, {0: NAN, 1: 1.0, 2: 1.0}),
            block(2, {0: 1.0, 1: NAN, 2: NAN}),
            block(3, {0: 1.0, 1: NAN, 2: 1.0}),
            block(4, {0: 1.0, 1: 1.0, 2: 1.0}),
            block(5, {0: 1.0, 1: 1.0, 2: 1.0}),
        ],
    )

    assert summary(found) == [
        ("nonfinite", FIRING, 0, 1),
        ("nonfinite", FIRING, 2, 3),
        ("nonfinite", RESOLVED, 5, 3),
    ]
    assert len({alert.id for alert in found}) == 1
    assert found[-1].message == (
        "nonfinite: over at step 5 on rank 0, began at step 0; 3 of 3 series were concerned, worst a"
    )
    assert engine.firing() == []


def test_series_that_is_not_shown_neither_counts_nor_recovers(engine: RuleEngine) -> None:
    keys = [grad("a"), grad("b")]
    feed(engine, keys, calm(range(40), 2))

    found = feed(engine, keys, [block(40, {0: 1.0, 1: 50.0}), *(block(step, {0: 1.0}) for step in range(41, 60))])
    assert found == []
    assert [alert.first_step for alert in engine.pending()] == [40]

    found = feed(engine, keys, [block(60, {0: 1.0, 1: 50.0}), *(block(step, {0: 1.0}) for step in range(61, 90))])
    assert summary(found) == [("gradient-spike", FIRING, 60, 1)]
    assert [alert.rule for alert in engine.firing()] == ["gradient-spike"]


def test_series_that_appears_late_warms_up_by_itself(engine: RuleEngine) -> None:
    keys = [grad("a")]
    assert feed(engine, keys, calm(range(40), 1)) == []
    keys.append(grad("b"))

    assert feed(engine, keys, [block(40 + step, {1: 1e3 * 10.0**step}) for step in range(6)]) == []
    assert feed(engine, keys, calm(range(50, 90), 2)) == []
    assert len(feed(engine, keys, [block(90 + step, {0: 1.0, 1: 100.0}) for step in range(2)])) == 1


def test_step_that_was_seen_before_changes_nothing(engine: RuleEngine) -> None:
    first = feed(engine, [grad("a")], [block(5, {0: NAN})])

    assert len(first) == 1
    assert feed(engine, [grad("a")], [block(step, {0: 1.0}) for step in range(6)]) == []
    assert engine.firing() == first


def test_ranks_have_their_own_state(engine: RuleEngine) -> None:
    keys = [grad("a")]
    for each in calm(range(40), 1):
        assert engine.evaluate(header(0), keys, each) == []
    loud = calm(range(40, 60), 1, level=100.0)

    assert feed(engine, keys, loud[:5], rank=1) == []
    assert [alert.rank for alert in feed(engine, keys, loud[:5], rank=0)] == [0]


def test_new_attempt_ends_alerts_and_pending_ones_but_keeps_usual_ranges(engine: RuleEngine) -> None:
    keys = [grad("a"), LOSS]
    feed(engine, keys, calm(range(40), 2))
    on = feed(engine, keys, [block(40, {0: [1.0, NAN], 1: 1.0})])

    moved = [LOSS, grad("a")]  # the new attempt's table is in another order
    found = feed(engine, moved, [block(7, {0: 1.0, 1: 50.0})], attempt=1)

    assert summary(found) == [("nonfinite", RESOLVED, 40, 1)]
    assert (found[0].id, found[0].attempt) == (on[0].id, 0)
    assert found[0].message.endswith("(attempt 1 began)")
    assert [alert.rule for alert in engine.pending()] == ["gradient-spike"]
    (spike,) = feed(engine, moved, [block(8, {0: 1.0, 1: 50.0})], attempt=1)
    assert (spike.attempt, spike.first_step) == (1, 7)


def test_old_attempt_that_comes_late_is_ignored(engine: RuleEngine) -> None:
    feed(engine, [grad("a")], [block(3, {0: 1.0})], attempt=2)

    assert feed(engine, [grad("a")], [block(9, {0: NAN})], attempt=1) == []


def test_consequences_are_held_back_while_their_cause_is_on(engine: RuleEngine) -> None:
    keys = [grad("a"), grad("b"), LOSS]
    feed(engine, keys, calm(range(40), 3))

    during = feed(engine, keys, [block(step, {0: [NAN, 1.0], 1: 80.0, 2: 90.0}) for step in range(40, 45)])

    assert summary(during) == [("nonfinite", FIRING, 40, 1)]
    assert [alert.rule for alert in engine.firing()] == ["nonfinite"]
    assert [alert.rule for alert in engine.inhibited()] == ["gradient-spike", "loss-spike"]


def test_consequence_that_outlives_its_cause_is_reported_then(engine: RuleEngine) -> None:
    keys = [grad("a"), grad("b"), LOSS]
    feed(engine, keys, calm(range(40), 3))
    feed(engine, keys, [block(step, {0: [NAN, 1.0], 1: 80.0, 2: 1.0}) for step in range(40, 43)])

    after = feed(engine, keys, [block(step, {0: 1.0, 1: 80.0, 2: 1.0}) for step in range(43, 46)])

    assert summary(after) == [("nonfinite", RESOLVED, 44, 1), ("gradient-spike", FIRING, 44, 1)]
    assert after[1].first_step == 40


def test_consequence_that_ends_with_its_cause_is_never_reported(engine: RuleEngine) -> None:
    keys = [grad("a"), grad("b"), LOSS]
    feed(engine, keys, calm(range(40), 3))
    feed(engine, keys, [block(step, {0: [NAN, 1.0], 1: 80.0, 2: 1.0}) for step in range(40, 43)])

    after = feed(engine, keys, calm(range(43, 60), 3))

    assert summary(after) == [("nonfinite", RESOLVED, 44, 1)]


@pytest.mark.parametrize(
    ("own_step", "expected"), [(8, ["gradient-nonfinite", "gradient-nonfinite-local"]), (9, ["gradient-nonfinite"])]
)
def test_only_the_rank_whose_own_gradients_failed_first_is_called_an_origin(own_step: int, expected: list[str]) -> None:
    engine = RuleEngine(load_rules())
    keys = [grad("a"), SeriesKey(Kind.GRAD_UNREDUCED, "a")]

    found = feed(engine, keys, [block(step, {0: NAN, 1: NAN if step >= own_step else 1.0}) for step in range(8, 12)])

    assert [alert.rule for alert in found] == expected


@pytest.mark.parametrize(("reduced", "expected"), [(1.0, "gradient-nonfinite-at-step"), (NAN, "gradient-nonfinite")])
def test_gradient_that_the_script_spoilt_is_named_on_that_very_step(reduced: float, expected: str) -> None:
    engine = RuleEngine(load_rules())
    keys = [grad("a"), SeriesKey(Kind.STATE, "a", GRADIENT_AT_STEP), SeriesKey(Kind.PARAM_UPDATED, "a")]

    found = feed(engine, keys, [block(8, {0: 1.0, 1: 1.0, 2: 1.0}), block(9, {0: reduced, 1: NAN, 2: NAN})])

    assert [(alert.rule, alert.step) for alert in found] == [(expected, 9)]


def test_alert_that_was_on_before_its_cause_is_still_resolved(engine: RuleEngine) -> None:
    keys = [grad("a"), LOSS]
    feed(engine, keys, calm(range(40), 2))
    before = feed(engine, keys, [block(step, {0: 1.0, 1: 90.0}) for step in (40, 41)])

    after = feed(engine, keys, [block(step, {0: NAN, 1: 1.0}) for step in range(42, 50)])

    assert [alert.rule for alert in before] == ["loss-spike"]
    assert [(alert.rule, alert.state) for alert in after] == [("nonfinite", FIRING), ("loss-spike", RESOLVED)]


def test_lost_step_gives_one_clear_alert() -> None:
    engine = RuleEngine(load_rules())
    keys = [grad(f"h.{n}") for n in range(20)] + [SeriesKey(Kind.PARAM_UPDATED, f"h.{n}") for n in range(20)]
    keys += [SeriesKey(Kind.ACTV, f"h.{n}", "output.0") for n in range(20)]
    keys += [SeriesKey(Kind.UPDATE, f"h.{n}") for n in range(20)] + [LOSS, SeriesKey(Kind.STEP, "step_time")]
    assert feed(engine, keys, calm(range(150), len(keys))) == []

    poisoned = {number: [NAN, 3.0] if number % 2 else [100.0, 3.0] for number in range(len(keys))}
    found = feed(engine, keys, [block(step, poisoned) for step in range(150, 300)])

    assert [(alert.rule, alert.step) for alert in found] == [("gradient-nonfinite", 150)]


@pytest.mark.parametrize(
    ("kind", "slot", "rule"),
    [(Kind.PARAM_UPDATED, "", "parameter-nonfinite"), (Kind.ACTV, "output.0", "activation-nonfinite")],
)
def test_lost_step_gives_one_clear_alert_without_gradients_too(kind: Kind, slot: str, rule: str) -> None:
    engine = RuleEngine(load_rules())
    keys = [LOSS, SeriesKey(Kind.ACTV, "h.1", "output.0"), SeriesKey(kind, "h.0", slot)]
    feed(engine, keys, calm(range(150), 3))

    found = feed(engine, keys, [block(step, {0: NAN, 1: 500.0, 2: [NAN, 1.0]}) for step in range(150, 160)])

    assert [alert.rule for alert in found] == [rule]


def test_gradient_that_falls_tenfold_is_found_within_five_steps() -> None:
    engine, keys = RuleEngine(load_rules()), [grad("a")]
    feed(engine, keys, calm(range(150), 1))

    (alert,) = feed(engine, keys, calm(range(150, 155), 1, level=0.1))

    assert (alert.rule, alert.step, alert.first_step) == ("gradient-spike", 152, 150)


def test_spike_after_nan_and_recovery_is_found() -> None:
    engine, keys = RuleEngine(load_rules()), [grad("a")]
    feed(engine, keys, calm(range(150), 1))
    feed(engine, keys, [block(150, {0: NAN})])
    assert [alert.state for alert in feed(engine, keys, calm(range(151, 200), 1))] == [RESOLVED]

    (alert,) = feed(engine, keys, calm(range(200, 205), 1, level=10.0))

    assert (alert.rule, alert.step) == ("gradient-jump", 200)


@pytest.mark.parametrize(("num_bad", "rules"), [(9, []), (10, ["gradient-jump"])])
def test_a_single_step_counts_only_if_a_share_of_the_series_left_its_range(num_bad: int, rules: list[str]) -> None:
    engine, keys = RuleEngine(load_rules()), [grad(f"h.{n}") for n in range(20)]
    feed(engine, keys, calm(range(150), 20))

    found = feed(engine, keys, [block(150, {number: 10.0 if number < num_bad else 1.0 for number in range(20)})])

    assert [(alert.rule, alert.num_series) for alert in found] == [(rule, num_bad) for rule in rules]


def test_one_batch_with_a_much_higher_loss_is_found() -> None:
    engine, keys = RuleEngine(load_rules()), [LOSS]
    feed(engine, keys, calm(range(150), 1))

    assert feed(engine, keys, calm(range(150, 151), 1, level=1.4)) == []
    found = feed(engine, keys, calm(range(151, 152), 1, level=2.5))

    assert [alert.rule for alert in found] == ["loss-jump"]


def test_lasting_shift_is_reported_once(engine: RuleEngine) -> None:
    keys = [grad("a")]
    feed(engine, keys, calm(range(40), 1))

    found = feed(engine, keys, calm(range(40, 400), 1, level=100.0))

    assert [alert.state for alert in found] == [FIRING, RESOLVED]


def test_series_may_stand_in_any_order_in_a_block(engine: RuleEngine) -> None:
    keys = [grad(name) for name in "abcd"]

    (alert,) = engine.evaluate(header(), keys, block(0, {0: 1.0, 2: 1.0, 1: NAN, 3: 1.0}))
    (grown,) = engine.evaluate(header(), keys, block(1, {3: NAN, 0: 1.0}))

    assert [finding.series.name for finding in alert.findings] == ["b"]
    assert [finding.series.name for finding in grown.findings] == ["b", "d"]


def test_table_as_any_sequence_and_values_as_any_buffer(engine: RuleEngine) -> None:
    whole = block(0, {0: NAN, 1: 1.0})
    plain = StatBlock(
        step=0, time_s=0.0, series=np.asarray(whole.series).data, values=np.ascontiguousarray(whole.values).data
    )

    assert len(engine.evaluate(header(), (grad("a"), grad("b")), plain)) == 1


# -- restarts ----------------------------------------------------------------------------------------------------------


def story(seed: int, num_steps: int) -> list[StatBlock]:
    """Return blocks of three series, one of them at times out of sight, with NaN and spikes in between."""
    random = np.random.default_rng(seed)
    blocks = []
    for step in range(num_steps):
        rows: dict[int, Sequence[float] | float] = {}
        for number in range(3):
            if number == 2 and step % 7 < 3:
                continue
            value = float(np.exp(random.normal(0.0, 0.05)))
            phase = (step + 11 * number + seed) % 45
            if step > 30 and phase < 6:
                value *= 60.0
            rows[number] = [value, NAN] if step > 30 and phase in (20, 21) else value
        blocks.append(block(step, rows))
    return blocks


KEYS = [grad("a"), grad("b"), LOSS]


@given(seed=st.integers(0, 1000), at=st.integers(0, 139))
@settings(PATIENT, max_examples=30)
def test_restart_at_any_step_changes_neither_ids_nor_states(
    tmp_path_factory: pytest.TempPathFactory, seed: int, at: int
) -> None:
    loaded = rules(tmp_path_factory.mktemp("rules"), SMALL)
    blocks = story(seed, 140)
    whole = RuleEngine(loaded)
    expected = [alert for each in blocks for alert in whole.evaluate(header(), KEYS, each)]
    assert len(expected) > 4

    restarted = RuleEngine(loaded)
    restarted.prime(header(), KEYS, blocks[:at])
    found = [alert for each in blocks[at:] for alert in restarted.evaluate(header(), KEYS, each)]

    assert found == [alert for alert in expected if alert.step >= at]
    assert restarted.firing() == whole.firing()
    assert restarted.pending() == whole.pending()
    assert restarted.inhibited() == whole.inhibited()


@given(seed=st.integers(0, 1000), at=st.integers(40, 139), overlap=st.integers(0, 30))
@example(seed=28, at=42, overlap=1)  # an alert is on whose step comes after the last stored one
@settings(PATIENT, max_examples=20)
def test_log_holds_every_alert_once_however_often_records_are_evaluated(
    tmp_path_factory: pytest.TempPathFactory, seed: int, at: int, overlap: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    loaded, blocks = rules(folder, SMALL), story(seed, 140)
    log = AlertLog(folder / "whole.jsonl")
    for alert in feed(RuleEngine(loaded), KEYS, blocks):
        log.append(alert)
    expected = [(alert.id, alert.state) for alert in log.read()]

    path = folder / "alerts.jsonl"
    first = AlertLog(path)
    for alert in feed(RuleEngine(loaded), KEYS, blocks[:at]):
        first.append(alert)
    second, engine = AlertLog(path), RuleEngine(loaded)
    engine.resume(second.open_alerts())
    engine.prime(header(), KEYS, blocks[: at - overlap])
    for alert in feed(engine, KEYS, blocks[at - overlap :]):
        second.append(alert)

    assert [(alert.id, alert.state) for alert in second.read()] == expected


def test_alert_whose_begin_is_no_longer_known_keeps_its_id(engine: RuleEngine, tmp_path: Path) -> None:
    keys = [grad("a")]
    (on,) = feed(engine, keys, [block(step, {0: NAN}) for step in range(100)])

    restarted = RuleEngine(rules(tmp_path, SMALL))
    restarted.resume([on])
    restarted.prime(header(), keys, [block(step, {0: NAN}) for step in range(90, 100)])
    found = feed(restarted, keys, [block(step, {0: NAN if step < 110 else 1.0}) for step in range(100, 120)])

    assert [(alert.id, alert.state, alert.first_step, alert.step) for alert in found] == [(on.id, RESOLVED, 0, 111)]


def test_alert_that_ended_unseen_is_resolved_at_once(engine: RuleEngine, tmp_path: Path) -> None:
    keys = [grad("a")]
    (on,) = feed(engine, keys, [block(0, {0: NAN})])

    for primed in ([], [block(step, {0: NAN if step < 3 else 1.0}) for step in range(50)]):
        restarted = RuleEngine(rules(tmp_path, SMALL))
        restarted.resume([on])
        restarted.prime(header(), keys, primed)
        found = feed(restarted, keys, [block(step, {0: 1.0}) for step in (100, 101)])

        assert [(alert.id, alert.state) for alert in found] == [(on.id, RESOLVED)]


def test_history_covers_the_longest_window(engine: RuleEngine) -> None:
    assert engine.history_steps >= 16 + 12


def test_windows_are_full_after_priming_with_the_history(engine: RuleEngine, tmp_path: Path) -> None:
    blocks = calm(range(300), 3)
    feed(engine, KEYS, blocks)
    primed = RuleEngine(rules(tmp_path, SMALL))
    primed.prime(header(), KEYS, blocks[-engine.history_steps :])

    spike = [block(300 + step, dict.fromkeys(range(3), 60.0)) for step in range(2)]
    expected, found = feed(engine, KEYS, spike), feed(primed, KEYS, spike)

    assert [alert.id for alert in found] == [alert.id for alert in expected]
    for one, other in zip(found, expected, strict=True):
        assert math.isclose(one.baseline, other.baseline, rel_tol=0.1)
