"""An exporter is handed everything that was committed once, whatever fails meanwhile."""

import csv
import threading

import pytest

from tests.exporters import recorded_run
from tests.exporters.recorded_run import GRADIENTS, KEYS, LOSS, commit, tensors_of
from trainermon.exporters.export import Exporter, ExportSettings
from trainermon.exporters.store.feed import StoreFeed
from trainermon.msprobe.csv_files import CsvExporter


@pytest.fixture
def settings(tmp_path):
    return ExportSettings(run_dir=tmp_path, node_dir=tmp_path, run_id="run", ndigits=17, step_count_per_record=100)


class Remembering(Exporter):
    """Fails at one step, as often as told."""

    def __init__(self, taken, bad_step=None, errors=()):
        self.taken, self.bad_step, self.errors = taken, bad_step, errors

    def write(self, header, block):
        if block.step == self.bad_step and self.errors:
            raise self.errors.pop(0)
        self.taken.append((header, block))


def losses(run_dir):
    """Return what the csv files say, by rank and step; each at most once."""
    found = {}
    for path in run_dir.glob("csv/*/scalars_*.csv"):
        rank = int(path.parent.name.split("-rank")[1].split("-")[0])
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if row["name"] == LOSS.name:
                    assert (rank, int(row["step"])) not in found
                    found[rank, int(row["step"])] = float(row["value"])
    return found


def truth(steps):
    return {(rank, step): tensors_of(rank, step)[LOSS].item() for rank in range(2) for step in steps}


def test_steps_come_in_order_with_the_table_and_what_the_store_knows_of_it(settings):
    commit(settings.segments, range(2))
    commit(settings.segments, range(2, 4))
    taken = []
    feed = StoreFeed("mine", Remembering(taken), lambda: Remembering(taken), settings)

    feed.send(threading.Event())
    feed.close()

    assert [(header.coordinates.rank, block.step) for header, block in taken] == [
        (rank, step) for step in range(4) for rank in range(2)
    ]
    for header, block in taken:
        original = recorded_run.block(header.coordinates.rank, block.step)
        columns = dict(zip((header.series[at] for at in block.series), block.values.T.tolist(), strict=True))
        assert columns == {key: original.values[:, at].tolist() for at, key in enumerate(KEYS)}
        assert (header.run_id, header.started_s) == ("run", recorded_run.FIRST_TIME_S)
        of_gradient = header.placements[header.series.index(GRADIENTS[0])]
        assert (of_gradient.dtype, of_gradient.shape) == ("float32", (6, 5))


def test_a_disk_that_fails_in_the_midst_costs_no_row_and_doubles_none(settings):
    commit(settings.segments, range(5))
    errors = [OSError("no space left"), OSError("still none")]

    class Failing(CsvExporter):
        def write(self, header, block):
            if block.step == 3 and errors:
                raise errors.pop()
            super().write(header, block)

    feed = StoreFeed("csv", Failing(settings), lambda: Failing(settings), settings)
    for expected in ("still none", "no space left"):
        with pytest.raises(OSError, match=expected):
            feed.send(threading.Event())
    feed.send(threading.Event())
    feed.close()

    assert losses(settings.run_dir) == pytest.approx(truth(range(5)), nan_ok=True)


def test_a_step_that_cannot_be_taken_is_left_out_counted_and_said(settings, caplog):
    commit(settings.segments, range(4))
    taken, errors = [], [KeyError("a fault of its own")]
    feed = StoreFeed("mine", Remembering(taken, bad_step=1, errors=errors), list, settings)  # type: ignore[arg-type]

    feed.send(threading.Event())
    feed.close()

    assert [(header.coordinates.rank, block.step) for header, block in taken] == [
        (rank, step) for step in range(4) for rank in range(2) if (rank, step) != (0, 1)
    ]
    counts = feed.metrics()
    assert counts["trainermon_exported_steps_total"] == 7
    assert counts["trainermon_export_dropped_steps_total"] == 1
    assert counts["trainermon_export_waiting_bytes"] == 0
    assert "export mine: step 1 of rank 0 is left out" in caplog.text


def test_one_that_is_stopped_begins_with_that_segment_again(settings):
    commit(settings.segments, range(3))
    stop = threading.Event()
    stop.set()
    feed = StoreFeed("csv", CsvExporter(settings), lambda: CsvExporter(settings), settings)
    feed.send(stop)
    feed.close()
    assert losses(settings.run_dir) == {}

    feed = StoreFeed("csv", CsvExporter(settings), lambda: CsvExporter(settings), settings)
    feed.send(threading.Event())
    feed.close()

    assert losses(settings.run_dir) == pytest.approx(truth(range(3)), nan_ok=True)
