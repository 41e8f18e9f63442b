"""The index: reports of graphs on disk, so that dumps that have not changed are not read again.

A file is a report: a magic number, the length of a JSON text, that text, the packed columns of its part of a page one
after the other, and a checksum of all of it. It is named after all that went into it: the report's options, and of
every file of the dumps path, inode, size, and the times of modification and of change, as they were before it was read.
Who edits a file can keep its size and set the first of these times, not the second. So what is stale is not found, if
the file system keeps that time; and what is damaged is as if it were not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trainermon
from trainermon.analysis.compare.merging.beginnings import Beginning
from trainermon.analysis.diagnosis.order import CallEvent, CommunicationCall
from trainermon.analysis.graph.meetings import RankCollectives
from trainermon.analysis.graph.page.packing import COLUMNS, VERSION, PackedColumn, PackedRank
from trainermon.analysis.graph.reading import GraphPlace
from trainermon.analysis.graph.report import GraphReport, ReportMaker
from trainermon.core.errors import DumpError
from trainermon.core.private_files import make_private_directory, replace_file

MAX_BYTES = 1 << 30
"""An index has no more than this; what was used last is kept."""
MIN_DUMP_BYTES = 4 << 20
"""Dumps with less are read as fast as an index."""
_MAGIC = b"TMGRAPH1"
_SUFFIX = ".tmg"
_LENGTH = struct.Struct("<I")
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class GraphIndex:
    """The reports in a folder.

    Attributes:
        folder: The folder; nobody else may write to it.
        min_bytes: Dumps with less are not kept.
    """

    folder: Path
    min_bytes: int = 0

    def find(self, maker: ReportMaker, place: GraphPlace) -> GraphReport | None:
        """Return the report that `maker` made of `place`; None: there is none, or it is damaged."""
        try:
            path = self.path_of(maker, place)
            if path is None:
                return None
            report = _unpacked(path.read_bytes())
            os.utime(path)
        except (OSError, ValueError, LookupError, TypeError, struct.error):
            return None
        return report

    def keep(self, path: Path, report: GraphReport) -> None:
        """Keep a report at `path`; where the folder cannot be written to, it is not kept."""
        if report.details is None:
            with contextlib.suppress(OSError):
                make_private_directory(self.folder)
                replace_file(path, _packed(report))

    def tidy(self) -> None:
        """Remove the reports that were not used for longest, until what is left has no more than `MAX_BYTES`."""
        with contextlib.suppress(OSError):
            known = [(path.stat(), path) for path in self.folder.glob(f"*{_SUFFIX}")]
            total = sum(status.st_size for status, _ in known)
            for status, path in sorted(known, key=lambda one: one[0].st_mtime_ns):
                if total <= MAX_BYTES:
                    break
                path.unlink(missing_ok=True)
                total -= status.st_size

    def path_of(self, maker: ReportMaker, place: GraphPlace) -> Path | None:
        """Return where the report that `maker` makes of `place` is kept, as that is now; None: it is too small."""
        if size_of(place) < self.min_bytes:
            return None
        known = (trainermon.__version__, VERSION, repr(maker), repr(place), list(_states(place, maker)))
        return self.folder / (hashlib.blake2b(repr(known).encode(), digest_size=16).hexdigest() + _SUFFIX)


def open_index(folder: Path | None) -> GraphIndex:
    """Return the index in `folder`; None: in that of the user's caches, which is made when something is kept.

    Raises:
        DumpError: `folder` cannot be made, or others can write to it.
    """
    if folder is None:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
        return GraphIndex(caches / "trainermon" / "graph", MIN_DUMP_BYTES)
    try:
        make_private_directory(folder.absolute())
    except OSError as error:
        raise DumpError(f"{folder} cannot hold an index of graphs ({error}): choose another with --cache") from error
    return GraphIndex(folder.absolute())


def size_of(place: GraphPlace) -> int:
    """Return the bytes of JSON that the graph is read from."""
    return sum(status.st_size for folder in place.folders() for status in map(os.stat, _files(folder)))


def _files(folder: Path) -> list[Path]:
    """Return the files right within the folder of a dump, or the file itself; none if it is gone."""
    try:
        return [Path(one.path) for one in os.scandir(folder) if one.is_file()] if folder.is_dir() else [folder]
    except OSError:
        return []


def _states(place: GraphPlace, maker: ReportMaker) -> Iterator[tuple[str | int, ...]]:
    """Yield path, inode, size and times of what a graph is read from, folders included: they tell of new files."""
    for folder in (*place.folders(), *(maker.options.baseline or ())):
        folders = [one for one in folder.iterdir() if one.is_dir()] if folder.is_dir() else []
        for path in sorted((folder, *folders, *_files(folder))):
            found = path.stat()
            yield str(path.absolute()), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _packed(report: GraphReport) -> bytes:
    known = report._asdict()
    contents: list[bytes] = []
    if report.rank is not None:
        known["rank"] = report.rank._asdict()
        for part in COLUMNS:
            columns = known["rank"][part] = dict(known["rank"][part])
            for name, column in columns.items():
                contents.append(column.content)
                columns[name] = [column.type, column.num_items, column.digest, len(column.content)]
    text = json.dumps(known, separators=(",", ":")).encode()
    content = b"".join((_MAGIC, _LENGTH.pack(len(text)), text, *contents))
    return content + _digest(content)


def _unpacked(content: bytes) -> GraphReport:
    """Return the report of a file's bytes.

    Raises:
        ValueError, LookupError, TypeError, struct.error: They are none.
    """
    view = memoryview(content)
    begin = len(_MAGIC) + _LENGTH.size
    if not content.startswith(_MAGIC) or _digest(view[:-_DIGEST_BYTES]) != view[-_DIGEST_BYTES:]:
        raise ValueError("no index of a graph, or a damaged one")
    (length,) = _LENGTH.unpack_from(view, len(_MAGIC))
    known: dict[str, Any] = json.loads(content[begin : begin + length])
    rank, at = known["rank"], begin + length
    if rank is not None:
        for part in COLUMNS:
            for name, (kind, num_items, digest, length) in rank[part].items():
                rank[part][name] = PackedColumn(kind, num_items, digest, content[at : at + length])
                at += length
        known["rank"] = PackedRank(**rank)
    if known["began"] is not None:
        known["began"] = Beginning(*known["began"])
    if known["collectives"] is not None:
        step, of_rank, calls = known["collectives"]
        met = [CommunicationCall(CallEvent(*event), name, tuple(group), peer) for event, name, group, peer in calls]
        known["collectives"] = RankCollectives(step, of_rank, tuple(met))
    return GraphReport(**known)


def _digest(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
