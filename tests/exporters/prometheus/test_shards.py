"""Many agents shared by several real Prometheus, as docs/deploy/prometheus says: rules still see every rank."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.exporters.prometheus_servers import Prometheus, serving
from tests.exporters.runs import LOSS, STEP_TIME
from tests.ports import free_port
from tests.server_programs import find_program, running, wait_until
from trainermon.core.values import Kind, SeriesKey
from trainermon.exporters.discovery import write_targets
from trainermon.exporters.prometheus.exposition import Exposition

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[3]
CONFIGURATIONS = ROOT / "docs/deploy/prometheus"
RULES = ROOT / "trainermon/alerts/generated/prometheus_rules.yaml"
NUM_AGENTS, NUM_SHARDS = 6, 2
WEIGHT = SeriesKey(Kind.GRAD_REDUCED, "h.0.weight")


@contextlib.contextmanager
def started(folder, configuration, *arguments):
    folder.mkdir()
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(configuration))
    port = free_port()
    command = [
        find_program("prometheus"),
        f"--config.file={path}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        *arguments,
    ]
    server = Prometheus(port)
    with running(command, log=folder / "prometheus.log", ready=server.ready):
        yield server


def of_all():
    """The shipped configuration, evaluated every second, without what is not there."""
    plain = yaml.safe_load((CONFIGURATIONS / "all.yml").read_text())
    plain["global"] = {"evaluation_interval": "1s"}
    plain["rule_files"] = [str(RULES)]
    del plain["alerting"], plain["scrape_configs"]
    return plain


def of_shard(number, discovery, all_url):
    """The shipped configuration, for two shards that scrape every second."""
    plain = yaml.safe_load((CONFIGURATIONS / "shard.yml").read_text())
    plain["global"] = {"scrape_interval": "1s"}
    (scrape,), (write,) = plain["scrape_configs"], plain["remote_write"]
    scrape["file_sd_configs"] = [{"files": [f"{discovery}/*.json"]}]
    scrape["relabel_configs"][0]["modulus"] = NUM_SHARDS
    scrape["relabel_configs"][1]["regex"] = str(number)
    write["url"] = f"{all_url}/api/v1/write"
    return plain


def scraped_by(server):
    with urllib.request.urlopen(f"{server.url}/api/v1/targets?state=active", timeout=900) as answer:
        return {target["labels"]["instance"] for target in json.load(answer)["data"]["activeTargets"]}


@contextlib.contextmanager
def agents_in(discovery):
    """Agents of one rank each, whose loss is its number."""
    discovery.mkdir()
    with contextlib.ExitStack() as stack:
        agents = [stack.enter_context(serving(Exposition("run"))) for _ in range(NUM_AGENTS)]
        for rank, agent in enumerate(agents):
            tensors = {LOSS: np.array([float(rank)]), STEP_TIME: np.array([0.2]), WEIGHT: np.ones(2)}
            agent.update(rank, tensors, step=3)
            write_targets(discovery / f"{rank}.json", agent.address, {"host": f"node{rank}"})
        yield agents


def test_shards_divide_the_agents_and_rules_see_all_ranks(tmp_path):
    discovery = tmp_path / "discovery"
    with contextlib.ExitStack() as stack:
        agents = stack.enter_context(agents_in(discovery))
        everything = stack.enter_context(started(tmp_path / "all", of_all(), "--web.enable-remote-write-receiver"))
        shards = [
            stack.enter_context(started(tmp_path / f"shard{number}", of_shard(number, discovery, everything.url)))
            for number in range(NUM_SHARDS)
        ]
        ranks = {str(rank): float(rank) for rank in range(NUM_AGENTS)}
        wait_until(lambda: everything.query("trainermon_loss") == ranks, what="every rank at the one that has all")
        recorded = statistics.fmean(ranks.values())
        wait_until(lambda: everything.query("run:trainermon_loss:avg") == {"": recorded}, what="the recorded mean")

        addresses = [scraped_by(shard) for shard in shards]
        assert set.union(*addresses) == {agent.address for agent in agents}
        assert sum(map(len, addresses)) == NUM_AGENTS
        assert everything.query('count({module!=""})') == {}
        modules = [shard.query("trainermon_gradient_rms") for shard in shards]
        assert {rank for found in modules for rank in found} == set(ranks)
        assert everything.query('count(up{job="trainermon"} == 1)') == {"": NUM_AGENTS}


def test_promtool_accepts_the_files_as_they_are():
    for name in ("shard.yml", "all.yml"):
        command = [find_program("promtool"), "check", "config", "--syntax-only", str(CONFIGURATIONS / name)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
