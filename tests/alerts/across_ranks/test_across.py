"""Ranks against each other: far from the peers, copies that differ, who holds up whom."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.alerts.series import INF, NAN, PATIENT, block, rules
from trainermon.alerts.across_ranks.across import MAX_OPEN_STEPS, OpenSteps
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import AlertRule, load_rules
from trainermon.core.journal import Header
from trainermon.core.values import Alert, AlertState, Coordinates, Kind, Placement, SeriesKey

FIRING, RESOLVED = AlertState.FIRING, AlertState.RESOLVED
LOSS = SeriesKey(Kind.LOSS, "loss")
DURATION = SeriesKey(Kind.STEP, "duration_seconds")
WAIT = SeriesKey(Kind.COMM, "dp.all_reduce", "wait_seconds")
SEQUENCE = SeriesKey(Kind.COMM, "dp", "sequence")
NORM = SeriesKey(Kind.STEP, "global_grad_norm")
REPLICATED = Placement(dtype="float32", shape=(4,), replicated_over=("dp",))

SPREAD = """
rules:
  - name: apart
    severity: warning
    on: {kind: [loss, grad_unreduced], statistic: STATISTIC}
    when: {spread: {score: 8, floor: 0.1}}
    for: 2
    keep: {steps: 2}
    summary: "{worst} {value}, the others {usual}"
"""
DIFFERS = """
rules:
  - name: differs
    severity: critical
    on: {kind: [param_origin, step, comm]}
    when: {differs: true}
    keep: {steps: 2}
    summary: "{k} of {n} on rank {rank}, worst {worst} ({value}, the others {usual})"
"""


def places(num_ranks: int, **axes: Sequence[int]) -> list[Coordinates]:
    """Return the coordinates of all ranks of a node; `dp` is the rank unless axes are given."""
    given_axes = axes or {"dp": range(num_ranks)}
    return [
        Coordinates(
            rank=rank,
            world_size=num_ranks,
            local_rank=rank,
            local_world_size=num_ranks,
            **{axis: values[rank] for axis, values in given_axes.items()},
        )
        for rank in range(num_ranks)
    ]


class Job:
    """All ranks of a node, which show the same series, with their rules."""

    def __init__(
        self, loaded: Sequence[AlertRule], at: Sequence[Coordinates], keys: Sequence[SeriesKey], placements: object = ()
    ) -> None:
        self.engine = RuleEngine(loaded)
        self.keys = list(keys)
        self.headers = [
            Header(
                run_id="run",
                attempt=1,
                coordinates=place,
                host="node",
                pid=1,
                started_s=0.0,
                series=tuple(keys),
                placements=tuple(placements),  # type: ignore[arg-type]
            )
            for place in at
        ]

    def step(
        self, number: int, rows: Mapping[int, Mapping[int, object]], *, order: Iterable[int] | None = None
    ) -> list[Alert]:
        """Let the ranks of `rows` show a step: by rank, by number of the series, elements."""
        found = []
        for rank in order or rows:
            found += self.engine.evaluate(self.headers[rank], self.keys, block(number, rows[rank]))
        return found

    def run(self, steps: Iterable[int], rows: object) -> list[Alert]:
        return [alert for number in steps for alert in self.step(number, rows(number))]  # type: ignore[operator]


def told(alerts: Sequence[Alert]) -> list[tuple[str, AlertState, int, int]]:
    return [(alert.rule, alert.state, alert.rank, alert.step) for alert in alerts]


# -- far from the peers ------------------------------------------------------------------------------------------------


def calm(number: int, *, num_ranks: int = 4, odd: Mapping[int, float] | None = None) -> dict[int, dict[int, float]]:
    random = np.random.default_rng(number)
    return {rank: {0: (odd or {}).get(rank, 1.0) * random.uniform(0.95, 1.05)} for rank in range(num_ranks)}


@pytest.mark.parametrize("factor", [5.0, 0.1])
@pytest.mark.parametrize("statistic", ["mean", "rms"])
def test_rank_far_from_its_peers_is_found_and_over_when_it_is_back(
    tmp_path: Path, statistic: str, factor: float
) -> None:
    job = Job(rules(tmp_path, SPREAD.replace("STATISTIC", statistic)), places(4), [LOSS])

    found = job.run(range(20), lambda n: calm(n, odd={2: factor} if 5 <= n < 10 else {}))

    assert told(found) == [("apart", FIRING, 2, 6), ("apart", RESOLVED, 2, 11)]
    assert (found[0].first_step, found[0].value) == (5, pytest.approx(factor, rel=0.1))
    assert found[0].baseline == pytest.approx(1.0, rel=0.1)


def test_ranks_that_move_together_are_quiet(tmp_path: Path) -> None:
    job = Job(rules(tmp_path, SPREAD.replace("STATISTIC", "rms")), places(4), [LOSS])

    assert job.run(range(100), lambda n: calm(n, odd=dict.fromkeys(range(4), 10.0 ** (n % 7)))) == []


def test_two_or_three_ranks_are_too_few_to_tell_who_is_right(tmp_path: Path) -> None:
    job = Job(rules(tmp_path, SPREAD.replace("STATISTIC", "rms")), places(3), [LOSS])

    assert job.run(range(20), lambda n: calm(n, num_ranks=3, odd={1: 100.0})) == []


def test_pipeline_stages_are_no_peers(tmp_path: Path) -> None:
    stages = places(8, dp=[0, 1, 2, 3] * 2, pp=[0] * 4 + [1] * 4)
    job = Job(rules(tmp_path, SPREAD.replace("STATISTIC", "rms")), stages, [SeriesKey(Kind.GRAD_UNREDUCED, "w")])

    quiet = job.run(range(10), lambda n: calm(n, num_ranks=8, odd=dict.fromkeys(range(4, 8), 1000.0)))
    found = job.run(range(10, 14), lambda n: calm(n, num_ranks=8, odd=dict.fromkeys(range(5, 8), 1000.0)))

    assert quiet == []
    assert told(found) == [("apart", FIRING, 4, 11)]


@pytest.mark.parametrize("bad", [NAN, INF, []])
def test_values_that_are_none_are_neither_judged_nor_compared_with(tmp_path: Path, bad: object) -> None:
    job = Job(rules(tmp_path, SPREAD.replace("STATISTIC", "rms")), places(6), [LOSS])

    def rows(number: int) -> dict[int, dict[int, object]]:
        return {**calm(number, num_ranks=6), 0: {0: bad}, 1: {0: 50.0}}  # type: ignore[dict-item]

    found = job.run(range(5), rows)

    assert told(found) == [("apart", FIRING, 1, 1)]


# -- copies that differ ------------------------------------------------------------------------------------------------

PARAMS = [SeriesKey(Kind.PARAM_ORIGIN, name) for name in ("a", "b", "c")]
WEIGHTS = {0: [1.0, -2.0, 0.5], 1: [0.25, 0.0, 3.0], 2: [4.0, 4.0, 1.0]}


def flipped(number: int, ranks: Sequence[int], *, at: int, num_ranks: int) -> dict[int, dict[int, list[float]]]:
    """Return the weights of all ranks, of which `ranks` hold one in whose last place a bit is flipped at step `at`."""
    wrong = {**WEIGHTS, 1: [0.25, 0.0, float(np.nextafter(3.0, 4.0))]}
    return {rank: wrong if number >= at and rank in ranks else WEIGHTS for rank in range(num_ranks)}


def test_one_flipped_bit_is_found_at_once_with_rank_and_parameter(tmp_path: Path) -> None:
    job = Job(rules(tmp_path, DIFFERS), places(4), PARAMS, [REPLICATED] * 3)

    found = job.run(range(10), lambda n: flipped(n, [2], at=7, num_ranks=4))

    assert told(found) == [("differs", FIRING, 2, 7)]
    assert [finding.series.name for finding in found[0].findings] == ["b"]
    assert found[0].message == "differs: 1 of 3 on rank 2, worst b (3.25, the others 3.25)"


def test_copies_that_are_equal_again_are_resolved(tmp_path: Path) -> None:
    job = Job(rules(tmp_path, DIFFERS), places(4), PARAMS, [REPLICATED] * 3)

    found = job.run(range(10), lambda n: flipped(n if n < 5 else 0, [3], at=3, num_ranks=4))

    assert told(found) == [("differs", FIRING, 3, 3), ("differs", RESOLVED, 3, 6)]


def test_of_two_copies_both_are_named_and_of_three_the_odd_one(tmp_path: Path) -> None:
    two = Job(rules(tmp_path, DIFFERS), places(2), PARAMS, [REPLICATED] * 3)
    three = Job(rules(tmp_path, DIFFERS), places(3), PARAMS, [REPLICATED] * 3)

    assert [alert.rank for alert in two.run(range(3), lambda n: flipped(n, [1], at=1, num_ranks=2))] == [0, 1]
    assert [alert.rank for alert in three.run(range(3), lambda n: flipped(n, [0, 2], at=1, num_ranks=3))] == [1]


def test_of_two_copies_that_still_differ_none_is_over(tmp_path: Path) -> None:
    norms = DIFFERS.replace("differs: true", "differs: {tolerance: 1e-6}").replace("comm]}", "comm], statistic: norm}")
    job = Job(rules(tmp_path, norms), places(2), PARAMS[:2], [REPLICATED] * 2)

    def drifted(number: int) -> dict[int, dict[int, float]]:
        """Rank 1 leaves first; later both tensors of rank 0 have gone as far, then one of them further."""
        ahead = {0: 1.0, 1: 2.0}
        if number < 2:
            return {0: ahead, 1: ahead}
        if number < 5:
            return {0: ahead, 1: {0: 1.5, 1: 2.5}}
        if number < 8:
            return {0: {0: 3.0, 1: 2.0}, 1: {0: 1.1, 1: 2.5}}
        return {0: {0: 1.5, 1: 2.5}, 1: {0: 1.5, 1: 2.5}}

    found = job.run(range(12), drifted)

    assert told(found)[:2] == [("differs", FIRING, 1, 2), ("differs", FIRING, 0, 5)]
    assert [(state, rank) for _, state, rank, _ in told(found) if state is RESOLVED] == [(RESOLVED, 0), (RESOLVED, 1)]
    assert {alert.step for alert in found if alert.state is RESOLVED} == {9}


@pytest.mark.parametrize(
    ("placement", "axes"),
    [
        (Placement(dtype="float32", shape=(8,), partitioned_over=("tp",), replicated_over=("dp",)), {"tp": [0, 1]}),
        (Placement(dtype="float32", shape=(8,), length=4, partitioned_over=("dp",)), {"dp": [0, 1]}),
        (Placement(dtype="float32", shape=(8,), replicated_over=("dp",)), {"pp": [0, 1]}),
        (None, {"dp": [0, 1]}),
    ],
    ids=["tensor-parallel shards", "sharded over data", "stages", "not known"],
)
def test_what_is_no_copy_is_not_compared(
    tmp_path: Path, placement: Placement | None, axes: dict[str, list[int]]
) -> None:
    job = Job(rules(tmp_path, DIFFERS), places(2, **axes), PARAMS, [placement] * 3)

    assert job.run(range(3), lambda n: flipped(n, [1], at=0, num_ranks=2)) == []


def test_copies_are_compared_within_their_tensor_parallel_place(tmp_path: Path) -> None:
    grid = places(8, dp=[0, 1, 2, 3] * 2, tp=[0] * 4 + [1] * 4)
    split = Placement(dtype="float32", shape=(8,), partitioned_over=("tp",), replicated_over=("dp",))
    job = Job(rules(tmp_path, DIFFERS), grid, PARAMS, [split] * 3)

    assert job.run(range(3), lambda n: flipped(n, [4, 5, 6, 7], at=0, num_ranks=8)) == []
    assert [alert.rank for alert in job.run(range(3, 6), lambda n: flipped(n, [4, 5, 7], at=0, num_ranks=8))] == [6]


def test_parameters_that_are_nan_on_all_ranks_are_equal(tmp_path: Path) -> None:
    job = Job(rules(tmp_path, DIFFERS), places(3), PARAMS, [REPLICATED] * 3)

    assert job.run(range(3), lambda n: {rank: {0: [NAN, 1.0], 1: [], 2: [INF]} for rank in range(3)}) == []
    assert [
        alert.rank for alert in job.run([3], lambda n: {0: {0: [NAN, 1.0]}, 1: {0: [1.0, 1.0]}, 2: {0: [NAN, 1.0]}})
    ] == [1]


def test_rank_without_the_series_is_left_out(tmp_path: Path) -> None:
    job = Job(rules(tmp_path, DIFFERS), places(3), PARAMS, [REPLICATED] * 3)

    assert job.run(range(5), lambda n: {0: WEIGHTS, 1: {0: WEIGHTS[0]}, 2: WEIGHTS}) == []


def test_numbers_of_the_step_and_collectives_of_a_group_must_agree(tmp_path: Path) -> None:
    grid = places(4, dp=[0, 1, 0, 1], pp=[0, 0, 1, 1])
    job = Job(rules(tmp_path, DIFFERS), grid, [NORM, SEQUENCE, SeriesKey(Kind.COMM, "pp", "sequence")])
    usual = {rank: {0: 1.5, 1: 10.0 + rank // 2, 2: float(rank)} for rank in range(4)}

    assert job.run(range(3), lambda n: usual) == []
    found = job.run(range(3, 5), lambda n: {**usual, 3: {0: 1.5, 1: 10.0, 2: 3.0}})
    assert [(alert.rank, alert.findings[0].series) for alert in found] == [(2, SEQUENCE), (3, SEQUENCE)]
    assert [alert.message.partition("worst ")[2] for alert in found] == [
        "dp.sequence (11, the others 10)",
        "dp.sequence (10, the others 11)",
    ]


def test_tolerance_forgives_the_last_digits(tmp_path: Path) -> None:
    loose = DIFFERS.replace("differs: true", "differs: {tolerance: 1e-6}").replace("comm]}", "comm], statistic: norm}")
    job = Job(rules(tmp_path, loose), places(3), [NORM])

    assert job.run(range(3), lambda n: {0: {0: 1.0}, 1: {0: 1.0 + 1e-9}, 2: {0: 1.0 - 1e-9}}) == []
    assert [alert.rank for alert in job.run([3], lambda n: {0: {0: 1.0}, 1: {0: 1.00001}, 2: {0: 1.0}})] == [1]


def test_mismatches_of_checksums_are_counted_by_rank() -> None:
    sums = [SeriesKey(Kind.CHECKSUM, name) for name in ("a", "b", "c")]
    job = Job([rule for rule in load_rules() if rule.name == "replica-divergence"], places(4), sums, [REPLICATED] * 3)
    assert job.run(range(3), lambda n: flipped(n, [], at=0, num_ranks=4)) == []

    found = job.run(range(3, 6), lambda n: flipped(n, [2], at=3, num_ranks=4))

    assert told(found) == [("replica-divergence", FIRING, 2, 3)]
    assert job.engine.checksum_mismatches == {0: 0, 1: 0, 2: 3, 3: 0}
    assert job.engine.checksum_comparisons == 6


# -- stragglers --------------------------------------------------------------------------------------------------------


def straggler_rule() -> list[AlertRule]:
    return [dataclasses.replace(rule, inhibits=()) for rule in load_rules() if rule.name == "straggler"]


class Synchronous:
    """A synchronous job: every rank works, then all wait for the slowest one; steps take as long on all of them."""

    def __init__(self, num_ranks: int, *, seed: int, noise: float = 0.05) -> None:
        self._random = np.random.default_rng(seed)
        self._noise = noise
        self.num_ranks = num_ranks

    def rows(self, slow: Mapping[int, float]) -> dict[int, dict[int, float]]:
        work_s = 0.3 * np.exp(self._noise * self._random.standard_t(4, self.num_ranks))
        work_s *= [slow.get(rank, 1.0) for rank in range(self.num_ranks)]
        whole_s = work_s.max() + 0.02
        return {rank: {0: whole_s, 1: whole_s - work_s[rank]} for rank in range(self.num_ranks)}


def test_rank_1_3_times_slower_is_named_within_20_steps_and_nobody_who_waits(tmp_path: Path) -> None:
    for seed in range(8):
        training, job = Synchronous(4, seed=seed), Job(straggler_rule(), places(4), [DURATION, WAIT])
        assert job.run(range(100), lambda n: training.rows({})) == []  # noqa: B023 - called at once

        found = job.run(range(100, 121), lambda n: training.rows({seed % 4: 1.3}))  # noqa: B023

        assert [(alert.rank, alert.state) for alert in found] == [(seed % 4, FIRING)], seed
        assert job.engine.stragglers == {seed % 4}
        assert job.engine.slowness[seed % 4] == pytest.approx(1.3, rel=0.15)
        assert found[0].message.startswith(f"straggler: rank {seed % 4} holds up the others: its own work takes 0.")


@pytest.mark.slow
def test_the_right_rank_is_named_in_495_of_500_trials() -> None:
    right = 0
    for seed in range(500):
        training, job = Synchronous(4, seed=seed), Job(straggler_rule(), places(4), [DURATION, WAIT])
        job.run(range(30), lambda n: training.rows({}))  # noqa: B023
        found = job.run(range(30, 50), lambda n: training.rows({seed % 4: 1.3}))  # noqa: B023
        right += [alert.rank for alert in found] == [seed % 4]

    assert right >= 495


def test_rank_that_was_always_a_little_faster_is_measured_against_itself_too() -> None:
    training, job = Synchronous(4, seed=1, noise=0.02), Job(straggler_rule(), places(4), [DURATION, WAIT])
    assert job.run(range(100), lambda n: training.rows({2: 0.8})) == []

    found = job.run(range(100, 121), lambda n: training.rows({2: 1.15}))

    assert told(found)[0][:3] == ("straggler", FIRING, 2)
    assert found[0].baseline == pytest.approx(0.8 * 0.3, rel=0.1)


def test_straggler_that_recovers_is_resolved() -> None:
    training, job = Synchronous(4, seed=2), Job(straggler_rule(), places(4), [DURATION, WAIT])
    found = job.run(range(200), lambda n: training.rows({0: 1.5 if 100 <= n < 130 else 1.0}))

    assert [(alert.rank, alert.state) for alert in found] == [(0, FIRING), (0, RESOLVED)]


def test_all_ranks_that_slow_down_together_are_no_stragglers() -> None:
    training, job = Synchronous(4, seed=3), Job(straggler_rule(), places(4), [DURATION, WAIT])

    assert job.run(range(200), lambda n: training.rows(dict.fromkeys(range(4), 3.0 if n > 100 else 1.0))) == []


def test_without_waits_ranks_of_a_synchronous_job_look_alike_and_nobody_is_named() -> None:
    training, job = Synchronous(4, seed=4), Job(straggler_rule(), places(4), [DURATION, WAIT])

    def rows(number: int) -> dict[int, dict[int, float]]:
        return {rank: {0: row[0]} for rank, row in training.rows({1: 2.0}).items()}

    assert job.run(range(100), rows) == []


def test_longer_pipeline_stage_is_no_straggler_but_a_slow_rank_of_it_is() -> None:
    stages = places(4, dp=[0, 1, 0, 1], pp=[0, 0, 1, 1])
    training, job = Synchronous(4, seed=5), Job(straggler_rule(), stages, [DURATION, WAIT])
    assert job.run(range(100), lambda n: training.rows({2: 2.0, 3: 2.0})) == []

    found = job.run(range(100, 121), lambda n: training.rows({2: 2.0, 3: 3.0}))

    assert [alert.rank for alert in found] == [3]


def test_checkpoints_of_one_rank_now_and_then_are_forgiven() -> None:
    training, job = Synchronous(4, seed=6), Job(straggler_rule(), places(4), [DURATION, WAIT])

    assert job.run(range(300), lambda n: training.rows({0: 20.0 if n % 50 == 0 else 1.0})) == []


def test_those_who_wait_are_not_told_of_while_the_straggler_is() -> None:
    training, job = Synchronous(2, seed=7, noise=0.01), Job(load_rules(), places(2), [DURATION, WAIT])
    assert job.run(range(150), lambda n: training.rows({})) == []

    found = job.run(range(150, 250), lambda n: training.rows({1: 1.5 + 0.1 * (n - 150)}))

    assert {(alert.rule, alert.rank) for alert in found} == {("straggler", 1)}
    assert {(alert.rule, alert.rank) for alert in job.engine.inhibited()} >= {("step-time-slow", 0)}


# -- which steps are complete, restarts --------------------------------------------------------------------------------


def test_steps_that_come_in_any_order_of_ranks_give_the_same_alerts(tmp_path: Path) -> None:
    expected = None
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        job = Job(rules(tmp_path, DIFFERS), places(4), PARAMS, [REPLICATED] * 3)
        found = []
        for number in range(10):
            found += job.step(number, flipped(number, [2], at=4, num_ranks=4), order=order)
        expected = expected or found
        assert found == expected


def test_rank_that_is_steps_behind_is_waited_for(tmp_path: Path) -> None:
    job = Job(rules(tmp_path, DIFFERS), places(3), PARAMS, [REPLICATED] * 3)
    for number in range(5):
        rows = flipped(number, [1], at=3, num_ranks=3)
        assert job.step(number, {rank: rows[rank] for rank in (0, 1)}) == []

    found = [alert for number in range(5) for alert in job.step(number, {2: WEIGHTS})]

    assert told(found) == [("differs", FIRING, 1, 3)]
    assert found[0].time_s == 1003.0


def test_rank_that_never_comes_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    job = Job(rules(tmp_path, DIFFERS), places(4), PARAMS, [REPLICATED] * 3)
    found = []
    for number in range(100):
        rows = flipped(number, [1], at=50, num_ranks=4)
        found += job.step(number, {rank: rows[rank] for rank in (0, 1, 2)})

    assert told(found) == [("differs", FIRING, 1, 50)]


@given(
    num_ranks=st.integers(1, 5),
    seed=st.integers(0, 10_000),
    lag=st.integers(0, MAX_OPEN_STEPS - 1),
)
@settings(PATIENT, max_examples=60)
def test_every_step_is_complete_once_and_in_order_however_ranks_take_turns(num_ranks: int, seed: int, lag: int) -> None:
    random = np.random.default_rng(seed)
    steps, done = OpenSteps(max_steps=MAX_OPEN_STEPS), []
    place = np.zeros(num_ranks, int)
    while (place < 40).any():
        able = np.flatnonzero((place < 40) & (place <= place.min() + lag))
        rank = int(random.choice(able))
        done += steps.add(int(place[rank]), rank, {}, num_ranks=num_ranks)
        place[rank] += 1

    assert [step for step, _ in done] == list(range(40))
    assert all(set(shown) == set(range(num_ranks)) for _, shown in done)


def test_rank_that_was_missing_is_waited_for_once_it_is_back() -> None:
    steps = OpenSteps(max_steps=MAX_OPEN_STEPS)
    for number in range(MAX_OPEN_STEPS + 5):
        steps.add(number, 0, {}, num_ranks=2)

    late = [steps.add(number, 1, {}, num_ranks=2) for number in (3, 4)]
    first, second = (steps.add(100, rank, {}, num_ranks=2) for rank in (0, 1))

    assert late == [[], []]
    assert (len(first), [set(shown) for _, shown in second]) == (0, [{0, 1}])


def test_new_attempt_ends_the_alert_and_compares_anew(tmp_path: Path) -> None:
    job = Job(rules(tmp_path, DIFFERS), places(3), PARAMS, [REPLICATED] * 3)
    job.run(range(5), lambda n: flipped(n, [1], at=3, num_ranks=3))
    job.headers = [dataclasses.replace(each, attempt=2) for each in job.headers]

    found = job.run(range(2, 6), lambda n: flipped(n, [1], at=4, num_ranks=3))

    assert [(alert.state, alert.attempt, alert.step) for alert in found] == [(RESOLVED, 1, 4), (FIRING, 2, 4)]


def test_restart_of_the_agent_keeps_id_and_end_of_an_alert(tmp_path: Path) -> None:
    loaded = rules(tmp_path, DIFFERS)
    whole = Job(loaded, places(3), PARAMS, [REPLICATED] * 3)

    def rows(number: int) -> dict[int, dict[int, list[float]]]:
        return flipped(number if number < 8 else 0, [1], at=3, num_ranks=3)

    expected = whole.run(range(12), rows)
    job = Job(loaded, places(3), PARAMS, [REPLICATED] * 3)
    job.engine.resume(expected[:1])
    for number in range(2, 6):
        for rank, shown in rows(number).items():
            job.engine.prime(job.headers[rank], job.keys, [block(number, shown)])

    found = job.run(range(6, 12), rows)

    assert [(alert.id, alert.state, alert.step) for alert in found] == [(expected[0].id, RESOLVED, 9)]
    assert found[0].step == expected[1].step
