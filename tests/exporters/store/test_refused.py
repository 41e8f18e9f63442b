"""What the database refuses is set aside, and nothing else is lost by it."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from tests.exporters.store.test_store import GRADS, KEYS, LOSS, block, header, node_of, plain, rows_of
from trainermon.core.errors import StoreError
from trainermon.core.journal import Cursor
from trainermon.core.values import Kind, SeriesKey
from trainermon.exporters.store import store
from trainermon.exporters.store.blocks import read_blocks
from trainermon.exporters.store.refused import culprits
from trainermon.exporters.store.segments import JournalPosition
from trainermon.exporters.store.store import SegmentWriter, read_cursors

HALF = SeriesKey(Kind.ACTV, "half \ud800")
MANY_CALLS = dataclasses.replace(HALF, name="calls", call=1 << 40)
COUNT = "SELECT name, count(*) FROM all_stats GROUP BY ALL ORDER BY ALL"
AT = {0: JournalPosition(1, Cursor(3, 77))}


def quarantine_of(segments: Path) -> list[dict]:
    folder = segments.parent / "quarantine"
    return [json.loads(line) for path in sorted(folder.iterdir()) for line in path.read_text("ascii").splitlines()]


@pytest.mark.parametrize("bad", [HALF, MANY_CALLS])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_series_that_cannot_be_stored_costs_no_other_row(tmp_path, bad, place):
    segments = node_of(tmp_path)
    table = [*KEYS[:place], bad, *KEYS[place:]]
    writer = SegmentWriter(segments)
    for step in range(2):
        writer.add(header(0, keys=table), table, block(step, [plain(float(step))] * 5))
        writer.add(header(1), KEYS, block(step, [plain(9.0)] * 4))
        writer.commit(AT)

    assert rows_of(tmp_path, COUNT) == [(key.name, 4) for key in sorted(KEYS, key=lambda key: key.name)]
    assert read_cursors(segments) == AT
    assert writer.set_aside.num_rows == 2
    assert writer.set_aside.reason
    _, first, _, second = quarantine_of(segments)
    assert [(line["rank"], line["step"], line["rows"][0]["series"]["name"]) for line in (first, second)] == [
        (0, 0, bad.name),
        (0, 1, bad.name),
    ]
    assert second["rows"][0]["values"] == list(plain(1.0))
    assert {path.stat().st_mode & 0o777 for path in (segments.parent / "quarantine").iterdir()} == {0o600}


def test_a_step_that_cannot_be_stored_costs_no_other_step(tmp_path):
    writer = SegmentWriter(node_of(tmp_path))
    for step, attempt in enumerate([1, 1 << 40, 1]):
        writer.add(header(attempt=attempt), KEYS, block(step, [plain(1.0)] * 4))
    writer.commit(AT)

    assert rows_of(tmp_path, "SELECT DISTINCT step FROM all_stats ORDER BY step") == [(0,), (2,)]
    assert writer.set_aside.num_rows == 4
    assert [line["attempt"] for line in quarantine_of(node_of(tmp_path))[1:]] == [1 << 40]


def test_where_nothing_can_be_stored_the_position_is_stored_all_the_same(tmp_path):
    segments = node_of(tmp_path)
    writer = SegmentWriter(segments)
    writer.add(header(keys=[HALF]), [HALF], block(0, [plain(1.0)]))
    writer.commit(AT)
    writer.add(header(), KEYS, block(1, [plain(1.0)] * 4))
    writer.commit(AT)

    assert read_cursors(segments) == AT
    assert rows_of(tmp_path, "SELECT DISTINCT step FROM all_stats") == [(1,)]
    assert [stored.step for _, stored in read_blocks(segments)] == [1]
    assert SegmentWriter(segments).metadata.positions == AT


def test_a_quarantine_that_cannot_be_written_is_an_error_that_loses_nothing(tmp_path):
    segments = node_of(tmp_path)
    writer = SegmentWriter(segments)
    (segments.parent / "quarantine").write_text("in the way")
    writer.add(header(keys=(*GRADS, HALF)), (*GRADS, HALF), block(0, [plain(1.0)] * 3))
    batch = writer.seal({})
    with pytest.raises(StoreError, match="set aside"):
        batch.write()
    assert not list(segments.glob("*.parquet"))

    (segments.parent / "quarantine").unlink()
    batch.write()

    assert rows_of(tmp_path, COUNT) == [(key.name, 1) for key in GRADS]
    assert writer.set_aside.num_rows == 1


def test_a_database_that_refuses_everything_is_no_reason_to_set_anything_aside(tmp_path, monkeypatch):
    segments = node_of(tmp_path)
    writer = SegmentWriter(segments)
    writer.add(header(), KEYS, block(0, [plain(1.0)] * 4))
    batch = writer.seal({})
    with monkeypatch.context() as broken:
        broken.setattr(store, "connect", lambda: (_ for _ in ()).throw(RuntimeError("no database")))
        with pytest.raises(StoreError, match="no database"):
            batch.write()
    assert not (segments.parent / "quarantine").exists()

    batch.write()

    assert len(rows_of(tmp_path, COUNT)) == 4


def test_the_quarantine_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("trainermon.exporters.store.refused.MAX_BYTES", 2000)
    segments = node_of(tmp_path)
    writer = SegmentWriter(segments)
    for step in range(50):
        writer.add(header(keys=[HALF, LOSS]), [HALF, LOSS], block(step, [plain(1.0)] * 2))
        if step % 10 == 9:
            writer.commit({})

    assert sum(path.stat().st_size for path in (segments.parent / "quarantine").iterdir()) < 4000
    assert writer.set_aside.num_rows == 50
    assert rows_of(tmp_path, COUNT) == [("loss", 50)]


def test_a_folder_whose_name_is_no_text_is_written_and_read(tmp_path):
    run_dir = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    for _ in range(2):
        writer = SegmentWriter(node_of(run_dir))
        writer.add(header(), KEYS, block(0, [plain(1.0)] * 4))
        writer.commit(AT)

    assert rows_of(run_dir, "SELECT count(*) FROM all_stats") == [(8,)]
    assert read_cursors(node_of(run_dir)) == AT
    assert len(list(read_blocks(node_of(run_dir)))) == 2
    assert writer.set_aside.num_rows == 0


@pytest.mark.parametrize("bad", [(), (0,), (7,), (2, 3), tuple(range(10))])
def test_who_is_to_blame_is_found_by_halves(bad):
    assert culprits(range(10), lambda some: not set(some) & set(bad)) == list(bad)


def test_where_items_fail_together_only_all_are_to_blame():
    assert culprits(range(4), lambda some: len(some) < 3) == [0, 1, 2, 3]
