"""Where the records of a zip archive are in a file, if they are stored as they are; nothing is unpacked.

torch's own files are zip archives, and each item in a file of torch's distributed checkpoints is one.
Source: PKWARE APPNOTE 6.3.10, sections 4.3.7 (local header), 4.3.12 (directory), 4.3.14 to 4.3.16 (its end).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from trainermon.analysis.checkpoint.formats.regular_files import RegularFile
from trainermon.core.errors import CheckpointError

_LOCAL = struct.Struct("<4s5H3I2H")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_MAX_DIRECTORY_BYTES = 1 << 28
_TAIL = 1024  # holds the end and, of a small archive, the directory
_ENCRYPTED = 1


class ZipRecord(NamedTuple):
    """A record: where its local header is in the file, how long its content is, and the CRC-32 of it; 0: none."""

    header: int
    size: int
    crc: int


def zip_records(file: RegularFile, start: int, length: int) -> dict[str, ZipRecord]:
    """Return the records of the archive that takes `length` bytes of a file from `start` on.

    Raises:
        CheckpointError: it is no archive, is cut off, or its records are compressed or encrypted.
    """
    tail = file.read(start + max(length - _TAIL, 0), min(length, _TAIL))
    place = tail.rfind(b"PK\5\6")
    if place < 0 or len(tail) - place < _END.size:
        raise _cut(file)
    _, _, _, _, num_entries, size, directory, _ = _END.unpack_from(tail, place)
    locator = place - _LOCATOR.size
    if locator >= 0 and tail.startswith(b"PK\6\7", locator):
        end = file.read(start + _LOCATOR.unpack_from(tail, locator)[2], _END64.size)
        if not end.startswith(b"PK\6\6"):
            raise _cut(file)
        num_entries, size, directory = _END64.unpack(end)[7:10]
    if size > min(_MAX_DIRECTORY_BYTES, length) or directory + size > length:
        raise _cut(file)
    inside = directory - (length - len(tail))
    raw = tail[inside : inside + size] if inside >= 0 else file.read(start + directory, size)
    return _entries(file, raw, num_entries, start, length)


def archives_in(file: RegularFile) -> Iterator[tuple[int, int]]:
    """Yield where archives are in a file, and how long, from the last to the first: they stand one behind the other.

    What stands before something else than an archive is left out.
    """
    end = file.size
    while end > 0:
        begin = max(end - _TAIL, 0)
        tail = file.read(begin, end - begin)
        place = len(tail) - _END.size
        if place < 0 or not tail.startswith(b"PK\5\6", place):
            return
        size, directory = _END.unpack_from(tail, place)[5:7]
        locator = place - _LOCATOR.size
        if locator >= 0 and tail.startswith(b"PK\6\7", locator):
            place = locator - _END64.size
            if place < 0 or not tail.startswith(b"PK\6\6", place):
                return
            size, directory = _END64.unpack_from(tail, place)[8:10]
        start = begin + place - size - directory
        if not 0 <= start < end:
            return
        yield start, end - start
        end = start


def _entries(file: RegularFile, raw: bytes, num_entries: int, start: int, length: int) -> dict[str, ZipRecord]:
    found: dict[str, ZipRecord] = {}
    place = 0
    for _ in range(num_entries):
        if len(raw) - place < _ENTRY.size or not raw.startswith(b"PK\1\2", place):
            raise _cut(file)
        entry = _ENTRY.unpack_from(raw, place)
        flags, method, packed, size, header = entry[3], entry[4], entry[8], entry[9], entry[16]
        name_end = place + _ENTRY.size + entry[10]
        name = raw[place + _ENTRY.size : name_end].decode("utf-8", "replace")
        if 0xFFFFFFFF in (packed, size, header):
            size, packed, header = _long_sizes(raw[name_end : name_end + entry[11]], size, packed, header)
        place = name_end + entry[11] + entry[12]
        if method or flags & _ENCRYPTED:
            raise CheckpointError(
                f"{file.path} is a compressed or encrypted archive: save it again with torch.save, which does neither"
            )
        if size != packed or header + size > length or name in found:
            raise CheckpointError(f"{file.path} is damaged: its record {name!r} ends behind it, or is there twice")
        found[name] = ZipRecord(start + header, size, entry[7])
    return found


def _long_sizes(extra: bytes, *short: int) -> list[int]:
    """Return what the extra field of zip64 says of those numbers that have no room in the entry."""
    place = 0
    while place + 4 <= len(extra):
        tag, size = struct.unpack_from("<2H", extra, place)
        if tag == 1:
            long = iter(struct.unpack_from(f"<{size // 8}Q", extra[: place + 4 + size], place + 4))
            return [next(long, number) if number == 0xFFFFFFFF else number for number in short]
        place += 4 + size
    return list(short)


def content_start(file: RegularFile, record: ZipRecord) -> int:
    """Return where the content of a record begins in the file.

    Raises:
        CheckpointError: there is no such record, or it ends behind the file.
    """
    header = file.read(record.header, _LOCAL.size)
    if not header.startswith(b"PK\3\4"):
        raise _cut(file)
    fields = _LOCAL.unpack(header)
    begin: int = record.header + _LOCAL.size + fields[9] + fields[10]
    if begin + record.size > file.size:
        raise _cut(file)
    return begin


def is_named(file: RegularFile, record: ZipRecord, name: str) -> bool:
    """Return whether the header of a record, too, gives it the name that it has in the directory."""
    expected = name.encode()
    length = _LOCAL.unpack(file.read(record.header, _LOCAL.size))[9]
    return length == len(expected) and file.read(record.header + _LOCAL.size, length) == expected


def _cut(file: RegularFile) -> CheckpointError:
    return CheckpointError(f"{file.path} is cut off or damaged: its zip archive does not add up; copy it again")
