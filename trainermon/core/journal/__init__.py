"""The append-only, checksummed journal of one rank: written by the rank, followed by the agent, on the node's own disk.

`frames` knows the format, `writer` the rank's side, `reader` the agent's, `files` the names. The writing side uses
only the standard library.
"""

from __future__ import annotations

from trainermon.core.journal.files import list_files, remove_before
from trainermon.core.journal.frames import (
    FORMAT_VERSION,
    START,
    BlockRecord,
    Cursor,
    EndRecord,
    EventRecord,
    Header,
    HeaderRecord,
    Record,
    SeriesRecord,
)
from trainermon.core.journal.reader import JournalReader
from trainermon.core.journal.writer import JournalWriter

__all__ = [
    "FORMAT_VERSION",
    "START",
    "BlockRecord",
    "Cursor",
    "EndRecord",
    "EventRecord",
    "Header",
    "HeaderRecord",
    "JournalReader",
    "JournalWriter",
    "Record",
    "SeriesRecord",
    "list_files",
    "remove_before",
]
