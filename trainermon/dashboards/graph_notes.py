"""What a person has written at the nodes of a graph, and which modules they have matched by hand: beside the dump.

The next graph shows the notes, and every comparison heeds the matches. Whoever serves the page reads them, and merges
what its readers change into what others have written meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
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


class NotesChange(NamedTuple):
    """What one reader has changed: what they saw before, of that alone which they changed, and what they made of it."""

    before: GraphNotes
    after: GraphNotes

    def applied_to(self, notes: GraphNotes) -> GraphNotes:
        """Return `notes` with the change; where somebody else has written at the same place meanwhile, both texts."""
        texts = dict(notes.notes)
        for place in {*self.before.notes, *self.after.notes}:
            seen, own = (side.notes.get(place, "") for side in self)
            texts[place] = _both(seen, texts.get(place, ""), own)
        undone = [one for one in self.before.matches if one not in self.after.matches]
        kept = [one for one in notes.matches if one not in undone]
        done = [one for one in self.after.matches if one not in self.before.matches and one not in kept]
        return GraphNotes({place: text for place, text in texts.items() if text}, (*kept, *done))


_writing = Lock()


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
    """Return the notes in a file.

    Raises:
        ValueError: They are not of that form.
    """
    return notes_of(_parsed(content))


def parse_change(content: bytes) -> NotesChange:
    """Return what a page has sent.

    Raises:
        ValueError: It is not of that form.
    """
    found = _parsed(content)
    if not isinstance(found, dict) or set(found) != {"before", "after"}:
        raise ValueError("expected an object with before and after")
    return NotesChange(notes_of(found["before"]), notes_of(found["after"]))


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
        ValueError: They are too long to be read again.
        OSError: The file cannot be written.
    """
    content = (json.dumps(notes.as_json(), indent=1, ensure_ascii=False) + "\n").encode()
    parse_notes(content)  # what could not be read again is refused now
    replace_file(notes_file(path), content)


def keep_change(path: Path, change: NotesChange) -> GraphNotes:
    """Merge a change into the notes on the dumps at `path`, and return what there is now.

    Raises:
        DumpError: The file is damaged.
        ValueError: Both texts together are too long.
        OSError: The file cannot be written.
    """
    with _alone(notes_file(path).parent):
        notes = change.applied_to(read_notes(path))
        write_notes(path, notes)
    return notes


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other threads out, and other processes where the file system has locks."""
    with _writing:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _both(seen: str, theirs: str, own: str) -> str:
    """Return the text that keeps what two people made of the one that both saw; "" is no note."""
    if own == seen:
        return theirs
    if theirs == seen or theirs in own:
        return own
    return theirs if own in theirs else f"{theirs}\n\n{own}"


def _parsed(content: bytes) -> Any:
    if len(content) > MAX_BYTES:
        raise ValueError(f"found more than {MAX_BYTES >> 20} MiB, expected notes")
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("they are nested too deeply, expected an object with notes and matches") from None


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
