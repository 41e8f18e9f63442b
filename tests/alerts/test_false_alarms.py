"""The defaults on synthetic statistics; the full figures come from benchmarks/bench_rules.py, and so do these runs."""

from __future__ import annotations

import pytest

from benchmarks.bench_rules import delays, false_alarms

HELD_OUT = 101  # the defaults were tuned on small even seeds


@pytest.mark.parametrize("start", [False, True], ids=["steady", "quick start"])
def test_clean_run_gives_at_most_one_grouped_alert(start: bool) -> None:
    assert len(false_alarms(500, 2000, seed=HELD_OUT, start=start)) <= 1


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_tenfold_change_of_a_few_series_is_found_within_five_steps(factor: float) -> None:
    found = [delay for delay in delays(900, factor, seed=HELD_OUT) if delay is not None and delay <= 5]

    assert len(found) >= 19
