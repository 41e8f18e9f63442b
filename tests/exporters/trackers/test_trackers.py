"""A recorded run in Weights & Biases and in MLflow, read back from their own files: the numbers are equal."""

import contextlib
import importlib.util
import json
import math
import struct
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import wandb
from mlflow.tracking import MlflowClient
from wandb.proto import wandb_internal_pb2

from tests.exporters.recorded_run import BAD_STEP, GRADIENTS, commit, counted_run, tensors_of
from tests.exporters.runs import LOSS
from tests.server_programs import wait_until
from trainermon.core.config import MlflowConfig, WandbConfig
from trainermon.core.errors import ConfigError
from trainermon.exporters.export import ExportSettings
from trainermon.exporters.store.feed import store_exporter

pytestmark = pytest.mark.extras

SERIES = ("grad_reduced/h.0.*", "accuracy")
ALERT = {
    "id": "a1",
    "rule": "loss-spike",
    "first_step": 3,
    "severity": "warning",
    "message": "far off",
    "state": "firing",
}


def norm(tensor):
    return math.sqrt(sum(value * value for value in tensor.ravel().tolist()))


def expected(rank, steps, *names):
    """Return the numbers by name and step, of tensors that numpy knows."""
    found = {}
    for step in steps:
        tensors = tensors_of(rank, step)
        found["loss", step] = tensors[LOSS].item()
        found["grad_reduced/h.0.attn.weight/norm", step] = norm(tensors[GRADIENTS[0]])
    return {key: value for key, value in found.items() if not names or key[0] in names}


@pytest.fixture
def run_dir(tmp_path):
    node = tmp_path / "run" / "nodes" / "here"
    node.mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text(json.dumps({"run_id": "run", "config": {"ops": ["norm"], "seed": 7}}))
    commit(node / "segments", range(3))
    return tmp_path / "run"


def settings(run_dir, **more):
    return ExportSettings(run_dir=run_dir, node_dir=run_dir / "nodes" / "here", run_id="run", **more)


def export(name, given):
    with contextlib.closing(store_exporter(name, given)) as exporter:
        exporter.send(threading.Event())
        return dict(exporter.metrics())


def goes_on(run_dir):
    """Store more steps, one of them bad, and an alert."""
    node = run_dir / "nodes" / "here"
    commit(node / "segments", range(3, 6))
    (node / "alerts.jsonl").write_text(json.dumps(ALERT) + "\n" + '{"half')


def close_to(truth):
    return {key: pytest.approx(value, rel=1e-12, nan_ok=True) for key, value in truth.items()}


def test_mlflow(run_dir):
    given = settings(run_dir, mlflow=MlflowConfig(series=SERIES))
    assert export("mlflow", given)["trainermon_export_dropped_steps_total"] == 0
    goes_on(run_dir)
    export("mlflow", given)

    client = MlflowClient(tracking_uri=(run_dir / "mlflow").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("trainermon").experiment_id])
    assert run.data.params["config.seed"] == "7"
    assert run.data.tags["alert.loss-spike"] == "step 3: warning: far off"
    assert run.info.status == "FINISHED"
    truth = expected(0, range(6))
    names = {name for name, _ in truth}
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in names}
    found = {(name, metric.step): metric.value for name, history in histories.items() for metric in history}
    assert sum(map(len, histories.values())) == len(found)
    assert found == close_to(truth)
    assert {"global_grad_norm", "duration_seconds", "learning_rate.0", "gradient_norm_part", "accuracy"} <= set(
        run.data.metrics
    )
    assert not any(name.startswith(("param_origin", "grad_reduced/h.1")) for name in run.data.metrics)


def test_wandb(run_dir):
    given = settings(run_dir, wandb=WandbConfig(mode="offline", series=SERIES, rank=1))
    assert export("wandb", given)["trainermon_export_dropped_steps_total"] == 0
    goes_on(run_dir)
    export("wandb", given)

    wait_until(lambda: len(rows_of(run_dir)) == 6, what="wandb's process to write its file")
    records, rows = all_records(run_dir), rows_of(run_dir)
    assert [row["step"] for row in rows] == list(range(6))
    truth = expected(1, range(6))
    found = {(name, row["step"]): float(row[name]) for row in rows for name, _ in truth}
    assert found == close_to(truth)
    assert math.isnan(found["loss", BAD_STEP])
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert {run.run_id for run in runs} == {"run"}
    assert list(runs[-1].tags) == ["alert:loss-spike"]
    assert runs[-1].notes == "step 3: warning: far off"
    updates = [update for record in records for update in record.config.update]
    assert "7" in {update.value_json for update in updates if update.key == "config.seed"}


def test_wandb_gets_the_histograms_of_chosen_series(tmp_path):
    run = tmp_path / "run"
    counted_run(run, range(5))
    given = ExportSettings(
        run_dir=run, node_dir=run / "nodes" / "host-a", run_id="run", wandb=WandbConfig(mode="offline", series=SERIES)
    )
    assert export("wandb", given)["trainermon_export_dropped_steps_total"] == 0

    wait_until(lambda: len(rows_of(run)) == 5, what="wandb's process to write its file")
    rows = rows_of(run)
    for step, row in enumerate(rows):
        chosen = {f"grad_reduced/{key.name}/histogram": key for key in GRADIENTS if key.name.startswith("h.0.")}
        assert {name.removesuffix("/_type") for name, value in row.items() if value == "histogram"} == chosen.keys()
        for name, key in chosen.items():
            counts, edges = row[f"{name}/values"], row[f"{name}/bins"]
            assert counts == np.histogram(tensors_of(0, step)[key], edges)[0].tolist()
            assert sum(counts) == 30


def all_records(run_dir):
    return [record for path in sorted(run_dir.rglob("*.wandb")) for record in records_of(path)]


def rows_of(run_dir):
    """Return what each step was told, by name; a process of wandb's own writes it, and may outlive its `finish`."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in all_records(run_dir)
        if record.WhichOneof("record_type") == "history"
    ]


def records_of(path: Path):
    """Yield the records of an offline run: messages of wandb's own protocol, in blocks framed as in LevelDB's log."""
    content, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, place)
        parts += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            record.ParseFromString(parts)
            parts = b""
            yield record


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_another_rank_has_no_run(run_dir, name):
    given = settings(run_dir, wandb=WandbConfig(mode="offline", rank=9), mlflow=MlflowConfig(rank=9))

    assert export(name, given)["trainermon_exported_steps_total"] == 6

    assert not list(run_dir.rglob("*.wandb"))
    assert not list(run_dir.rglob("meta.yaml"))


def test_what_a_service_does_not_take_is_told_it_later(run_dir, tmp_path):
    in_the_way = tmp_path / "mlflow"
    in_the_way.write_text("no folder")
    given = settings(run_dir, mlflow=MlflowConfig(tracking_uri=in_the_way.as_uri()))
    with contextlib.closing(store_exporter("mlflow", given)) as exporter:
        with pytest.raises(OSError, match="mlflow"):
            exporter.send(threading.Event())
        assert exporter.metrics()["trainermon_export_waiting_bytes"] > 0
        in_the_way.unlink()
        exporter.send(threading.Event())
        assert exporter.metrics()["trainermon_export_dropped_steps_total"] == 0

    client = MlflowClient(tracking_uri=in_the_way.as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("trainermon").experiment_id])
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")] == [0, 1, 2]


def test_wandbs_own_variables_count_where_the_configuration_is_silent(run_dir, monkeypatch):
    given = {}
    monkeypatch.setattr(wandb, "init", lambda **arguments: given.update(arguments) or Offline())
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    export("wandb", settings(run_dir))

    assert (given["project"], given["mode"]) == ("mine", None)  # None: wandb looks at WANDB_MODE itself


class Offline:
    """A run of wandb that takes everything."""

    config: Any = SimpleNamespace(update=lambda *_, **__: None)

    def __getattr__(self, name):
        return lambda *_, **__: None


def test_mlflows_own_variables_count_where_the_configuration_is_silent(run_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "elsewhere").as_uri())
    export("mlflow", settings(run_dir))

    assert MlflowClient(tracking_uri=(tmp_path / "elsewhere").as_uri()).get_experiment_by_name("mine")


@pytest.mark.parametrize("uri", ["sqlite:///mlflow.db", "postgresql+psycopg2://u@h/db", "mysql://u@h/db"])
def test_a_database_is_refused_with_what_to_install(run_dir, monkeypatch, uri):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sqlalchemy" else name)
    with pytest.raises(ConfigError, match=r"pip install mlflow, or let tracking_uri"):
        export("mlflow", settings(run_dir, mlflow=MlflowConfig(tracking_uri=uri)))
