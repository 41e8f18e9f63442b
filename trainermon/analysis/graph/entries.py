"""Reads the entries of a dump one by one, and where each stands in its file, so that it can be read again alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from trainermon.core.errors import DumpError
from trainermon.dump.files.reader import well_formed
from trainermon.dump.files.records import DUMP_FILE, PARTIAL_FILE

try:
    from orjson import loads as _loads
except ImportError:  # the extra `compare` brings it; it needs a third of the time
    _loads = json.loads  # type: ignore[assignment]  # it takes more than is passed here

_DATA = "data"
# Each begins with letters that are found fast, and ends before the value.
_KEY_ENDS = (re.compile(rb'ward(?:\.\d+)?"\s*:\s*(?=\{)'), re.compile(rb's_grad\.\d+"\s*:\s*(?=\{)'))
_BLANK = b" \t\n\r"
_COLON = b" \t\n\r:"
_gap = re.compile(r"[ \t\n\r]*[,:{]?[ \t\n\r]*").match
_decode = json.JSONDecoder().raw_decode


class PlacedEntry(NamedTuple):
    """An entry of a dump, and where its JSON text stands.

    Attributes:
        key: Its key.
        value: The parsed entry.
        start: Where its text begins in the file, in bytes.
        length: How many bytes it has.
    """

    key: str
    value: dict[str, Any]
    start: int
    length: int


def read_entries(directory: Path) -> Iterator[PlacedEntry]:
    """Yield the entries of the dump in `directory`, in the order of its file.

    Needs memory for the text of the file, and for one entry. Of a dump that was cut off the whole lines are read.

    Raises:
        DumpError: There is no dump, or it is damaged.
    """
    with well_formed(directory):
        if (directory / DUMP_FILE).is_file():
            yield from _entries_of(directory / DUMP_FILE)
        elif (directory / PARTIAL_FILE).is_file():
            yield from _lines_of(directory / PARTIAL_FILE)
        else:
            raise DumpError(f"{directory} holds no dump: expected {DUMP_FILE}, or {PARTIAL_FILE} of a killed process")


def read_entry(path: Path, start: int, length: int) -> dict[str, Any]:
    """Return the entry whose text has `length` bytes from byte `start` of the file `path`.

    Raises:
        DumpError: The file has changed, and no entry stands there.
    """
    with path.open("rb") as file:
        file.seek(start)
        text = file.read(length)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise DumpError(f"{path} has no entry at byte {start} ({error}): it has changed since it was read") from error
    found = value.get("value", value) if isinstance(value, dict) else None
    if not isinstance(found, dict):
        raise DumpError(f"{path} has no entry at byte {start}: it has changed since it was read")
    return found


def _entries_of(path: Path) -> Iterator[PlacedEntry]:
    """Yield the entries of dump.json. Where keys look like those of calls, what is between two is one entry's text.

    That is certain if it is JSON: an object in JSON ends in one place only. Else the file is parsed from there on.
    """
    text = path.read_bytes()
    places = _likely_keys(text)
    position = _start_of_data(path, text, places[0][0] if places else len(text))
    for (key_begin, begin), (following, _) in pairwise(places):
        if key_begin != position:
            break
        entry = text[begin:following].rstrip(_BLANK).removesuffix(b",").rstrip(_BLANK)
        try:
            key, value = _parse(text[key_begin:begin].rstrip(_COLON)), _parse(entry)
        except (ValueError, RecursionError):
            break
        yield PlacedEntry(key, value, begin, len(entry))
        position = following
    yield from _parsed_from(text, position)


def _likely_keys(text: bytes) -> list[tuple[int, int]]:
    """Return where keys of calls seem to begin, and their values, in order."""
    ends = (found for ending in _KEY_ENDS for found in ending.finditer(text))
    return sorted((text.rfind(b'"', 0, found.start()), found.end()) for found in ends)


def _parse(text: bytes) -> Any:
    """Return what JSON stands for; orjson knows no NaN and no Infinity."""
    try:
        return _loads(text)
    except ValueError:
        return json.loads(text)


def _parsed_from(raw: bytes, begin_bytes: int) -> Iterator[PlacedEntry]:
    """Yield the entries from the key at a byte on."""
    text = raw[begin_bytes:].decode()
    position, before, at_byte = 0, 0, begin_bytes
    while text[position] != "}":
        key, position = _decode(text, position)
        begin = _skip(text, position)
        value, end = _decode(text, begin)
        at_byte += len(text[before:begin].encode())
        length = len(text[begin:end].encode())
        if isinstance(value, dict):
            yield PlacedEntry(key, value, at_byte, length)
        before, at_byte = end, at_byte + length
        position = _skip(text, end)


def _start_of_data(path: Path, raw: bytes, likely: int) -> int:
    """Return the byte at which the first key within the object "data" begins; `likely` is where a call's key does."""
    try:
        return _find_data(path, raw[:likely])
    except (ValueError, IndexError):  # that was none
        return _find_data(path, raw)


def _find_data(path: Path, raw: bytes) -> int:
    text = raw.decode()
    position = _skip(text, 0)
    while text[position] != "}":
        name, position = _decode(text, position)
        position = _skip(text, position)
        if name == _DATA and text[position] == "{":
            return len(text[: _skip(text, position)].encode())
        _, position = _decode(text, position)
        position = _skip(text, position)
    raise DumpError(f'{path} has no "data" object: not a dump')


def _skip(text: str, position: int) -> int:
    return _gap(text, position).end()  # type: ignore[union-attr]  # it matches the empty text, too


def _lines_of(path: Path) -> Iterator[PlacedEntry]:
    start = 0
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return
        match record:
            case {"key": str(key), "value": dict(value)}:
                yield PlacedEntry(key, value, start, len(line))
        start += len(line)
