"""Follows the journals of all local ranks: who is there, what is new, and who has come to an end.

Ranks take turns record by record, so that one with much to tell does not keep the others waiting, and ranks stay close
to each other in steps. What is done with the records, and how many are taken at a time, is not decided here
(`trainermon.agent.pipeline`).
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from trainermon.core.errors import JournalError
from trainermon.core.journal import (
    START,
    EndRecord,
    Header,
    HeaderRecord,
    JournalReader,
    Record,
    SeriesRecord,
)
from trainermon.core.journal.names import FolderNames
from trainermon.core.spool import list_ranks, rank_alive
from trainermon.exporters.store.segments import JournalPosition

logger = logging.getLogger(__name__)


class FollowedRecord(NamedTuple):
    """A record of a rank's journal with its context.

    Attributes:
        header: Who wrote it, with the rank's whole series table and placements up to the record.
        record: The record.
    """

    header: Header
    record: Record


class JournalFollower:
    """Reads the growing journals of all ranks in one spool from the given positions on.

    Ranks may come and go at any time.

    Args:
        spool: The folder with the journals.
        positions: By rank, where to begin; None: at the beginning.

    Attributes:
        refused: By rank, why its journal cannot be read (it was written by an incompatible release); it is left alone.
    """

    def __init__(self, spool: Path, positions: Mapping[int, JournalPosition] | None = None) -> None:
        self.refused: dict[int, str] = {}
        self._spool = spool
        self._names = FolderNames(spool)
        self._known_names = -1
        self._resume = dict(positions or {})
        self._readers: dict[int, JournalReader] = {}
        self._headers: dict[int, Header] = {}
        self._ended: set[int] = set()
        self._last = -1  # the rank whose turn it was

    @property
    def positions(self) -> dict[int, JournalPosition]:
        """By rank, the position after the last record that was returned; ranks without any are left out."""
        return {
            rank: JournalPosition(header.attempt, self._readers[rank].cursor) for rank, header in self._headers.items()
        }

    @property
    def headers(self) -> dict[int, Header]:
        """By rank, the newest header of its journal, with the whole series table."""
        return dict(self._headers)

    @property
    def lost_files(self) -> int:
        """Number of journal files that were removed for the spool's budget before they were read."""
        return sum(reader.lost_files for reader in self._readers.values())

    @property
    def lost_records(self) -> dict[int, int]:
        """By rank, how many records the rank did not write, or were gone or damaged when they were to be read.

        As far as later records show it; 0 for none.
        """
        return {rank: reader.lost_records for rank, reader in self._readers.items()}

    def news(self) -> Iterator[FollowedRecord]:
        """Yield the records that ranks have written since the last call, one of each rank in turn.

        The records of a rank are in order. Whoever stops early continues with the next call: nothing is read in
        advance, `positions` are those of what was yielded.
        """
        self._names.look()
        if self._known_names != self._names.version:
            self._known_names = self._names.version
            self._meet_ranks()
        ranks = sorted(self._readers)
        waiting = [rank for rank in ranks if rank > self._last] + [rank for rank in ranks if rank <= self._last]
        while waiting:
            for rank in list(waiting):
                followed = self._next(rank)
                if followed is None:
                    waiting.remove(rank)
                    continue
                self._last = rank
                yield followed

    def poll(self, max_records: int = 4096) -> list[FollowedRecord]:
        """Return the records that ranks have written since the last call, at most `max_records`.

        [] if there are none.
        """
        return list(itertools.islice(self.news(), max_records))

    def is_over(self, rank: int) -> bool:
        """Whether the rank has ended: it said so, or it is gone. Records of it may still be unread."""
        return rank in self._ended or not rank_alive(self._spool, rank)

    def close(self) -> None:
        """Close all journal files; the positions stay valid."""
        for reader in self._readers.values():
            reader.close()

    def _meet_ranks(self) -> None:
        for rank in list_ranks(self._spool):
            if rank not in self._readers:
                position = self._resume.get(rank)
                cursor = position.cursor if position else START
                self._readers[rank] = JournalReader(self._spool, rank, cursor, names=self._names)

    def _next(self, rank: int) -> FollowedRecord | None:
        if rank in self.refused:
            return None
        try:
            records = self._readers[rank].poll(max_bytes=0)  # one record
        except JournalError as error:
            self.refused[rank] = str(error)
            logger.error("rank %d is not followed: %s", rank, error)  # noqa: TRY400  (the message says it all)
            return None
        if not records:
            return None
        (record,) = records
        if isinstance(record, HeaderRecord):
            self._headers[rank] = record.header
            self._ended.discard(rank)
        elif isinstance(record, SeriesRecord):
            self._headers[rank] = _extended(self._headers[rank], record)
        elif isinstance(record, EndRecord):
            self._ended.add(rank)
        return FollowedRecord(self._headers[rank], record)


def _extended(header: Header, record: SeriesRecord) -> Header:
    return dataclasses.replace(
        header,
        series=(*header.series[: record.first_id], *record.keys),
        placements=(*header.placements[: record.first_id], *record.placements),
    )
