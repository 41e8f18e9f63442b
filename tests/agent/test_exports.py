"""An exporter that raises, hangs or is slow costs its own output and nothing else."""

import logging
import threading

import pytest

from tests.exporters.msprobe_runs import KEYS, block, header
from trainermon.agent import exports
from trainermon.agent.exports import Exports, make_exports
from trainermon.agent.settings import AgentSettings, OutputSettings
from trainermon.exporters.export import Exporter, ExportSettings, NullExporter


class Failing(Exporter):
    def write(self, header, block):
        raise OSError("disk full")


class Hanging(Exporter):
    def __init__(self):
        self.may_go_on = threading.Event()

    def write(self, header, block):
        self.may_go_on.wait(60)


@pytest.fixture
def null(tmp_path):
    return NullExporter(ExportSettings(run_dir=tmp_path))


def feed(consumer, steps):
    for step in steps:
        consumer.on_block(header(), KEYS, block(step))


def test_every_exporter_gets_every_block(null):
    consumer = Exports({"null": null})

    feed(consumer, range(50))

    assert consumer.drain()
    assert null.num_blocks == 50
    consumer.close()
    assert null.is_closed


def test_a_failing_exporter_is_counted_and_logged_and_harms_no_other(null, caplog):
    consumer = Exports({"failing": Failing(), "null": null})

    with caplog.at_level(logging.ERROR):
        feed(consumer, range(5))
        assert consumer.drain()
    consumer.close()

    assert (consumer.num_errors, null.num_blocks) == (5, 5)
    assert (
        len([record for record in caplog.records if "export failing failed to write" in record.message]) == 3
    )  # 1, 2, 4


def test_a_hanging_exporter_holds_up_neither_the_store_nor_another(null, caplog):
    hanging = Hanging()
    consumer = Exports({"hanging": hanging, "null": null})

    feed(consumer, range(3))

    assert not consumer.drain(0.05)
    assert not consumer.drain(60)  # it was in vain once: now it does not wait at all
    assert null.num_blocks == 3
    consumer.close(0.05)
    assert "export hanging hangs and is left behind" in caplog.text
    hanging.may_go_on.set()
    for worker in consumer.workers:
        worker._thread.join()


def test_what_waits_for_a_slow_exporter_is_bounded(monkeypatch, caplog):
    monkeypatch.setattr(exports, "MAX_WAITING_BYTES", 3 * (block(0).values.nbytes + block(0).series.nbytes))
    hanging = Hanging()
    consumer = Exports({"hanging": hanging})

    feed(consumer, range(20))

    assert consumer.num_dropped >= 12
    assert "export hanging is too slow" in caplog.text
    hanging.may_go_on.set()
    consumer.close()


def test_forms_are_made_by_name_and_unknown_ones_left_out(tmp_path, caplog):
    settings = AgentSettings(
        run_id="run", output=str(tmp_path), outputs=OutputSettings(format=("api", "cvs", "csv", "null", "csv"))
    )

    consumer = make_exports(settings, tmp_path / "nodes" / "here")
    feed(consumer, range(2))
    assert consumer.drain()
    consumer.close()

    assert len(consumer.workers) == 2
    assert "format: found 'cvs'" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["csv"]
