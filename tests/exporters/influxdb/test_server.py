"""Points in a real InfluxDB 1.x, by its own `/write` and by the v2 API's surface, read back by query."""

import gzip
import logging
import threading

import pytest

from tests.exporters.influx_servers import V2Surface, influxdb, victoria_metrics
from tests.exporters.recorded_run import BAD_STEP, FIRST_TIME_S, GRADIENTS, commit, tensors_of
from tests.exporters.runs import LOSS
from tests.ports import free_port
from tests.server_programs import wait_until
from trainermon.agent import export_process
from trainermon.agent.export_process import ExporterThread
from trainermon.core.config import InfluxDBConfig
from trainermon.exporters.export import ExportSettings, make_exporter
from trainermon.exporters.influxdb.server import TOKEN_VARIABLE, InfluxDBServer
from trainermon.exporters.store.segment_follower import SegmentFollower

pytestmark = pytest.mark.server

STEPS = range(6)
PASSWORD = "very-secret-password"


def exporter_of(folder, **options):
    config = InfluxDBConfig(**options)
    return make_exporter("influxdb", ExportSettings(run_dir=folder, node_dir=folder, run_id="run", influxdb=config))


def assert_all_there(server, *, steps=STEPS):
    losses = server.query("SELECT loss, step FROM trainermon_step GROUP BY rank")
    assert {(row["rank"], row["step"]): row["loss"] for row in losses if row["loss"] is not None} == {
        (str(rank), step): tensors_of(rank, step)[LOSS].item()
        for rank in range(2)
        for step in steps
        if (rank, step) != (1, BAD_STEP)
    }
    rows = server.query("SELECT * FROM trainermon_grad_reduced")
    assert len(rows) == len(steps) * 2 * len(GRADIENTS)
    for row in rows:
        assert row["time"] == (FIRST_TIME_S + row["step"]) * 1e6
    times = {row["time"] for row in server.query("SELECT step FROM trainermon_step")}
    assert times == {(FIRST_TIME_S + step) * 1e6 for step in steps}


def test_points_by_the_write_api_of_1_x_with_a_password(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(TOKEN_VARIABLE, PASSWORD)
    commit(tmp_path / "segments", STEPS)
    with influxdb(tmp_path / "server", user=f"monitor:{PASSWORD}") as server:
        exporter = exporter_of(tmp_path, url=server.url, api="v1", username="monitor")

        exporter.send(threading.Event())
        exporter.close()

        assert_all_there(server)
        assert exporter.metrics()["trainermon_export_rejected_points_total"] == 0
    assert PASSWORD not in caplog.text


def test_points_by_the_v2_api_with_a_token_that_is_replaced_and_answers_of_every_kind(tmp_path, caplog):
    token_file = tmp_path / "token"
    token_file.write_text("outdated\n")
    commit(tmp_path / "segments", STEPS)
    with influxdb(tmp_path / "server") as server:
        surface = V2Surface(server.url)
        try:
            options = {"org": "research", "token_file": str(token_file), "max_backoff_s": 0.05}
            exporter = exporter_of(tmp_path, url=surface.url, batch_points=50, **options)
            surface.faults += [(503, {}), (429, {"Retry-After": "0"}), (302, {"Location": "/elsewhere"})]
            thread = threading.Thread(target=exporter.send, args=(threading.Event(),))
            thread.start()
            wait_until(lambda: len(surface.requests) > 5, what="some refused requests")
            token_file.write_text(f"{surface.token}\n")
            thread.join(timeout=900)
            assert not thread.is_alive()
            exporter.close()

            assert_all_there(server)
            assert {path for path, *_ in surface.requests} == {"/api/v2/write"}
            _, query, headers, _ = surface.requests[-1]
            assert query == {"org": "research", "bucket": "trainermon", "precision": "us"}
            assert headers["Content-Encoding"] == "gzip"
        finally:
            surface.close()
    assert "401 " in caplog.text
    assert surface.token not in caplog.text
    assert "outdated" not in caplog.text


def test_another_implementation_of_the_v2_api_reads_the_same(tmp_path):
    commit(tmp_path / "segments", STEPS)
    with victoria_metrics(tmp_path / "server") as server:
        exporter = exporter_of(tmp_path, url=server.url, org="any")

        exporter.send(threading.Event())
        exporter.close()

        found = {
            (int(labels["rank"]), time_ms // 1000 - int(FIRST_TIME_S)): value
            for labels, samples in server.samples("trainermon_step_loss")
            for time_ms, value in samples
        }
    places = [(rank, step) for rank in range(2) for step in STEPS if (rank, step) != (1, BAD_STEP)]
    truth = {place: tensors_of(*place)[LOSS].item() for place in places}
    assert found == pytest.approx(truth, rel=1e-11)  # it keeps twelve digits


def test_a_conflict_of_types_goes_to_the_dead_letter_file_and_the_rest_arrives(tmp_path):
    commit(tmp_path / "segments", STEPS)
    with influxdb(tmp_path / "server") as server:
        exporter = exporter_of(tmp_path, url=server.url, api="v1", batch_points=1)
        other = InfluxDBServer(InfluxDBConfig(url=server.url, api="v1"))
        text = b'trainermon_step,rank=0,run=run loss="text" 1700000000000001'
        assert other.write(gzip.compress(text)).status == 204
        other.close()

        exporter.send(threading.Event())

        rejected = (tmp_path / "influxdb.rejected.lp").read_text()
        assert "field type conflict" in rejected
        assert "trainermon_step,rank=0" in rejected
        counts = exporter.metrics()
        assert counts["trainermon_export_rejected_points_total"] >= 1
        rows = server.query("SELECT * FROM trainermon_grad_reduced")
        assert len(rows) == len(STEPS) * 2 * len(GRADIENTS)


def test_a_server_that_comes_late_gets_everything_and_nobody_waits_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(export_process, "LOOK_S", 0.05)
    port = free_port()
    options = {"url": f"http://127.0.0.1:{port}", "api": "v1", "max_backoff_s": 0.1}
    follower = ExporterThread("influxdb", lambda: exporter_of(tmp_path, **options))
    for step in STEPS:
        commit(tmp_path / "segments", [step])
    metrics = follower.counts

    wait_until(lambda: metrics().get("trainermon_export_retries_total", 0) >= 3, what="retries")
    with influxdb(tmp_path / "server", port=port) as server:
        wait_until(lambda: metrics()["trainermon_exported_points_total"] > 0, what="the first points")
        wait_until(lambda: metrics()["trainermon_export_waiting_bytes"] == 0, what="the last points")

        assert_all_there(server)
        assert metrics()["trainermon_export_errors_total"] == 0
        follower.is_ending.set()
        follower.thread.join()


def test_a_server_that_stays_away_does_not_keep_the_agent_from_ending(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(export_process, "PATIENCE_S", 0.2)
    commit(tmp_path / "segments", STEPS)
    url = f"http://127.0.0.1:{free_port()}"
    follower = ExporterThread("influxdb", lambda: exporter_of(tmp_path, url=url, api="v1"))

    with caplog.at_level(logging.WARNING):
        wait_until(lambda: "takes no points (failure 1)" in caplog.text, what="the first attempt")
        export_process._finish([follower])
    follower.thread.join()

    (segment,) = SegmentFollower(tmp_path / "segments", tmp_path / "influxdb.state.json").waiting()
    assert segment.last == 1, "nothing is noted as sent"
