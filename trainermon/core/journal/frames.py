"""The journal's format: frames, their payloads and the values they decode to. Byte for byte: docs/reference/journal.md.

A file is a sequence of frames, a frame a fixed head and a payload. The head carries its own checksum, so that its
length can be trusted before the payload is there. Nothing here touches a file.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from trainermon.core import events
from trainermon.core.errors import JournalError
from trainermon.core.events import RankEvent
from trainermon.core.native.builtins import builtin
from trainermon.core.native.checksum import WORTH, crc32
from trainermon.core.values import (
    NUM_BINS,
    STATISTICS,
    BlockHistograms,
    Coordinates,
    Kind,
    Placement,
    SeriesKey,
    StatBlock,
    as_plain,
    well_formed,
)

FORMAT_VERSION = 1

MAGIC = b"\xb1TMJ"
HEADER, SERIES, BLOCK, EVENT, END, COUNTED_BLOCK = range(1, 7)

# magic, format version, type, sequence, payload length, payload CRC, reserved, CRC of all before: the same in every
# format version, so that a reader can always name the version that it found.
_HEAD = struct.Struct("<4sHHQIII")
_HEAD_CRC = struct.Struct("<I")
HEAD_BYTES = _HEAD.size + _HEAD_CRC.size
# step, time, number of series, number of statistics; then float64 [statistics, series], then uint32 [series].
_BLOCK = struct.Struct("<qdII")
_ROW_BYTES = 8 * len(STATISTICS) + 4
# number of histograms, of bins, bytes of a count; then uint32 [histograms] places, then uint [histograms, bins] counts.
_COUNTS = struct.Struct("<III")


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """A position in one rank's journal, between two records; later positions are greater.

    Attributes:
        file: Number of the file.
        offset: Byte in it.
    """

    file: int = 0
    offset: int = 0


START = Cursor(0, 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Who writes a journal, and the series that it has named so far.

    Attributes:
        run_id: The run.
        attempt: Counts the starts of this rank in this run.
        coordinates: The rank's position in the job.
        host: Name of its node.
        pid: Its process id.
        started_s: Unix time of its start.
        version: Names format and package, for people.
        series: The series table: a series' id is its position in it.
        placements: How the tensor of each is placed; parallel to `series`.
    """

    run_id: str
    attempt: int
    coordinates: Coordinates
    host: str
    pid: int
    started_s: float
    version: str = f"journal {FORMAT_VERSION}"
    series: tuple[SeriesKey, ...] = ()
    placements: tuple[Placement | None, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeaderRecord:
    """The record at the beginning of a journal file, or where the reader enters one: says who writes, and which series.

    It replaces everything known about the writer. `cursor` is the position behind it, `header` the content.
    """

    cursor: Cursor
    header: Header


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SeriesRecord:
    """The journal record that adds series to the table, with consecutive ids from `first_id` on.

    `keys` are the series, `placements` how their tensors are placed; `cursor` is the position behind the record.
    """

    cursor: Cursor
    first_id: int
    keys: tuple[SeriesKey, ...]
    placements: tuple[Placement | None, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockRecord:
    """The journal record of one step: the moments of all series.

    `block.series` is a uint32 array [n] of series ids, `block.values` float64 [8, n]; both are read-only, and so are
    the arrays of `block.histograms`. `cursor` is the position behind it.
    """

    cursor: Cursor
    block: StatBlock


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """The journal record of something that happened on the rank: a replay, a dump, a warning.

    `cursor`: the position behind it.
    """

    cursor: Cursor
    event: RankEvent


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord:
    """The journal record of an orderly end: nothing more comes from this attempt. `cursor`: the position behind it."""

    cursor: Cursor


Record = HeaderRecord | SeriesRecord | BlockRecord | EventRecord | EndRecord


@dataclasses.dataclass(frozen=True, slots=True)
class FrameHead:
    """The head of a frame (one record in a journal file), whose own checksum was right.

    Attributes:
        version: Version of the format.
        type: Which kind of record.
        sequence: Number of the record.
        length: Bytes of the payload.
        crc: Checksum of the payload.
    """

    version: int
    type: int
    sequence: int
    length: int
    crc: int


def encode_frame(frame_type: int, sequence: int, payload: Sequence[Any]) -> tuple[list[Any], int]:
    """Return a journal record as it stands in the file, and how many bytes that is; nothing is copied.

    It is buffers: the head, and those of `payload`. `sequence` is the record's number. Cost: one CRC of the payload.
    """
    crc = length = 0
    for buffer in payload:
        size = memoryview(buffer).nbytes
        crc = crc32(buffer, crc) if size >= WORTH else zlib.crc32(buffer, crc)
        length += size
    head = _HEAD.pack(MAGIC, FORMAT_VERSION, frame_type, sequence, length, crc, 0)
    return [head + _HEAD_CRC.pack(zlib.crc32(head)), *payload], HEAD_BYTES + length


def decode_head(data: memoryview | bytes) -> FrameHead | None:
    """Return the frame head at the beginning of `data`, None if there is no intact one."""
    if len(data) < HEAD_BYTES:
        return None
    magic, version, frame_type, sequence, length, crc, _ = _HEAD.unpack_from(data)
    if magic != MAGIC or _HEAD_CRC.unpack_from(data, _HEAD.size)[0] != zlib.crc32(data[: _HEAD.size]):
        return None
    return FrameHead(version, frame_type, sequence, length, crc)


def encode_series(keys: Sequence[SeriesKey], placements: Sequence[Placement | None]) -> bytes:
    """Return the JSON of some series and their placements for the journal: commas between, no brackets around."""
    rows = (
        [
            *(key.kind.value, well_formed(key.name), well_formed(key.slot), key.call, key.micro_step, key.stage),
            None if placement is None else list(dataclasses.astuple(placement)),
        ]
        for key, placement in zip(keys, placements, strict=True)
    )
    return ",".join(json.dumps(row, separators=(",", ":")) for row in rows).encode()


def encode_header_start(header: Header) -> bytes:
    """Return a header's JSON up to where the series stand; `]}` ends it."""
    fields = {
        field.name: as_plain(getattr(header, field.name))
        for field in dataclasses.fields(header)
        if field.name not in ("series", "placements")
    }
    return json.dumps(fields)[:-1].encode() + b', "series": ['


class BlockFrame:
    """A block's record as it stands in the file, in memory that is used again for each step with the same series.

    Args:
        series: Their ids, a C-contiguous buffer of uint32.

    Attributes:
        memory: The record.
        values: Where the rows are to be written, float64 `[8 * series]`, one statistic of all series after the other.
        step: The step of the block.
        time_s: Its Unix time.
    """

    def __init__(self, series: Any) -> None:
        ids = memoryview(series).tobytes()
        num_series = len(ids) // 4
        payload_bytes = _BLOCK.size + num_series * _ROW_BYTES
        self.memory = memory = bytearray(HEAD_BYTES + payload_bytes)
        _HEAD.pack_into(memory, 0, MAGIC, FORMAT_VERSION, BLOCK, 0, payload_bytes, 0, 0)
        _BLOCK.pack_into(memory, HEAD_BYTES, 0, 0.0, num_series, len(STATISTICS))
        begin, end = HEAD_BYTES + _BLOCK.size, len(memory) - len(ids)
        memory[end:] = ids
        self.values = memoryview(memory)[begin:end].cast("d")
        self.step, self.time_s = 0, 0.0
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._seal = builtin("seal_block")

    def sealed(self, sequence: int) -> bytearray:
        """Return the record with the number `sequence` and its checksums, once its rows are there."""
        memory = self.memory
        if self._seal is None or not self._seal(self._address, len(memory), sequence, self.step, self.time_s):
            _BLOCK.pack_into(
                memory, HEAD_BYTES, self.step, self.time_s, len(self.values) // len(STATISTICS), len(STATISTICS)
            )
            crc = crc32(memoryview(memory)[HEAD_BYTES:])
            _HEAD.pack_into(memory, 0, MAGIC, FORMAT_VERSION, BLOCK, sequence, len(memory) - HEAD_BYTES, crc, 0)
            _HEAD_CRC.pack_into(memory, _HEAD.size, zlib.crc32(memoryview(memory)[: _HEAD.size]))
        return memory


def encode_block(block: StatBlock) -> list[Any]:
    """Return the bytes of a block for the journal, as buffers; nothing is copied.

    Raises:
        ValueError: The two arrays are not contiguous, or do not belong together.
    """
    series, values = memoryview(block.series), memoryview(block.values)
    num_series = series.nbytes // 4
    if not (series.c_contiguous and values.c_contiguous) or values.nbytes != num_series * 8 * len(STATISTICS):
        raise ValueError(
            f"a block needs C-contiguous uint32 ids [n] and float64 values [{len(STATISTICS)}, n], "
            f"got {series.nbytes} bytes of ids and {values.nbytes} bytes of values"
        )
    return [_BLOCK.pack(block.step, block.time_s, num_series, len(STATISTICS)), block.values, block.series]


def encode_histograms(histograms: BlockHistograms) -> list[Any]:
    """Return what follows a block's own bytes where it has histograms, as buffers; nothing is copied.

    Raises:
        ValueError: The two arrays are not contiguous, or do not belong together.
    """
    places, counts = memoryview(histograms.places), memoryview(histograms.counts)
    if not (places.c_contiguous and counts.c_contiguous) or counts.shape != (places.nbytes // 4, NUM_BINS):
        raise ValueError(
            f"histograms need C-contiguous uint32 places [m] and counts [m, {NUM_BINS}], "
            f"got {places.nbytes} bytes of places and counts of shape {counts.shape}"
        )
    return [_COUNTS.pack(*counts.shape, counts.itemsize), histograms.places, histograms.counts]


def encode_event(event: RankEvent) -> bytes:
    """Return an event as JSON for the journal.

    What JSON does not have becomes text, and a lone surrogate a question mark.
    """
    return json.dumps(as_plain(events.encode(event)), default=str, ensure_ascii=False).encode(errors="replace")


def decode_header(payload: bytes) -> Header:
    """Parse the payload of a header record."""
    fields = json.loads(payload)
    keys, placements = _decode_series(fields.pop("series"))
    coordinates = Coordinates(**fields.pop("coordinates"))
    return Header(coordinates=coordinates, series=keys, placements=placements, **fields)


def decode_record(frame_type: int, payload: bytes, cursor: Cursor) -> Record:
    """Return the record that an intact frame of this format version holds.

    Raises:
        JournalError: The payload means nothing to this release, although its checksum is right.
    """
    try:
        return _DECODERS[frame_type](payload, cursor)
    except (KeyError, ValueError, TypeError, struct.error) as error:
        raise JournalError(
            f"a journal frame of type {frame_type} that ends at {cursor} is intact but not understood ({error!r}); "
            f"expected what format version {FORMAT_VERSION} defines. Run the agent and the training with the same "
            "trainermon release"
        ) from error


def _decode_header_record(payload: bytes, cursor: Cursor) -> HeaderRecord:
    return HeaderRecord(cursor=cursor, header=decode_header(payload))


def _decode_series_record(payload: bytes, cursor: Cursor) -> SeriesRecord:
    fields = json.loads(payload)
    keys, placements = _decode_series(fields["series"])
    return SeriesRecord(cursor=cursor, first_id=fields["first_id"], keys=keys, placements=placements)


def _decode_block_record(payload: bytes, cursor: Cursor) -> BlockRecord:
    import numpy as np  # only readers need it; a rank that only writes must not load it for this

    step, time_s, num_series, num_statistics = _BLOCK.unpack_from(payload)
    if num_statistics != len(STATISTICS) or len(payload) != _block_bytes(payload):
        raise ValueError(f"{len(payload)} bytes for {num_statistics} statistics of {num_series} series")
    values = np.frombuffer(payload, np.dtype("<f8"), num_statistics * num_series, _BLOCK.size)
    series = np.frombuffer(payload, np.dtype("<u4"), num_series, _BLOCK.size + values.nbytes)
    return BlockRecord(
        cursor=cursor,
        block=StatBlock(step=step, time_s=time_s, series=series, values=values.reshape(num_statistics, num_series)),
    )


def _block_bytes(payload: bytes) -> int:
    """Return how many bytes the block itself takes at the beginning of its payload."""
    return int(_BLOCK.size + _BLOCK.unpack_from(payload)[2] * _ROW_BYTES)


def _decode_counted_block_record(payload: bytes, cursor: Cursor) -> BlockRecord:
    import numpy as np

    size = _block_bytes(payload)
    record = _decode_block_record(payload[:size], cursor)
    num_histograms, num_bins, count_bytes = _COUNTS.unpack_from(payload, size)
    begin = size + _COUNTS.size
    end = begin + num_histograms * (4 + num_bins * count_bytes)
    if num_bins != NUM_BINS or count_bytes not in (4, 8) or len(payload) != end:
        raise ValueError(f"{len(payload) - size} bytes for {num_histograms} histograms of {num_bins} bins")
    places = np.frombuffer(payload, np.dtype("<u4"), num_histograms, begin)
    if places.size and int(places.max()) >= record.block.series.size:
        raise ValueError(f"a histogram of place {places.max()} in a block of {record.block.series.size} series")
    counts = np.frombuffer(payload, np.dtype(f"<u{count_bytes}"), num_histograms * num_bins, begin + places.nbytes)
    histograms = BlockHistograms(places=places, counts=counts.reshape(num_histograms, num_bins))
    return BlockRecord(cursor=cursor, block=dataclasses.replace(record.block, histograms=histograms))


def _decode_event_record(payload: bytes, cursor: Cursor) -> EventRecord:
    return EventRecord(cursor=cursor, event=events.decode(dict(_whole_text(payload))))


def _decode_end_record(_payload: bytes, cursor: Cursor) -> EndRecord:
    return EndRecord(cursor=cursor)


def _whole_text(payload: bytes) -> Any:
    """Return what the JSON says, with `?` for every half of a character, which neither a file nor a database takes."""
    value = json.loads(payload)
    if b"\\ud" in payload.lower():  # only an escape may be half a character
        value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    return value


def _decode_series(rows: Sequence[Sequence[Any]]) -> tuple[tuple[SeriesKey, ...], tuple[Placement | None, ...]]:
    keys = tuple(SeriesKey(Kind(row[0]), well_formed(row[1]), well_formed(row[2]), *row[3:6]) for row in rows)
    return keys, tuple(None if row[6] is None else _decode_placement(row[6]) for row in rows)


def _decode_placement(row: Sequence[Any]) -> Placement:
    dtype, shape, offset, length, replicated_over, partitioned_over, in_global_norm, scale = row
    return Placement(
        dtype=dtype,
        shape=tuple(shape),
        offset=offset,
        length=length,
        replicated_over=tuple(replicated_over),
        partitioned_over=tuple(partitioned_over),
        in_global_norm=in_global_norm,
        scale=scale,
    )


_DECODERS: dict[int, Callable[[bytes, Cursor], Record]] = {
    HEADER: _decode_header_record,
    SERIES: _decode_series_record,
    BLOCK: _decode_block_record,
    EVENT: _decode_event_record,
    END: _decode_end_record,
    COUNTED_BLOCK: _decode_counted_block_record,
}
