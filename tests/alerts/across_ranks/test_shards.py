"""What is dead: by the whole of a tensor, however it is sharded, and only if it ever lived."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.alerts.across_ranks.test_across import Job, places, told
from tests.alerts.series import rules
from trainermon.alerts.rules import load_rules
from trainermon.core.values import AlertState, Kind, Placement, SeriesKey

FIRING = AlertState.FIRING
WEIGHT = SeriesKey(Kind.GRAD_REDUCED, "wpe.weight")
OUTPUT = SeriesKey(Kind.ACTV, "block.0.EncDecAttention", "output.1")
SHARD = Placement(dtype="float32", shape=(8, 2), length=8, partitioned_over=("dp",))
WHOLE = Placement(dtype="float32", shape=(8, 2), replicated_over=("dp",))
DEAD = """
rules:
  - name: dead
    severity: warning
    on: {kind: [grad_reduced, actv]}
    when: {dead: {zero_ratio: 0.75, steps: 5, lived: LIVED}}
    keep: {steps: 1}
    summary: "{worst} {value}"
"""
ALIVE, ZERO = [1.0, 2.0, 0.5, 3.0], [0.0, 0.0, 0.0, -0.0]


def job(tmp_path: Path, key: SeriesKey, placement: Placement | None, *, ranks: int = 2, lived: int = 10) -> Job:
    return Job(rules(tmp_path, DEAD.replace("LIVED", str(lived))), places(ranks), [key], [placement])


def test_shard_whose_rows_are_never_used_is_no_dead_parameter(tmp_path: Path) -> None:
    found = job(tmp_path, WEIGHT, SHARD, lived=0).run(range(60), lambda n: {0: {0: ALIVE}, 1: {0: ZERO}})

    assert found == []


def test_rows_that_are_used_now_and_then_are_not_dead_in_between(tmp_path: Path) -> None:
    alone = job(tmp_path, WEIGHT, SHARD, ranks=1)

    assert alone.run(range(120), lambda n: {0: {0: ALIVE if n % 9 == 0 else ZERO}}) == []


def test_sharded_parameter_that_dies_is_found_on_all_ranks_that_hold_a_part(tmp_path: Path) -> None:
    def rows(step: int) -> dict[int, dict[int, list[float]]]:
        held = ALIVE if step < 20 else ZERO
        return {0: {0: held}, 1: {0: held}, 2: {0: []}}

    found = job(tmp_path, WEIGHT, SHARD, ranks=3).run(range(40), rows)

    assert told(found) == [("dead", FIRING, 0, 24), ("dead", FIRING, 1, 24)]
    assert found[0].first_step == 20


def test_what_was_zero_from_the_start_is_dead_only_where_that_is_asked_for(tmp_path: Path) -> None:
    bias = lambda n: {0: {0: ZERO}}  # noqa: E731 - position bias of a cross attention: zeros by design

    assert job(tmp_path, OUTPUT, None, ranks=1).run(range(60), bias) == []
    assert told(job(tmp_path, OUTPUT, None, ranks=1, lived=0).run(range(60), bias)) == [("dead", FIRING, 0, 4)]


@pytest.mark.parametrize("placement", [WHOLE, None], ids=["copies", "not known"])
def test_what_is_no_shard_is_judged_by_itself(tmp_path: Path, placement: Placement | None) -> None:
    found = job(tmp_path, WEIGHT, placement).run(
        range(40), lambda n: {0: {0: ALIVE}, 1: {0: ALIVE if n < 20 else ZERO}}
    )

    assert told(found) == [("dead", FIRING, 1, 24)]


def test_it_lives_again(tmp_path: Path) -> None:
    alone = job(tmp_path, WEIGHT, None, ranks=1)

    found = alone.run(range(60), lambda n: {0: {0: ZERO if 20 <= n < 40 else ALIVE}})

    assert [(alert.state, alert.step) for alert in found] == [(FIRING, 24), (AlertState.RESOLVED, 40)]


def test_default_rules_find_half_of_stacked_experts_without_gradient() -> None:
    stacked = SeriesKey(Kind.GRAD_REDUCED, "layers.0.mlp.experts.gate_up_proj")
    chosen = [rule for rule in load_rules() if rule.name == "expert-gradient-dead"]

    found = Job(chosen, places(1), [stacked]).run(
        range(60), lambda n: {0: {0: ALIVE if n < 30 else [0.0, 0.0, 1.0, 2.0]}}
    )

    assert told(found) == [("expert-gradient-dead", FIRING, 0, 49)]
