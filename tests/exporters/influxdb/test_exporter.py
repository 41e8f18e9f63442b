"""Delivery to an InfluxDB that is away, busy, wrong or picky; time is virtual."""

import logging
import stat
import threading
import zlib

import pytest

from tests.exporters.influxdb.test_line_protocol import read
from tests.exporters.recorded_run import commit
from trainermon.core.config import InfluxDBConfig
from trainermon.exporters.export import ExportSettings
from trainermon.exporters.influxdb.exporter import FIRST_PAUSE_S, InfluxDBExporter
from trainermon.exporters.influxdb.server import ServerAnswer

TAKEN = ServerAnswer(204)
POINTS = "trainermon_exported_points_total"
REJECTED = "trainermon_export_rejected_points_total"
RETRIES = "trainermon_export_retries_total"
WAITING = "trainermon_export_waiting_bytes"


class Memory:
    """A server that keeps points by series and time, as InfluxDB does, and answers what it is told.

    Attributes:
        points: Fields by series and time.
        bodies: Lines of each request.
        pauses: How long the exporter has waited, one after the other.
    """

    def __init__(self, *answers):
        self.points = {}
        self.bodies = []
        self.pauses = []
        self.is_closed = False
        self._answers = list(answers)

    def write(self, lines_gz):
        lines = zlib.decompress(lines_gz, 31).decode().split("\n")
        self.bodies.append(lines)
        answer = self._answers.pop(0) if self._answers else TAKEN
        answer = answer(self) if callable(answer) else answer
        if answer.status == 204:
            for line in lines:
                measurement, tags, fields, time = read(line)
                self.points[measurement, tuple(tags.items()), time] = fields
        return answer

    def close(self):
        self.is_closed = True

    def wait(self, stop, seconds):
        self.pauses.append(seconds)


@pytest.fixture
def make(tmp_path):
    def make(server, **options):
        config = InfluxDBConfig(url="http://server:8086", **options)
        settings = ExportSettings(run_dir=tmp_path, node_dir=tmp_path, run_id="run", influxdb=config)
        return InfluxDBExporter(settings, server, wait=server.wait)

    return make


@pytest.fixture
def go_on():
    return threading.Event()


def all_points(tmp_path, make):
    server = Memory()
    settings = ExportSettings(run_dir=tmp_path, node_dir=tmp_path, run_id="run")
    (tmp_path / "influxdb.state.json").unlink(missing_ok=True)
    InfluxDBExporter(settings, server).send(threading.Event())
    return server.points


def test_everything_committed_is_sent_once(tmp_path, make, go_on):
    server = Memory()
    exporter = make(server)
    commit(tmp_path / "segments", range(3))
    exporter.send(go_on)
    commit(tmp_path / "segments", range(3, 5))
    exporter.send(go_on)
    exporter.send(go_on)

    steps = {(dict(tags)["rank"], fields["step"]) for (_, tags, _), fields in server.points.items()}
    assert steps == {(str(rank), f"{step}i") for rank in range(2) for step in range(5)}
    assert sum(map(len, server.bodies)) == len(server.points)
    counts = exporter.metrics()
    assert (counts[POINTS], counts[WAITING]) == (len(server.points), 0)
    assert counts["trainermon_export_nonfinite_values_total"] == 2  # a loss and a norm at step 3
    exporter.close()
    assert server.is_closed


def test_a_server_that_is_away_for_ten_minutes_costs_no_point(tmp_path, make, go_on):
    commit(tmp_path / "segments", range(3))
    away = [lambda server: ServerAnswer(0, "refused") if sum(server.pauses) < 600 else TAKEN] * 100
    server = Memory(*away)
    exporter = make(server)

    exporter.send(go_on)

    assert server.points == all_points(tmp_path, make)
    assert 600 <= sum(server.pauses) <= 600 + 60
    assert len(server.pauses) <= 30
    assert exporter.metrics()[RETRIES] == len(server.pauses)


def test_pauses_grow_are_spread_and_stay_below_the_limit(tmp_path, make, go_on):
    commit(tmp_path / "segments", [0])
    server = Memory(*[ServerAnswer(503)] * 40)

    make(server, max_backoff_s=8).send(go_on)

    for number, pause in enumerate(server.pauses):
        longest = min(8, FIRST_PAUSE_S * 2 ** (number + 1))
        assert longest / 2 <= pause <= longest
    assert len(set(server.pauses)) == 40


def test_the_pause_that_the_server_asks_for_is_kept(tmp_path, make, go_on):
    commit(tmp_path / "segments", [0])
    server = Memory(ServerAnswer(429, "slow down", 30.0), ServerAnswer(503, "", 1e9))

    make(server).send(go_on)

    assert server.pauses == [30.0, 600.0]


@pytest.mark.parametrize("status", [0, 302, 401, 403, 404, 408, 429, 500, 503])
def test_what_can_be_mended_is_tried_again(tmp_path, make, go_on, status):
    commit(tmp_path / "segments", [0])
    server = Memory(ServerAnswer(status, "why"), ServerAnswer(status, "why"))

    make(server).send(go_on)

    assert len(server.bodies) == 3
    assert server.bodies[0] == server.bodies[2]


@pytest.mark.parametrize("status", [400, 422])
def test_a_batch_that_is_refused_goes_to_the_dead_letter_file_and_holds_nothing_up(
    tmp_path, make, go_on, caplog, status
):
    commit(tmp_path / "segments", range(3))
    server = Memory(TAKEN, ServerAnswer(status, 'field "loss" is\na string'))
    exporter = make(server, batch_points=20)

    exporter.send(go_on)

    path = tmp_path / "influxdb.rejected.lp"
    reason, *lines = path.read_text().splitlines()
    assert reason == f'# {status} field "loss" is a string'
    assert lines == server.bodies[1]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert exporter.metrics()[REJECTED] == 20
    assert exporter.metrics()[POINTS] == sum(map(len, server.bodies)) - 20
    assert exporter.metrics()[WAITING] == 0
    assert "refuses points" in caplog.text


def test_the_dead_letter_file_is_bounded(tmp_path, make, go_on, monkeypatch):
    monkeypatch.setattr("trainermon.exporters.influxdb.exporter.MAX_REJECTED_BYTES", 1000)
    commit(tmp_path / "segments", range(3))
    server = Memory(*[ServerAnswer(400)] * 1000)
    exporter = make(server, batch_points=5)

    exporter.send(go_on)

    assert (tmp_path / "influxdb.rejected.lp").stat().st_size < 3000
    assert exporter.metrics()[REJECTED] == sum(map(len, server.bodies))


def test_a_batch_that_is_too_large_is_halved(tmp_path, make, go_on):
    commit(tmp_path / "segments", [0])
    server = Memory(ServerAnswer(413), ServerAnswer(413))

    make(server).send(go_on)

    whole, half, *rest = server.bodies
    assert half == whole[: len(whole) // 2]
    assert [line for body in rest for line in body] == whole


def test_stopping_keeps_the_place_and_a_restart_sends_the_segment_again(tmp_path, make, go_on):
    commit(tmp_path / "segments", range(2))
    commit(tmp_path / "segments", range(2, 4))
    stop = threading.Event()

    def end(server):
        stop.set()
        return ServerAnswer(503)

    first = Memory(*[TAKEN] * 4, end)  # in the middle of the second segment
    make(first, batch_points=30).send(stop)
    second = Memory()
    make(second).send(go_on)

    assert first.points.keys() & second.points.keys(), "the beginning of the segment comes twice"
    assert {**first.points, **second.points} == all_points(tmp_path, make)
    assert not {time for _, _, time in second.points} & {1_700_000_000_000_000, 1_700_000_001_000_000}


def test_a_failure_is_logged_now_and_then_and_its_end_once(tmp_path, make, go_on, caplog):
    commit(tmp_path / "segments", [0])

    with caplog.at_level(logging.INFO):
        make(Memory(*[ServerAnswer(503, "busy")] * 9)).send(go_on)

    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "takes no points" in line] == [
        f"InfluxDB at http://server:8086 takes no points (failure {number}): 503 busy" for number in (1, 2, 4, 8)
    ]
    assert lines[-1] == "InfluxDB takes points again, after 9 requests that failed"
