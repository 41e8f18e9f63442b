"""Reads the entries of a dump one by one, and where each stands in its file, so that it can be read again alone."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Generator, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trainermon.core.errors import DumpError
from trainermon.dump.files.reader import parse_json, read_integer, well_formed
from trainermon.dump.files.records import DUMP_FILE, PARTIAL_FILE

_DATA = "data"
# Each begins with letters that are found fast, and ends before the value.
_KEY_ENDS = (re.compile(rb'ward(?:\.\d+)?"\s*:\s*(?=\{)'), re.compile(rb's_grad\.\d+"\s*:\s*(?=\{)'))
_BLANK = b" \t\n\r"
_COLON = b" \t\n\r:"
_BEHIND = set(",:}] \t\n\r")
"""What may stand behind a value: what has been read of a number may be one, too."""
_gap = re.compile(r"[ \t\n\r]*[,:{]?[ \t\n\r]*").match
_decode = json.JSONDecoder(parse_int=read_integer).raw_decode
_new = tuple.__new__  # what the constructor of a named tuple comes to, in a third of the time
_PIECE = 4 << 20
"""A file is read in pieces of so many bytes; of more only where one entry has more."""
_WINDOW = 1 << 18
"""Likewise where a parser goes along."""


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

    Needs memory for a few megabytes of text, or for the largest entry's, whatever the size of the file. Of a dump that
    was cut off the whole lines are read.

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
    return next(read_entries_at(path, [(start, length)]))


def read_entries_at(path: Path, places: Iterable[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """Yield the entry at each of `places`, the first byte and the number of bytes, of the file `path`, opened once.

    Raises:
        DumpError: The file has changed, and no entry stands there.
    """
    with path.open("rb") as file:
        for start, length in places:
            file.seek(start)
            try:
                value = parse_json(file.read(length))
            except ValueError as error:
                raise DumpError(
                    f"{path} has no entry at byte {start} ({error}): it has changed since it was read"
                ) from error
            found = value.get("value", value) if isinstance(value, dict) else None
            if not isinstance(found, dict):
                raise DumpError(f"{path} has no entry at byte {start}: it has changed since it was read")
            yield found


def _entries_of(path: Path) -> Iterator[PlacedEntry]:
    """Yield the entries of dump.json: as they stand between two keys, and where that fails as a parser goes along."""
    with path.open("rb") as file:
        start = _start_of_data(path, file)
        start = yield from _between_keys(file, start)
        yield from _parsed_from(file, start)


def _between_keys(file: BinaryIO, start: int) -> Generator[PlacedEntry, None, int]:
    """Yield the entries from the key at byte `start` on; return the byte of the first key that it cannot be sure of.

    Where keys look like those of calls, what is between two is one entry's text. That is certain if it is JSON: an
    object in JSON ends in one place only. The last entry has no key behind it.
    """
    file.seek(start)
    text = b""
    while piece := file.read(max(_PIECE, len(text))):
        text += piece
        done = 0
        for (key_begin, begin), (following, _) in pairwise(_likely_keys(text)):
            if key_begin != done:
                return start + done
            entry = text[begin:following].rstrip(_BLANK).removesuffix(b",").rstrip(_BLANK)
            try:
                key, value = parse_json(text[key_begin:begin].rstrip(_COLON)), parse_json(entry)
            except (ValueError, RecursionError):
                return start + done
            yield _new(PlacedEntry, (key, value, start + begin, len(entry)))
            done = following
        start += done
        text = text[done:]
    return start


def _likely_keys(text: bytes) -> list[tuple[int, int]]:
    """Return where keys of calls seem to begin, and their values, in order."""
    ends = (found for ending in _KEY_ENDS for found in ending.finditer(text))
    return sorted((text.rfind(b'"', 0, found.start()), found.end()) for found in ends)


def _parsed_from(file: BinaryIO, start: int) -> Iterator[PlacedEntry]:
    """Yield the entries from the key at byte `start` on."""
    text = _PiecewiseText(file, start)
    while text.letter() != "}":
        key, _, _ = text.value()
        value, begin, length = text.value()
        if isinstance(value, dict):
            yield PlacedEntry(key, value, begin, length)


def _start_of_data(path: Path, file: BinaryIO) -> int:
    """Return the byte at which the first key within the object "data" begins."""
    text = _PiecewiseText(file, 0)
    text.enter()
    while text.letter() != "}":
        name, _, _ = text.value()
        if name == _DATA and text.letter() == "{":
            text.enter()
            return text.at_byte
        text.value()
    raise DumpError(f'{path} has no "data" object: not a dump')


class _PiecewiseText:
    """The text of a JSON file from byte `start` on, read value by value and forgotten.

    Attributes:
        at_byte: Where the next value begins, in bytes.
    """

    def __init__(self, file: BinaryIO, start: int) -> None:
        file.seek(start)
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._place = 0
        self.at_byte = start

    def letter(self) -> str:
        """Return with which letter the next value begins, or `}`.

        Raises:
            IndexError: The text ends before.
        """
        while self._place == len(self._text) and self._read_on():
            pass
        return self._text[self._place]

    def enter(self) -> None:
        """Go to what is within the object that begins here, or to the value behind a comma or a colon."""
        end = _skip(self._text, self._place)
        while end == len(self._text) and self._read_on():
            end = _skip(self._text, self._place)
        self._go_to(end)

    def value(self) -> tuple[Any, int, int]:
        """Return the next value, the byte at which it begins, and how many bytes it has.

        Raises:
            ValueError: There is none.
        """
        begin = self.at_byte
        value, end = self._decoded()
        self._go_to(end)
        length = self.at_byte - begin
        self.enter()
        return value, begin, length

    def _decoded(self) -> tuple[Any, int]:
        """Return the next value, and where it ends in the text that is read so far."""
        found = self._attempted()
        while (found is None or self._text[found[1] : found[1] + 1] not in _BEHIND) and self._read_on():
            found = self._attempted()
        return found or _decode(self._text, self._place)

    def _attempted(self) -> tuple[Any, int] | None:
        try:
            return _decode(self._text, self._place)
        except ValueError:
            return None

    def _go_to(self, place: int) -> None:
        self.at_byte += len(self._text[self._place : place].encode())
        self._place = place

    def _read_on(self) -> bool:
        """Read as much again as is there; return whether there was more. What lies behind is forgotten."""
        raw = self._file.read(max(_WINDOW, len(self._text) - self._place))
        if raw:
            self._text, self._place = self._text[self._place :] + self._decoder.decode(raw), 0
        return bool(raw)


def _skip(text: str, position: int) -> int:
    return _gap(text, position).end()  # type: ignore[union-attr]  # it matches the empty text, too


def _lines_of(path: Path) -> Iterator[PlacedEntry]:
    start = 0
    with path.open("rb") as file:
        for line in file:
            try:
                record = parse_json(line)
            except (ValueError, RecursionError):
                return
            match record:
                case {"key": str(key), "value": dict(value)}:
                    yield PlacedEntry(key, value, start, len(line))
            start += len(line)
