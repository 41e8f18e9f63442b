"""How long ranks wait for one that is behind: copies are compared however far it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.alerts.across_ranks.test_across import DIFFERS, FIRING, PARAMS, REPLICATED, Job, flipped, places, told
from tests.alerts.series import rules
from trainermon.alerts.across_ranks import across


def checked(number: int, *, odd: bool) -> dict[int, list[float]]:
    """Return the elements of a rank that checks its copies on every 20th step; between two checks it shows none."""
    return {0: [1.0, 2.0, 3.0, 4.5 if odd else 4.0]} if number % 20 == 0 else {}


@pytest.mark.parametrize("lag", [17, 80, 5_000])
def test_copies_are_compared_however_far_ranks_drift_apart(tmp_path: Path, lag: int) -> None:
    job = Job(rules(tmp_path, DIFFERS), places(2), PARAMS, [REPLICATED] * 3)
    for rank in (0, 1):
        job.engine.meet(job.headers[rank])

    ahead = [alert for n in range(lag + 41) for alert in job.step(n, {0: checked(n, odd=False)})]
    behind = [alert for n in range(41) for alert in job.step(n, {1: checked(n, odd=n >= 20)})]

    assert ahead == []
    assert told(behind) == [("differs", FIRING, 0, 20), ("differs", FIRING, 1, 20)]


def test_what_is_open_is_compared_when_the_rank_that_is_behind_ends(tmp_path: Path) -> None:
    job = Job(rules(tmp_path, DIFFERS), places(3), PARAMS, [REPLICATED] * 3)
    job.engine.meet(job.headers[2])
    for number in range(100):
        rows = flipped(number, [1], at=50, num_ranks=3)
        assert job.step(number, {rank: rows[rank] for rank in (0, 1)}) == []

    found = job.engine.leave([2])

    assert told(found) == [("differs", FIRING, 0, 50), ("differs", FIRING, 1, 50)]
    assert job.engine.leave([2]) == []
    assert job.engine.leave([0, 1, 2]) == []


def test_memory_bounds_how_long_copies_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(across, "MAX_OPEN_BYTES", 100 * 2 * 3 * 8 * 8)  # steps × ranks × series × moments × bytes
    job = Job(rules(tmp_path, DIFFERS), places(3), PARAMS, [REPLICATED] * 3)
    job.engine.meet(job.headers[2])
    found = []
    for number in range(120):
        rows = flipped(number, [1], at=5, num_ranks=3)
        found += [alert.step for alert in job.step(number, {rank: rows[rank] for rank in (0, 1)})]
        assert bool(found) == (number >= 100)

    assert found == [5, 5]
