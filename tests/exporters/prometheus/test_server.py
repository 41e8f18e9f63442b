"""A real Prometheus finds an agent by the discovery file, scrapes it, and answers with the values that went in."""

import time
from pathlib import Path

import numpy as np
import pytest

from tests.exporters.expositions import comm
from tests.exporters.prometheus_servers import Agent, Prometheus, prometheus, serving
from tests.exporters.runs import LOSS, STEP_TIME
from tests.server_programs import wait_until
from trainermon.core.values import Kind, SeriesKey, Severity
from trainermon.exporters.discovery import clear_targets, write_targets
from trainermon.exporters.prometheus.exposition import Exposition

pytestmark = pytest.mark.server

WEIGHT = SeriesKey(Kind.GRAD_REDUCED, 'h.0."w"\\')
WAIT = comm("dp_cp.all_reduce", "wait_seconds")


def test_prometheus_reads_back_what_went_in_and_forgets_what_has_gone(tmp_path: Path):
    """One long test: Prometheus takes five seconds to find a target, whatever it is told."""
    exposition = Exposition("run", rules={"loss_spike": Severity.WARNING})
    with serving(exposition) as agent, prometheus(tmp_path) as server:
        check(agent, server, tmp_path / "discovery" / "run.json")


def check(agent: Agent, prometheus: Prometheus, targets: Path) -> None:
    step = int(time.time() - 1.7e9)  # blocks are dated 1.7e9 + step, and exemplars have to be recent
    for rank in range(2):
        weight = np.array([0.1 + rank, 1e-30])
        agent.update(
            rank,
            {LOSS: np.array([1 / 3 + rank]), STEP_TIME: np.array([0.2]), WEIGHT: weight, WAIT: np.array([0.002])},
            step,
        )

    write_targets(targets, agent.address, {"host": "node-1"})
    wait_until(lambda: prometheus.query("trainermon_step"), what="first scrape")
    assert_values_and_labels_come_back(prometheus, step)
    assert_exemplars_come_back(prometheus, step)
    assert "application/openmetrics-text" in agent.accepted[0]

    agent.update(
        0, {LOSS: np.array([np.nan]), STEP_TIME: np.array([0.2]), WEIGHT: np.ones(2), WAIT: np.array([9.0])}, step + 1
    )
    agent.wait_for_a_whole_scrape()
    losses = prometheus.query("trainermon_loss")
    assert np.isnan(losses["0"]), "a loss that is not finite is NaN"
    assert np.isfinite(losses["1"])
    assert prometheus.query('trainermon_nonfinite_elements_total{kind="loss"}') == {"0": 1, "1": 0}

    agent.remove_rank(1)
    agent.wait_for_a_whole_scrape()
    assert set(prometheus.query("trainermon_step")) == {"0"}, "gone at the next scrape, not after five minutes"
    assert set(prometheus.query("trainermon_gradient_rms")) == {"0"}

    clear_targets(targets)
    wait_until(lambda: not prometheus.query("trainermon_step or up"), what="the target gone")


def assert_values_and_labels_come_back(prometheus: Prometheus, step: int) -> None:
    assert prometheus.query("trainermon_step") == {"0": step, "1": step}
    assert prometheus.query('trainermon_loss{host="node-1",run="run"}') == {"0": 1 / 3, "1": 1 / 3 + 1}
    rms = {str(rank): float(np.sqrt(np.mean(np.square([0.1 + rank, 1e-30])))) for rank in range(2)}
    assert prometheus.query('trainermon_gradient_rms{module="h.0.\\"w\\"\\\\"}') == pytest.approx(rms, rel=1e-15)
    assert prometheus.query("sum by (rank) (trainermon_nonfinite_elements_total)") == {"0": 0, "1": 0}
    assert prometheus.query('trainermon_alerts_firing{rule="loss_spike"}') == {"": 0}
    assert prometheus.query("count by (rank) (trainermon_rank_info)") == {"0": 1, "1": 1}
    assert prometheus.query('trainermon_run_info{attempt="1",tp_size="1"}') == {"": 1}
    joined = "trainermon_loss * on (run, rank) group_left (dp, tp, pp) trainermon_rank_info"
    assert prometheus.query(joined) == {"0": 1 / 3, "1": 1 / 3 + 1}
    assert prometheus.query('count({run="run"}) == bool scalar(scrape_samples_scraped)') == {"": 1}


def assert_exemplars_come_back(prometheus: Prometheus, step: int) -> None:
    quantile = prometheus.query("histogram_quantile(0.5, sum by (le) (trainermon_step_duration_seconds_bucket))")
    exemplars = prometheus.exemplars("trainermon_step_duration_seconds_bucket")

    assert 0.1 <= quantile[""] <= 0.25
    assert {exemplar["labels"]["step"] for exemplar in exemplars} == {str(step)}
    waits = prometheus.exemplars("trainermon_collective_wait_duration_seconds_bucket")
    assert {(exemplar["labels"]["step"], exemplar["value"]) for exemplar in waits} == {(str(step), "0.002")}
    assert prometheus.query('trainermon_collective_wait_duration_seconds_count{purpose="dp_cp"}') == {"": 2}
