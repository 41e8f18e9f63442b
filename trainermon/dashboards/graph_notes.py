"""What a person has written at the nodes of a graph, and which modules they have matched by hand: beside the dump.

The next graph shows the notes, and every comparison heeds the matches. Read and written by whoever serves the page.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

from trainermon.core.errors import DumpError
from trainermon.core.private_files import replace_file

NOTES_FILE = "graph_notes.json"
MAX_BYTES = 1 << 20
_MAX_TEXT = 10_000


class HandMatch(NamedTuple):
    """Modules of the target, and those of the golden dump that do the same: paths with their classes, `fc1.Linear`."""

    target: tuple[str, ...]
    golden: tuple[str, ...]


class GraphNotes(NamedTuple):
    """What a person has added to a graph.

    Attributes:
        notes: Texts by what they stand at: the key of a call, or the path of a group.
        matches: Modules that were matched by hand, in the order in which that was done.
    """

    notes: dict[str, str]
    matches: tuple[HandMatch, ...]

    def as_json(self) -> dict[str, Any]:
        """Return what the file and the page hold."""
        return {"notes": self.notes, "matches": [one._asdict() for one in self.matches]}


NO_NOTES = GraphNotes({}, ())


def notes_file(path: Path) -> Path:
    """Return where the notes on the dumps at `path` are: in that folder, or beside that file."""
    return (path if path.is_dir() else path.parent) / NOTES_FILE


def read_notes(path: Path) -> GraphNotes:
    """Return the notes on the dumps at `path`; none if nobody has written any.

    Raises:
        DumpError: The file is damaged.
    """
    file = notes_file(path)
    try:
        with open(file, "rb", opener=_regular) as opened:
            content = opened.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return NO_NOTES
    except OSError as error:
        raise DumpError(f"{file} cannot be read: {error.strerror}") from error
    try:
        return parse_notes(content)
    except ValueError as error:
        raise DumpError(f"{file}: {error}; mend it, or remove it") from error


def parse_notes(content: bytes) -> GraphNotes:
    """Return the notes in a file, or in what a page has sent.

    Raises:
        ValueError: They are not of that form.
    """
    if len(content) > MAX_BYTES:
        raise ValueError(f"found more than {MAX_BYTES >> 20} MiB, expected notes")
    try:
        return notes_of(json.loads(content))
    except RecursionError:
        raise ValueError("they are nested too deeply, expected an object with notes and matches") from None


def notes_of(found: Any) -> GraphNotes:
    """Return the notes in parsed JSON.

    Raises:
        ValueError: They are not of that form.
    """
    if not isinstance(found, dict) or not {"notes", "matches"} >= set(found):
        raise ValueError("expected an object with notes and matches")
    notes, matches = found.get("notes", {}), found.get("matches", [])
    if not isinstance(notes, dict) or not all(isinstance(one, str) and len(one) <= _MAX_TEXT for one in notes.values()):
        raise ValueError(f"notes: expected texts of up to {_MAX_TEXT:,} letters by name")
    if not isinstance(matches, list):
        raise ValueError("matches: expected a list")  # noqa: TRY004  # as all that is wrong with the file
    return GraphNotes(notes, tuple(map(_match, matches)))


def write_notes(path: Path, notes: GraphNotes) -> None:
    """Write the notes on the dumps at `path`; nobody else may read them.

    Raises:
        OSError: The file cannot be written.
    """
    replace_file(notes_file(path), (json.dumps(notes.as_json(), indent=1, ensure_ascii=False) + "\n").encode())


def _regular(path: str, flags: int) -> int:
    """Open a file that is one: whoever reads a pipe would wait for ever."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file", path)


def _match(value: Any) -> HandMatch:
    sides: list[Any] = [value.get("target"), value.get("golden")] if isinstance(value, dict) else [None]
    for side in sides:
        if not isinstance(side, list) or not side or not all(isinstance(one, str) and one for one in side):
            raise ValueError("matches: expected a target and a golden, each a list of modules with their classes")
    return HandMatch(tuple(sides[0]), tuple(sides[1]))
