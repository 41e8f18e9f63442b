"""A whole agent beside ranks on GPUs of a stand-in driver: what it stores, shows and serves of them."""

from __future__ import annotations

import itertools
import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.agent.accelerators.stand_in import environment, gpu
from tests.agent.nodes import wait_for
from trainermon.exporters.store.store import open_run

pytestmark = pytest.mark.extras


def about(run, rank, **accelerator):
    (run.output / "ranks").mkdir(exist_ok=True)
    (run.output / "ranks" / f"rank{rank:05d}.json").write_text(
        json.dumps({"pid": 1, "accelerator": {"type": "cuda", "index": rank, "visible": "1,0", **accelerator}})
    )


def metrics(run):
    """Return the samples of `/metrics` about accelerators, by name and rank."""
    families = text_string_to_metric_families(run.get("metrics").decode())
    samples = [sample for family in families for sample in family.samples]
    return {(s.name.removeprefix("trainermon_accelerator_"), s.labels["rank"]): s for s in samples if "accel" in s.name}


@pytest.fixture
def gpus(make_run, tmp_path, monkeypatch):
    """A run of two ranks on two GPUs, and its ranks, which have begun."""
    told = tmp_path / "told"
    told.write_text(gpu("GPU-a", utilization=90, watt=400.0) + gpu("GPU-b", utilization=30, watt=200.0, reasons=0x40))
    for name, value in environment(told).items():
        monkeypatch.setenv(name, value)
    run = make_run(world_size=2)
    settings = json.loads(run.settings)
    run.settings = json.dumps(settings | {"agent": settings["agent"] | {"accelerators_s": 0.05}})
    for rank in range(2):
        about(run, rank)
    return run, [run.rank(0, start_agent=True), run.rank(1)]


def test_readings_are_served_shown_and_stored(gpus):
    run, ranks = gpus
    steps = itertools.count()

    def after_a_step(look):
        number = next(steps)
        for rank in ranks:
            rank.steps(number, 1)
        return look()

    def served():
        found = metrics(run)
        return len([name for name, _ in found if name == "utilization_ratio"]) == 2 and found

    def shown():
        lines = run.get_json("api/lines?names=accelerator_utilization,accelerator_power_watts")["series"]
        return all(lines.values()) and {name: [v for v in line if v is not None] for name, line in lines.items()}

    found = wait_for(lambda: after_a_step(served), "both accelerators in /metrics")
    assert found["utilization_ratio", "0"].value == 0.3  # CUDA_VISIBLE_DEVICES is 1,0
    assert found["utilization_ratio", "1"].value == 0.9
    assert found["info", "0"].labels == {"run": "run", "rank": "0", "uuid": "GPU-b", "model": "H100"}
    assert (found["throttled", "0"].value, found["throttled", "1"].value) == (1, 0)
    lines = wait_for(lambda: after_a_step(shown), "lines on the page")
    assert (lines["accelerator_power_watts"][-1], lines["accelerator_utilization"][-1]) == (600, 0.3)
    assert "accelerator_utilization" in run.get_json("api/run")["rank_quantities"]
    for rank in ranks:
        rank.end()
    wait_for(lambda: not run.status() or run.status()["state"] == "finished", "the end of the run")
    with open_run(run.output) as store:
        power = "SELECT DISTINCT rank, mean FROM stats WHERE name = 'accelerator_power_watts' ORDER BY rank"
        assert store.sql(power).fetchall() == [(0, 200.0), (1, 400.0)]


def test_ranks_on_no_accelerator_start_nothing(make_run):
    run = make_run()
    rank = run.rank(start_agent=True)
    rank.steps(0, 3)
    wait_for(lambda: run.get_json("api/run")["step"] == 2, "step 2")
    assert metrics(run) == {}
    assert "accelerator" not in (run.node_dir / "agent.log").read_text()
