"""A short soak: every exporter, servers that come and go, and in the end each step once in every form."""

import math

import pytest

from benchmarks.bench_soak import NEEDED, run, slope_per_10_000

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.extras]

STEPS = 3000


def test_nothing_is_lost_doubled_or_kept(tmp_path):
    soak = run(tmp_path, STEPS, 150.0, up_s=3.0, down_s=3.0)

    assert soak.num_outages >= 2
    assert soak.wrong == {form: {} for form in NEEDED}
    assert "InfluxDB takes points again" in soak.log
    rank, agent = soak.samples["rank"], soak.samples["agent"]
    assert slope_per_10_000(rank, "rss_mb") < 20
    for what in ("files", "threads"):
        assert rank[-1][what] <= rank[len(rank) // 2][what]
        assert agent[-1][what] <= agent[len(agent) // 2][what] + 3  # connections of the page's and exporters' clients


def test_the_slope_is_that_of_the_second_half():
    samples = [{"step": 1000.0 * k, "rss_mb": 100.0 - k if k < 5 else 50.0 + 0.2 * k} for k in range(10)]

    assert slope_per_10_000(samples, "rss_mb") == pytest.approx(2.0)
    assert math.isnan(slope_per_10_000(samples[:1], "rss_mb"))
