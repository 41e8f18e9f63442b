"""One recorded run, fed to every exporter, and read back from the real server or file: the numbers are equal.

What they must be equal to are moments that numpy takes of whole tensors. All numbers are float64 from end to end and
must be the same to the last bit, but for TensorBoard's event files, which hold float32.
"""

import contextlib
import csv
import math
import re
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.exporters import recorded_run
from tests.exporters.influx_servers import influxdb
from tests.exporters.prometheus_servers import prometheus, serving
from tests.exporters.recorded_run import (
    BAD_STEP,
    FEATURE,
    GRADIENTS,
    GROUPS,
    KEYS,
    PARAMETERS,
    commit,
    header,
    tensors_of,
)
from tests.exporters.runs import LOSS
from tests.server_programs import find_program, wait_until
from trainermon.core.config import InfluxDBConfig
from trainermon.core.metrics import METRICS
from trainermon.exporters.discovery import write_targets
from trainermon.exporters.export import ExportSettings, make_exporter
from trainermon.exporters.prometheus.exposition import Exposition
from trainermon.exporters.store.store import open_run

pytestmark = pytest.mark.server

STEPS = range(6)
RANKS = (0, 1)
MODULES = (*GRADIENTS, *PARAMETERS)


def rms(tensor):
    finite = tensor[np.isfinite(tensor)]
    return float(np.sqrt(np.square(finite).sum() / finite.size))


def expected():
    """Return every number by what it is, rank and step; what is not finite is not there."""
    found = {}
    for rank in RANKS:
        for step in STEPS:
            tensors = tensors_of(rank, step)
            numbers = {(key.kind.value, key.name): rms(tensors[key]) for key in MODULES}
            numbers |= {("nonfinite", kind): 0.0 for kind in ("grad_reduced", "param_origin", "loss")}
            numbers["feature", FEATURE.name] = float(tensors[FEATURE].sum() / tensors[FEATURE].size)
            numbers["loss", ""] = tensors[LOSS].item()
            numbers |= {("collectives", group): float(step) for group in GROUPS}
            if (rank, step) == (1, BAD_STEP):
                del numbers["loss", ""]
                numbers |= {("nonfinite", "grad_reduced"): 2.0, ("nonfinite", "loss"): 1.0}
            found |= {(*what, rank, step): value for what, value in numbers.items()}
    return found


def only(numbers, *kinds):
    return {key: value for key, value in numbers.items() if key[0] in kinds}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """The run in the store and in both kinds of files."""
    folder = tmp_path_factory.mktemp("run")
    settings = ExportSettings(run_dir=folder, ops=("rms", "nans"), ndigits=17)
    for name in ("csv", "tensorboard"):
        with contextlib.closing(make_exporter(name, settings)) as exporter:
            for step in STEPS:
                for rank in RANKS:
                    exporter.write(header(rank), recorded_run.block(rank, step))
    for first in (0, 2, 4):
        commit(folder / "nodes" / "here" / "segments", range(first, first + 2))
    return folder


def test_store(run_dir):
    with open_run(run_dir) as connection:
        rows = connection.execute("SELECT kind, name, slot, rank, step, rms, mean, nonfinite FROM stats").fetchall()

    found, nonfinite = {}, {}
    for kind, name, slot, rank, step, root, mean, bad in rows:
        if kind in {"grad_reduced", "param_origin"}:
            found[kind, name, rank, step] = root
        elif kind == "feature" or (kind == "comm" and slot == "sequence"):
            found["feature" if kind == "feature" else "collectives", name, rank, step] = mean
        elif kind == "loss" and mean is not None:
            found["loss", "", rank, step] = mean
        if kind in {"grad_reduced", "param_origin", "loss"}:
            nonfinite["nonfinite", kind, rank, step] = nonfinite.get(("nonfinite", kind, rank, step), 0.0) + bad
    assert found | nonfinite == expected()


def test_csv(run_dir):
    found = {}
    for path in run_dir.glob("csv/*/*.csv"):
        kind = path.name.rpartition("_")[0]
        rank = int(path.parent.name.partition("-rank")[2].partition("-")[0])
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if kind in {"grad_reduced", "param_origin"}:
                    found[kind, row["name"], rank, int(row["step"])] = float(row["rms"])

    assert found == only(expected(), "grad_reduced", "param_origin")


def test_tensorboard(run_dir):
    found = {}
    for rank in RANKS:
        for kind in ("grad_reduced", "param_origin"):
            events = EventAccumulator(str(run_dir / "tensorboard" / f"rank{rank}" / kind), {"scalars": 0}).Reload()
            for tag in events.Tags()["scalars"]:
                name, _, statistic = tag.removeprefix("vp0:").rpartition("/")
                if statistic == "rms":
                    found |= {(kind, name, rank, event.step): event.value for event in events.Scalars(tag)}

    truth = only(expected(), "grad_reduced", "param_origin")
    assert found == {key: float(np.float32(value)) for key, value in truth.items()}


def test_influxdb(run_dir, tmp_path):
    with influxdb(tmp_path / "server") as server:
        config = InfluxDBConfig(url=server.url, api="v1")
        node = run_dir / "nodes" / "here"
        exporter = make_exporter(
            "influxdb", ExportSettings(run_dir=run_dir, node_dir=node, run_id="r", influxdb=config)
        )
        exporter.send(threading.Event())
        exporter.close()

        found = {}
        for measurement, field, tag, what in (
            ("trainermon_grad_reduced", "rms", "module", "grad_reduced"),
            ("trainermon_param_origin", "rms", "module", "param_origin"),
            ("trainermon_feature", "mean", "module", "feature"),
            ("trainermon_collective", "collectives", "purpose", "collectives"),
            ("trainermon_nonfinite_elements", "value", "kind", "nonfinite"),
            ("trainermon_step", "loss", "", "loss"),
        ):
            tags = ", ".join(filter(None, ("rank", tag)))
            for row in server.query(f"SELECT {field}, step FROM {measurement} GROUP BY {tags}"):
                if row[field] is not None:
                    found[what, row.get(tag, ""), int(row["rank"]), row["step"]] = row[field]
        unanswered = [query for query in documented("influxql") if not server.query(query)]
    assert unanswered == []
    assert {key: value for key, value in found.items() if key in expected() or key[0] != "nonfinite"} == expected()


def test_prometheus(tmp_path):
    exposition = Exposition("run")
    with serving(exposition) as agent, prometheus(tmp_path) as server:
        write_targets(tmp_path / "discovery" / "run.json", agent.address)
        for step in STEPS:
            with agent.lock:
                for rank in RANKS:
                    exposition.update(header(rank), KEYS, recorded_run.block(rank, step))
            if step == 0:
                wait_until(lambda: server.query("trainermon_step"), what="first scrape")
            agent.wait_for_a_whole_scrape()
        assert read_history(server) == expected()


def read_history(server):
    """Return what Prometheus has recorded, by the step that was scraped together with it."""
    told = [
        (what, labels.get(label, ""), labels["rank"], time, value)
        for metric, label, what in (
            ("trainermon_gradient_rms", "module", "grad_reduced"),
            ("trainermon_parameter_rms", "module", "param_origin"),
            ("trainermon_feature_mean", "module", "feature"),
            ("trainermon_collectives_total", "purpose", "collectives"),
            ("trainermon_nonfinite_elements_total", "kind", "nonfinite"),
            ("trainermon_loss", "", "loss"),
        )
        for labels, samples in server.history(metric)
        for time, value in samples
        if not math.isnan(value)  # a loss that is not finite, which other servers do not take
    ]
    step_at = {  # asked for last: the server goes on scraping
        (labels["rank"], time): int(step)
        for labels, samples in server.history("trainermon_step")
        for time, step in samples
    }
    found = {(what, label, int(rank), step_at[rank, time]): value for what, label, rank, time, value in told}
    for (what, kind, rank, step), total in sorted(found.items(), reverse=True):  # of a counter, what the step added
        if what == "nonfinite" and step:
            found[what, kind, rank, step] = total - found[what, kind, rank, step - 1]
    return {key: value for key, value in found.items() if key in expected() or key[0] != "nonfinite"}


def documented(language):
    """Return the queries of a language in docs/exporters.md."""
    text = (Path(__file__).parents[3] / "docs" / "exporters.md").read_text(encoding="utf-8")
    if language == "promql":
        rows = text.partition("## Prometheus")[2].partition("## InfluxDB")[0].splitlines()
        cells = [row.split("|")[2] for row in rows if row.startswith("| ") and "query |" not in row]
        return [query for cell in cells for query in re.findall(r"`([^`]+)`", cell)]
    section = text.partition("## InfluxDB" if language == "influxql" else "## The store")[2].partition("\n## ")[0]
    return re.search(r"```sql\n(.*?)```", section, re.DOTALL)[1].strip().splitlines()


def test_documented_queries_of_prometheus_are_right(tmp_path):
    queries = documented("promql")
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "documented", "rules": rules}]}))

    checked = subprocess.run(
        [find_program("promtool"), "check", "rules", tmp_path / "rules.yml"], capture_output=True, text=True
    )

    assert checked.returncode == 0, checked.stdout + checked.stderr
    names = {name for query in queries for name in re.findall(r"\btrainermon_\w+", query)}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in names} <= set(METRICS)
    assert len(queries) >= 14


def test_documented_queries_of_the_store_answer(run_dir):
    for query in documented("sql"):
        with open_run(run_dir) as connection:
            assert connection.execute(query).fetchall(), query
