"""Where there is no majority: which of few ranks is far from the others, which of two copies was changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.alerts.across_ranks.test_across import (
    DIFFERS,
    FIRING,
    LOSS,
    PARAMS,
    REPLICATED,
    SEQUENCE,
    SPREAD,
    Job,
    calm,
    places,
    told,
)
from tests.alerts.series import rules

FEW = SPREAD.replace("STATISTIC", "mean").replace("floor: 0.1", "floor: 0.1, ranks: 2")


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_of_few_ranks_the_one_that_moved_is_named_once_their_usual_distance_is_known(
    tmp_path: Path, num_ranks: int
) -> None:
    job = Job(rules(tmp_path, FEW), places(num_ranks), [LOSS])

    def rows(step: int) -> dict[int, dict[int, float]]:
        others = dict.fromkeys(range(num_ranks), 1.3 if step >= 100 else 1.0)  # a bad rank spoils the weights of all
        return calm(step, num_ranks=num_ranks, odd={**others, 1: 8.0} if step >= 100 else others)

    found = job.run(range(120), rows)

    assert told(found) == [("apart", FIRING, 1, 101)]
    assert found[0].baseline == pytest.approx(1.3, rel=0.1)


def test_of_two_ranks_that_were_always_apart_none_is_named(tmp_path: Path) -> None:
    job = Job(rules(tmp_path, FEW), places(2), [LOSS])

    assert job.run(range(200), lambda n: calm(n, num_ranks=2, odd={0: 2.0})) == []


def test_of_two_ranks_that_move_apart_alike_both_are_named(tmp_path: Path) -> None:
    job = Job(rules(tmp_path, FEW), places(2), [LOSS])

    found = job.run(range(120), lambda n: calm(n, num_ranks=2, odd={0: 4.0, 1: -2.0} if n >= 100 else {}))

    assert told(found) == [("apart", FIRING, 0, 101), ("apart", FIRING, 1, 101)]


@pytest.mark.parametrize(
    ("counts", "named"),
    [
        ([14.0, 15.0], {0: 15.0}),
        ([15.0, 14.0], {1: 15.0}),
        ([15.0, 15.0, 16.0], {2: 15.0}),
        ([4.0, 4.0, 5.0, 5.0], {0: 5.0, 1: 5.0}),
    ],
)
def test_of_counts_the_minority_is_named_and_on_a_tie_those_that_are_behind(
    tmp_path: Path, counts: list[float], named: dict[int, float]
) -> None:
    text = DIFFERS.replace("{differs: true}", "{differs: {fewest: true}}")
    job = Job(rules(tmp_path, text), places(len(counts)), [SEQUENCE])

    found = job.run(range(2), lambda n: {rank: {0: count} for rank, count in enumerate(counts)})

    assert {alert.rank: alert.baseline for alert in found} == named


NORMS = DIFFERS.replace("kind: [param_origin, step, comm]", "kind: param_origin, statistic: norm").replace(
    "{differs: true}", "{differs: {tolerance: 1e-6}}"
)


@pytest.mark.parametrize(("moved", "named"), [({1: 1.1}, [1]), ({0: 0.9}, [0]), ({0: 1.1, 1: 0.9}, [0, 1])])
def test_of_two_norms_the_one_is_named_that_left_what_both_had(
    tmp_path: Path, moved: dict[int, float], named: list[int]
) -> None:
    job = Job(rules(tmp_path, NORMS), places(2), PARAMS[:1], [REPLICATED])

    def rows(step: int) -> dict[int, dict[int, float]]:
        trained = 3.0 + 0.001 * step
        return {rank: {0: trained * (moved.get(rank, 1.0) if step >= 10 else 1.0)} for rank in range(2)}

    assert [alert.rank for alert in job.run(range(12), rows)] == named
