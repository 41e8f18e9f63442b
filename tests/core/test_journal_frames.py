"""What the journal holds, byte for byte."""

from __future__ import annotations

import array
import dataclasses
import json
import math
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.journals import file_of, make_block, make_header, open_writer, read_all
from trainermon.core.errors import JournalError
from trainermon.core.events import DumpStatus, ReplayEvent, WarningEvent
from trainermon.core.journal import (
    BlockRecord,
    Cursor,
    EndRecord,
    EventRecord,
    HeaderRecord,
    JournalReader,
    JournalWriter,
    SeriesRecord,
    frames,
)
from trainermon.core.values import BlockHistograms, Coordinates, Kind, Placement, SeriesKey, StatBlock

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
AXES = st.lists(st.sampled_from(["dp", "tp", "pp", "cp", "ep"]), max_size=3).map(tuple)
KEYS = st.builds(
    SeriesKey,
    st.sampled_from(Kind),
    NAMES,
    NAMES,
    st.integers(0, 9),
    st.none() | st.integers(0, 99),
    st.integers(0, 7),
)
PLACEMENTS = st.none() | st.builds(
    Placement,
    dtype=st.sampled_from(["float32", "bfloat16"]),
    shape=st.lists(st.integers(0, 10**9), max_size=4).map(tuple),
    offset=st.integers(0, 10**12),
    length=st.none() | st.integers(0, 10**12),
    replicated_over=AXES,
    partitioned_over=AXES,
    in_global_norm=st.booleans(),
    scale=st.floats(allow_nan=False, allow_infinity=False),
)
SERIES = st.lists(st.tuples(KEYS, PLACEMENTS), max_size=4)


@settings(deadline=None)
@given(first=SERIES, more=SERIES, coordinates=st.builds(Coordinates, rank=st.just(7), dp=st.integers(0, 5)))
def test_header_and_series_come_back_as_they_went(tmp_path_factory, first, more, coordinates):
    directory = tmp_path_factory.mktemp("journal")
    header = make_header(
        coordinates=coordinates, series=tuple(key for key, _ in first), placements=tuple(place for _, place in first)
    )

    writer = JournalWriter(directory, header)
    first_id = writer.add_series([key for key, _ in more], [place for _, place in more])
    writer.close()

    reader = JournalReader(directory, 7)
    head, series, end = reader.poll()
    reader.close()
    assert first_id == len(first)
    assert isinstance(head, HeaderRecord)
    assert head.header == header
    assert isinstance(series, SeriesRecord)
    assert (series.first_id, series.keys, series.placements) == (
        first_id,
        tuple(key for key, _ in more),
        tuple(place for _, place in more),
    )
    assert isinstance(end, EndRecord)


@settings(deadline=None)
@given(
    step=st.integers(-(2**63), 2**63 - 1),
    time_s=st.floats(allow_nan=False),
    ids=st.lists(st.integers(0, 2), max_size=5),
    data=st.data(),
)
def test_a_block_comes_back_bit_for_bit(tmp_path_factory, step, time_s, ids, data):
    directory = tmp_path_factory.mktemp("journal")
    values = np.array(
        data.draw(st.lists(st.floats(width=64), min_size=8 * len(ids), max_size=8 * len(ids))), dtype=np.float64
    )
    series = np.array(ids, dtype=np.uint32)

    writer = open_writer(directory)
    assert writer.append_block(StatBlock(step=step, time_s=time_s, series=series, values=values.reshape(8, len(ids))))
    writer.close()

    reader = JournalReader(directory, 0)
    record = reader.poll()[2]
    reader.close()
    assert isinstance(record, BlockRecord)
    assert (record.block.step, record.block.time_s) == (step, time_s)
    assert record.block.series.dtype == np.uint32
    assert record.block.series.tolist() == ids
    assert record.block.values.shape == (8, len(ids))
    assert record.block.values.tobytes() == values.tobytes()
    assert not record.block.values.flags.writeable


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_histograms_come_back_with_their_block(tmp_path, dtype):
    largest = np.iinfo(dtype).max
    counts = np.array([[7] * 127 + [largest], [0] * 128], dtype)
    histograms = BlockHistograms(places=np.array([2, 0], np.uint32), counts=counts)
    block = dataclasses.replace(make_block(5), histograms=histograms)

    writer = open_writer(tmp_path)
    assert writer.append_block(block)
    assert writer.append_block(make_block(6))
    writer.close()

    reader = JournalReader(tmp_path, 0)
    _, _, record, plain, _ = reader.poll()
    reader.close()
    assert record.block.values.tobytes() == block.values.tobytes()
    assert record.block.histograms.places.tolist() == [2, 0]
    np.testing.assert_array_equal(record.block.histograms.counts, counts)
    assert (plain.block.step, plain.block.histograms) == (6, None)


def test_the_bytes_of_histograms_are_those_that_the_reference_names():
    places, counts = np.array([1], np.uint32), np.arange(128, dtype=np.uint32)[None]

    encoded = frames.encode_histograms(BlockHistograms(places=places, counts=counts))

    assert b"".join(map(bytes, encoded)) == struct.pack("<III I 128I", 1, 128, 4, 1, *range(128))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda body: body[:-4], "bytes for 1 histograms of 128 bins"),
        (lambda body: body.replace(struct.pack("<4I", 1, 128, 4, 2), struct.pack("<4I", 1, 64, 4, 2)), "of 64 bins"),
        (lambda body: body.replace(struct.pack("<4I", 1, 128, 4, 2), struct.pack("<4I", 1, 128, 4, 3)), "of place 3"),
    ],
)
def test_a_damaged_histogram_is_refused(change, error):
    histograms = BlockHistograms(places=np.array([2], np.uint32), counts=np.zeros((1, 128), np.uint32))
    body = b"".join(map(bytes, [*frames.encode_block(make_block(1)), *frames.encode_histograms(histograms)]))

    with pytest.raises(JournalError, match=error):
        frames.decode_record(frames.COUNTED_BLOCK, change(body), Cursor(1, 2))


def test_histograms_that_do_not_fit_are_refused():
    counts = np.zeros((2, 128), np.uint32)

    with pytest.raises(ValueError, match="need C-contiguous uint32 places"):
        frames.encode_histograms(BlockHistograms(places=np.zeros(1, np.uint32), counts=counts))


def test_a_block_may_be_made_of_any_buffers(tmp_path):
    writer = open_writer(tmp_path)

    assert writer.append_block(
        StatBlock(step=1, time_s=0.0, series=array.array("I", [0, 2]), values=array.array("d", range(16)))
    )
    assert writer.append_block(StatBlock(step=2, time_s=0.0, series=b"", values=b""))
    writer.close()

    assert read_all(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    ("series", "values"),
    [
        (np.arange(3, dtype=np.uint32), np.zeros((8, 4))),
        (np.arange(3, dtype=np.int64), np.zeros((8, 3))),
        (np.arange(3, dtype=np.uint32), np.zeros((8, 3), dtype=np.float32)),
        (np.arange(3, dtype=np.uint32), np.zeros((3, 8)).T),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, series, values):
    writer = open_writer(tmp_path)

    with pytest.raises(ValueError, match=r"C-contiguous uint32 ids \[n\] and float64 values \[8, n\], got"):
        writer.append_block(StatBlock(step=1, time_s=0.0, series=series, values=values))
    writer.close()


def test_an_event_comes_back_with_text_for_what_json_does_not_have(tmp_path):
    writer = open_writer(tmp_path)

    event = ReplayEvent(
        step=12,
        status=DumpStatus.NONFINITE,
        dump=None,
        reason="half \udc00",
        seconds=math.nan,
        micro_steps=1,
        bytes=0,
    )

    writer.append_event(event)
    writer.close()

    reader = JournalReader(tmp_path, 0)
    record = reader.poll()[2]
    reader.close()
    assert isinstance(record, EventRecord)
    payload = parse_as_documented(file_of(tmp_path).read_bytes())[2][2]
    assert json.loads(payload) == {
        "type": "replay",
        "step": 12,
        "status": "nonfinite",
        "dump": None,
        "reason": "half ?",
        "seconds": "NaN",
        "micro_steps": 1,
        "bytes": 0,
    }
    assert math.isnan(record.event.seconds)
    assert (record.event.reason, record.event.status) == ("half ?", DumpStatus.NONFINITE)


def parse_as_documented(content: bytes) -> list[tuple[int, int, bytes]]:
    """Read a file by docs/reference/journal.md alone: type, sequence and payload of each frame."""
    found, offset = [], 0
    while offset < len(content):
        magic, version, kind, sequence, length, crc, reserved, head_crc = struct.unpack_from(
            "<4sHHQIIII", content, offset
        )
        assert (magic, version, reserved) == (b"\xb1TMJ", 1, 0)
        assert head_crc == zlib.crc32(content[offset : offset + 28])
        payload = content[offset + 32 : offset + 32 + length]
        assert len(payload) == length
        assert crc == zlib.crc32(payload)
        found.append((kind, sequence, payload))
        offset += 32 + length
    return found


def test_a_file_is_laid_out_as_documented(tmp_path):
    placement = Placement(dtype="bfloat16", shape=(4, 5), offset=8, length=4, replicated_over=("tp",), scale=0.5)
    writer = JournalWriter(tmp_path, make_header(series=(SeriesKey(Kind.LOSS, "loss"),), placements=(None,)))
    writer.add_series([SeriesKey(Kind.ACTV, "h.0", "input.0", 1, 2, 3)], [placement])
    writer.append_block(make_block(812, 2))
    writer.append_event(WarningEvent(message="x"))
    writer.close()

    parsed = parse_as_documented(file_of(tmp_path).read_bytes())

    assert [(kind, sequence) for kind, sequence, _ in parsed] == [(1, 0), (2, 0), (3, 1), (4, 2), (5, 3)]
    head, series, block, event, end = (payload for _, _, payload in parsed)
    fields = json.loads(head)
    assert fields["run_id"] == "run"
    assert fields["coordinates"]["world_size"] == 1
    assert fields["series"] == [["loss", "loss", "", 0, None, 0, None]]
    shard = ["bfloat16", [4, 5], 8, 4, ["tp"], [], True, 0.5]
    assert json.loads(series) == {"first_id": 1, "series": [["actv", "h.0", "input.0", 1, 2, 3, shard]]}
    assert struct.unpack_from("<qdII", block) == (812, 406.0, 2, 8)
    assert struct.unpack_from("<16d", block, 24) == tuple(float(812 + index) for index in range(16))
    assert struct.unpack_from("<2I", block, 24 + 128) == (0, 1)
    assert json.loads(event) == {"type": "warning", "message": "x"}
    assert end == b""


def test_writing_needs_neither_numpy_nor_torch():
    code = (
        "import sys; from trainermon.core import control, journal, spool\n"
        "print([name for name in ('numpy', 'torch', 'duckdb') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_an_intact_frame_of_an_unknown_type_or_content_names_both_releases():
    cursor = Cursor(1, 2)
    for frame_type, payload in ((77, b""), (frames.HEADER, b"{}"), (frames.BLOCK, b"short"), (frames.EVENT, b"[1]")):
        with pytest.raises(JournalError, match=f"type {frame_type} that ends at .* is intact but not understood"):
            frames.decode_record(frame_type, payload, cursor)


@settings(deadline=None)
@given(st.binary(max_size=64))
def test_no_bytes_are_taken_for_a_head_by_chance(content):
    assert frames.decode_head(content) is None


@pytest.mark.parametrize("has_library", [True, False])
@pytest.mark.parametrize("num_series", [0, 1, 3, 700])
def test_a_frame_that_is_used_again_is_that_of_its_block_byte_for_byte(monkeypatch, has_library, num_series):
    if not has_library:
        monkeypatch.setattr(frames, "builtin", lambda _name: None)
    series = np.arange(num_series, dtype=np.uint32)[::-1].copy()
    frame = frames.BlockFrame(series)
    assert (frame._seal is not None) == has_library

    for sequence, step, time_s in [(0, 0, 0.0), (7, -1, 1.7e9), (2**40, 2**40, math.inf)]:
        values = np.random.default_rng(sequence).normal(size=(8, num_series))
        frame.values[:] = memoryview(values.tobytes()).cast("d")
        frame.step, frame.time_s = step, time_s

        block = StatBlock(step=step, time_s=time_s, series=series, values=values)
        expected, _ = frames.encode_frame(frames.BLOCK, sequence, frames.encode_block(block))
        assert bytes(frame.sealed(sequence)) == b"".join(expected)
