"""What a segment is: its columns, its name, its metadata, and the one way in which it comes into being.

A segment is a Parquet file that holds the rows of all kinds and ranks of a stretch of the run. Its name is a range of
numbers, `<first>-<last>.parquet`: the writer makes `n-n`, a merge of `a-a` … `b-b` makes `a-b`. The live set of a
directory is the cover of its ranges, so that neither a manifest nor an order of deletion is needed: whatever lies
inside the range of another file is dead, and may still be there or not.

The rename of a finished file is the commit, of the rows and of the position in every journal alike, because the
positions stand in the file's own metadata. This module decides nothing about *what* goes into a segment.
"""

# ruff: noqa: S608  (the SQL consists of our own column names and of quoted paths)

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from trainermon.core.errors import StoreError
from trainermon.core.journal import Cursor

if TYPE_CHECKING:  # imported on first use: 36 MB and 0.1 s that an agent without a store need not pay
    import duckdb

    from trainermon.exporters.store.buckets import BucketPath

    RunPath = Path | BucketPath  # of a file or folder of a run, on disk or in object storage

AnyPath = TypeVar("AnyPath", bound="RunPath")

FORMAT_VERSION = 1
METADATA_KEY = "trainermon"
ROW_GROUP_ROWS = 40_960  # against 122 880: 25 MB less while writing, queries as fast, as many bytes
SPILL_DIRECTORY = ".spill"
DAMAGED = ".damaged"
LOCK_FILE = ".compact.lock"

_ATTEMPTS = 5
_MAGIC = b"PAR1"
_MIN_BYTES = 12

# The identity of a series and of a row, then the moments, then how many steps a row stands for, then the histogram.
COLUMNS: Mapping[str, str] = {
    "kind": "VARCHAR",
    "name": "VARCHAR",
    "slot": "VARCHAR",
    "call": "INTEGER",
    "micro_step": "INTEGER",
    "stage": "INTEGER",
    "in_global_norm": "BOOLEAN",
    "scale": "DOUBLE",
    "dtype": "VARCHAR",
    "shape": "VARCHAR",
    "attempt": "INTEGER",
    "rank": "INTEGER",
    "step": "BIGINT",
    "time_s": "DOUBLE",
    "count": "BIGINT",
    "min": "DOUBLE",
    "max": "DOUBLE",
    "sum": "DOUBLE",
    "sum_sq": "DOUBLE",
    "zeros": "BIGINT",
    "nans": "BIGINT",
    "infs": "BIGINT",
    "num_steps": "INTEGER",
    "histogram": "BIGINT[]",
}
SERIES_COLUMNS = tuple(COLUMNS)[:10]

_ERROR_CLASS = re.compile(r"^(?:(?:[A-Z]\w* ){1,3}Error|\w+Exception): ")
_NAME = re.compile(r"(\d{10})-(\d{10})\.parquet")


class OtherFormatError(ValueError):
    """Raised for a segment that another release wrote, in a format that this one cannot read; it is not damaged."""


class SegmentFile(NamedTuple):
    """A segment (Parquet file of the store), by its name.

    Attributes:
        first: The first number that it covers.
        last: The last; a merged segment covers several.
        path: The file.
    """

    first: int
    last: int
    path: Path


class JournalPosition(NamedTuple):
    """How far the journal of a rank has been stored.

    Attributes:
        attempt: The start of the job that wrote the last stored record.
        cursor: File and offset behind it.
    """

    attempt: int
    cursor: Cursor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SegmentMetadata:
    """What a segment knows beside its rows; everything except the last three is cumulative over the run's segments.

    `positions`: by rank, where to go on reading. `attempts`: by attempt, the first step that any rank of this node
    stored. `coordinates`: by rank, the newest. `started_s`: by rank and attempt, the Unix time at which it began; ranks
    of segments that do not say so are left out. `window_steps`: 1 in full detail, else the width of the steps that were
    merged into one row. `num_rows` and `last_time_s` (Unix time of the newest row) describe this file alone.
    """

    positions: Mapping[int, JournalPosition] = dataclasses.field(default_factory=dict)
    attempts: Mapping[int, int] = dataclasses.field(default_factory=dict)
    coordinates: Mapping[int, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    started_s: Mapping[tuple[int, int], float] = dataclasses.field(default_factory=dict)
    window_steps: int = 1
    num_rows: int = 0
    last_time_s: float = 0.0

    def to_json(self) -> str:
        """Return the metadata as the JSON text that stands in the segment's footer."""
        return json.dumps(
            {
                "format": FORMAT_VERSION,
                "positions": {
                    rank: [at.attempt, at.cursor.file, at.cursor.offset] for rank, at in self.positions.items()
                },
                "attempts": dict(self.attempts),
                "coordinates": {rank: dict(places) for rank, places in self.coordinates.items()},
                "started_s": [[*place, time_s] for place, time_s in self.started_s.items()],
                "window_steps": self.window_steps,
                "num_rows": self.num_rows,
                "last_time_s": self.last_time_s,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> SegmentMetadata:
        """Parse the JSON text that `to_json` made.

        Raises:
            ValueError, KeyError, TypeError: It was written in another format.
        """
        plain = json.loads(text)
        if plain["format"] != FORMAT_VERSION:
            raise OtherFormatError(f"found format {plain['format']}, expected {FORMAT_VERSION}")
        return cls(
            positions={
                int(rank): JournalPosition(attempt, Cursor(file, offset))
                for rank, (attempt, file, offset) in plain["positions"].items()
            },
            attempts={int(attempt): step for attempt, step in plain["attempts"].items()},
            coordinates={int(rank): places for rank, places in plain["coordinates"].items()},
            started_s={(rank, attempt): time_s for rank, attempt, time_s in plain.get("started_s", ())},
            window_steps=plain["window_steps"],
            num_rows=plain["num_rows"],
            last_time_s=plain["last_time_s"],
        )


def cover(directory: Path) -> list[SegmentFile]:
    """Return the live segments of a directory in order of their numbers; empty if it does not exist."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return [SegmentFile(first, last, directory / name) for first, last, name in live_names(names)]


def live_names(names: Iterable[str]) -> list[tuple[int, int, str]]:
    """Return first and last number and the name of each live segment among the files of a directory, in order.

    A file whose range lies inside another's is dead: it was merged into that one.
    """
    found = [(int(match[1]), int(match[2]), match[0]) for match in map(_NAME.fullmatch, names) if match]
    live: list[tuple[int, int, str]] = []
    for segment in sorted(found, key=lambda segment: (segment[0], -segment[1])):
        if not live or segment[1] > live[-1][1]:
            live.append(segment)
    return live


@contextlib.contextmanager
def merging(directory: Path) -> Iterator[bool]:
    """Return a context that yields whether this process alone may replace segments of the directory until its end.

    Raises:
        OSError: The directory cannot be written, or its file system has no locks.
    """
    with (directory / LOCK_FILE).open("a") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_alone = True
        except (BlockingIOError, PermissionError):  # which of them is the system's choice
            is_alone = False
        yield is_alone


def clean(directory: Path) -> None:
    """Remove what an interrupted commit or merge left behind; only the directory's one writer may do this.

    Nobody reads it, so it stays where that is not certain: a merge that was begun under the writer before may still be
    at work, and its new segment is not in a list made a moment ago.
    """
    with contextlib.suppress(OSError), merging(directory) as is_alone:
        if is_alone:
            _clean(directory)


def _clean(directory: Path) -> None:
    live = {segment.path.name for segment in cover(directory)}
    for name in os.listdir(directory):
        if name.endswith(".tmp") or (_NAME.fullmatch(name) and name not in live):
            (directory / name).unlink(missing_ok=True)
    shutil.rmtree(directory / SPILL_DIRECTORY, ignore_errors=True)


def segment_path(directory: Path, first: int, last: int) -> Path:
    """Return the path of the segment that holds the numbers `first` to `last`."""
    return directory / f"{first:010d}-{last:010d}.parquet"


def read_metadata(path: RunPath, connection: duckdb.DuckDBPyConnection | None = None) -> SegmentMetadata:
    """Return the metadata of one segment; reads its footer only, by `connection` or this thread's own.

    Raises:
        StoreError: The file is not a segment, damaged, or of another format version.
    """
    import duckdb

    try:
        rows = (connection or reader()).execute(
            "SELECT decode(value) FROM parquet_kv_metadata($1) WHERE decode(key) = $2",
            [sql_path(path), METADATA_KEY],
        )
        return SegmentMetadata.from_json(rows.fetchall()[0][0])
    except (OSError, duckdb.Error, LookupError, ValueError, TypeError) as error:
        raise unreadable(path, error) from error


def read_ends(
    paths: Sequence[AnyPath], connection: duckdb.DuckDBPyConnection | None = None
) -> dict[AnyPath, SegmentMetadata | StoreError]:
    """Return the metadata of many segments by path, or what `read_metadata` raises of one; 0.1 ms a segment.

    `connection` reads them; without one this thread's own does. Where some cannot be read halves are tried, so that a
    few bad ones cost the others little.
    """
    import duckdb

    if len(paths) > 1:
        by_name = {sql_path(path): path for path in paths}
        with contextlib.suppress(OSError, duckdb.Error, LookupError, ValueError, TypeError):
            rows = (connection or reader()).execute(
                "SELECT file_name, decode(value) FROM parquet_kv_metadata($1) WHERE decode(key) = $2",
                [list(by_name), METADATA_KEY],
            )
            found = {by_name[name]: SegmentMetadata.from_json(text) for name, text in rows.fetchall()}
            return {path: found[path] for path in paths}
        middle = len(paths) // 2
        return read_ends(paths[:middle], connection) | read_ends(paths[middle:], connection)
    try:
        return {path: read_metadata(path, connection) for path in paths}
    except StoreError as error:
        return dict.fromkeys(paths, error)


def unreadable(path: RunPath, error: Exception) -> StoreError:
    """Return the error that says that a segment cannot be read, why, and what to do."""
    if isinstance(error, OtherFormatError):
        return StoreError(f"{path}: another version of trainermon wrote this segment ({error}): read it with that one")
    return StoreError(
        f"{path}: not a segment of format {FORMAT_VERSION} ({reason_of(error)}); rename it to {path.name}{DAMAGED} to"
        " go on without its rows, as the agent does when it starts"
    )


def reason_of(error: Exception) -> str:
    """Return in one line why a file cannot be read, without what is the database's own: its class, SQL of ours."""
    said = str(error).partition("\n")[0]
    return _ERROR_CLASS.sub("", said) if said else type(error).__name__


def is_whole(path: RunPath) -> bool:
    """Whether the file begins and ends as a Parquet file does, or is gone; an object in a bucket is there as a whole.

    Source: Apache Parquet format, "File format": magic, data, footer, its length (4 bytes), magic.

    Raises:
        OSError: It cannot be read, for another reason than a bad block.
    """
    if not isinstance(path, Path):
        return True
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return False
        with path.open("rb") as file:
            begin = file.read(len(_MAGIC))
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 8))
            end = file.read()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno == errno.EIO:
            return False
        raise
    footer = int.from_bytes(end[:4], "little")
    return begin == _MAGIC and end[4:] == _MAGIC and _MIN_BYTES + footer <= size


def last_number(directory: Path) -> int:
    """Return the largest number that a segment of the directory has or had before it was set aside; 0 without any."""
    with contextlib.suppress(FileNotFoundError):
        matches = (_NAME.fullmatch(name.removesuffix(DAMAGED)) for name in os.listdir(directory))
        return max((int(match[2]) for match in matches if match), default=0)
    return 0


def read_newest(directory: Path) -> tuple[int, SegmentMetadata]:
    """Return the last number of a directory's whole segments and its metadata; 0 and nothing if it has none.

    Raises:
        StoreError: The newest one cannot be read.
    """
    for _ in range(_ATTEMPTS):
        newest = next((segment for segment in reversed(cover(directory)) if is_whole(segment.path)), None)
        try:
            return (newest.last, read_metadata(newest.path)) if newest else (0, SegmentMetadata())
        except StoreError:
            if newest and newest.path.exists():
                raise  # else it was merged away since it was listed
    raise StoreError(f"{directory}: the newest segment was merged away {_ATTEMPTS} times while it was read")


def connect(*, memory_bytes: int = 256 << 20, spill: Path | None = None) -> duckdb.DuckDBPyConnection:
    """Return an empty in-memory database with one thread that writes nothing but what it is told to.

    Intermediate results that do not fit into `memory_bytes` go to `spill`; without it the query fails. Neither the home
    nor the working directory is touched, and no extension is ever fetched: there is no folder that one could go to.
    """
    import duckdb

    connection = duckdb.connect(
        config={
            "threads": 1,
            "memory_limit": f"{memory_bytes}B",
            "temp_directory": sql_path(spill) if spill else "",
            "autoinstall_known_extensions": False,
            "allow_community_extensions": False,
            "extension_directory": "/dev/null/none",
        }
    )
    connection.execute("SET python_enable_replacements = false")
    return connection


_of_thread = threading.local()


def reader() -> duckdb.DuckDBPyConnection:
    """Return this thread's database for reading single files, in which nothing of them stays; not to be closed.

    Opening another one for each file costs 10 ms of CPU time or more, and a run of 1,280 nodes has thousands.
    """
    found: duckdb.DuckDBPyConnection | None = getattr(_of_thread, "reader", None)
    if found is None:
        found = _of_thread.reader = connect()
        found.execute("SET enable_external_file_cache = false")
    return found


_folders: dict[Path, int] = {}


def sql_path(path: RunPath) -> str:
    """Return a name of the file that DuckDB accepts (UTF-8), valid as long as this process lives.

    A folder whose name is something else is named by a descriptor, one for each folder that was ever asked for.

    Raises:
        OSError: Such a folder cannot be opened.
    """
    if not isinstance(path, Path):
        return str(path)
    try:
        str(path).encode()
    except UnicodeEncodeError:
        folder = path.parent
        known = _folders.get(folder)
        if known is None or not os.path.samestat(os.fstat(known), os.stat(folder)):
            known = _folders[folder] = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{known}/{path.name}"
    return str(path)


def quoted(text: str) -> str:
    """Return `text` as an SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def scan(paths: Iterable[RunPath]) -> str:
    """Return the SQL of a table that holds the rows of these segments, and has all columns whoever wrote them.

    A column that a segment does not have, being of an older version, is NULL.
    """
    listed = ", ".join(quoted(sql_path(path)) for path in paths)
    columns = ", ".join(f"NULL::{kind} AS {name}" for name, kind in COLUMNS.items())
    rows = f" UNION ALL BY NAME FROM read_parquet([{listed}], union_by_name = true)" if listed else ""
    return f"(SELECT {columns} WHERE false{rows})"


def write_segment(connection: duckdb.DuckDBPyConnection, query: str, path: Path, metadata: SegmentMetadata) -> None:
    """Write the rows of `query` as the segment `path`, atomically: whole and durable, or nothing changes.

    Writing the same segment again replaces it by itself, so that a commit whose outcome is unknown may be repeated.

    Raises:
        StoreError: The file could not be written (disk full, not writable, out of memory).
        duckdb.Error: The rows cannot be stored, whatever the disk.
    """
    import duckdb

    tmp = path.parent / f".{path.name}.tmp"
    columns = ", ".join(COLUMNS)
    options = (
        "FORMAT parquet, PARQUET_VERSION v2, COMPRESSION zstd, COMPRESSION_LEVEL 1, USE_TMP_FILE false,"
        f" ROW_GROUP_SIZE {ROW_GROUP_ROWS}, KV_METADATA {{{METADATA_KEY}: {quoted(metadata.to_json())}}}"
    )
    try:
        os.close(os.open(tmp, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600))
        connection.execute(f"COPY (SELECT {columns} FROM ({query})) TO {quoted(sql_path(tmp))} ({options})")
        _sync(tmp)
        os.rename(tmp, path)
        _sync(path.parent)
    except BaseException as error:  # an interrupt too leaves no half file; it goes on
        with contextlib.suppress(OSError):
            tmp.unlink(missing_ok=True)
        if isinstance(error, OSError | duckdb.IOException | duckdb.OutOfMemoryException | duckdb.InterruptException):
            raise StoreError(f"{path}: the segment could not be written: {error}") from error
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
