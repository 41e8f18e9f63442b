"""Hands an exporter the steps that the node has committed, in order, also across restarts of whoever does it.

The store is the buffer: an exporter that is slow, or a file system that is away, costs no step, and holds up nobody.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping

from trainermon.core.journal import Header
from trainermon.exporters.export import Exporter, ExportSettings, StoreExporter, make_exporter
from trainermon.exporters.store.segment_follower import RankBlock, SegmentFollower, state_file
from trainermon.exporters.store.segments import SegmentFile

_STEPS = "trainermon_exported_steps_total"
_DROPPED = "trainermon_export_dropped_steps_total"
_WAITING = "trainermon_export_waiting_bytes"

_log = logging.getLogger(__name__)


class StoreFeed(StoreExporter):
    """Runs an exporter of steps on the committed segments of the store.

    What it cannot write for want of disk or network (`OSError`) is tried again, from the first step that is not known
    to be written and by a new exporter. A step at which it fails otherwise would fail again: it is left out, counted
    and logged.

    Args:
        name: Of the form; how far it has come stands in `<name>.state.json` beside the segments.
        exporter: The first one.
        make: Returns a new one.
        settings: Where the segments are.

    Raises:
        StoreError: What was remembered of an earlier process cannot be read, or another process is at it.
    """

    def __init__(self, name: str, exporter: Exporter, make: Callable[[], Exporter], settings: ExportSettings) -> None:
        self._name = name
        self._make = make
        self._run_id = settings.run_id
        self._exporter: Exporter | None = exporter
        self._headers: dict[int, Header] = {}
        self._counts = dict.fromkeys((_STEPS, _DROPPED, _WAITING), 0.0)
        self._follower = SegmentFollower(settings.segments, state_file(settings.node_dir, name))

    def metrics(self) -> Mapping[str, float]:
        """Return, by metric, the numbers of steps written and left out, and the bytes of the segments that wait."""
        return dict(self._counts)

    def send(self, stop: threading.Event) -> None:
        """Pass the steps that were committed and not written yet to the exporter; returns soon once `stop` is set.

        A segment that was interrupted is repeated next time.

        Raises:
            OSError: The exporter could not write; the next call begins with the segment again.
            StoreError: A segment cannot be read, or its end not be noted.
        """
        self._counts[_WAITING] = self._follower.waiting_bytes()
        for segment in self._follower.waiting():
            if not self._hand_over(segment, stop):
                return
            self._counts[_WAITING] = self._follower.waiting_bytes()

    def close(self) -> None:
        """Close the exporter, and release the state file to other processes."""
        if self._exporter is not None:
            self._exporter.close()
        self._follower.close()

    def _hand_over(self, segment: SegmentFile, stop: threading.Event) -> bool:
        """Write one segment; return whether that is done."""
        blocks = self._follower.read(segment)
        exporter = self._exporter = self._exporter or self._make()
        try:
            for rank_block in blocks:
                if stop.is_set():
                    return False
                self._write(exporter, rank_block)
            exporter.flush()
        except OSError:
            self._exporter = None
            exporter.close()
            raise
        self._follower.done(segment)
        return True

    def _write(self, exporter: Exporter, rank_block: RankBlock) -> None:
        header = self._header(rank_block)
        try:
            exporter.write(header, rank_block.block)
        except OSError:
            raise
        except Exception:  # noqa: BLE001  (the border: a step that it cannot take must not keep it from the others)
            self._counts[_DROPPED] += 1
            if int(self._counts[_DROPPED]).bit_count() == 1:  # 1st, 2nd, 4th …
                place = f"step {rank_block.block.step} of rank {header.coordinates.rank}"
                _log.exception("export %s: %s is left out (%d so far)", self._name, place, self._counts[_DROPPED])
        else:
            self._counts[_STEPS] += 1

    def _header(self, rank_block: RankBlock) -> Header:
        """Return the header with the rank's whole table, whose places the block's series are; the same while it is."""
        found = rank_block.header
        rank = found.coordinates.rank
        table, known = self._follower.table(rank), self._headers.get(rank)
        if known is None or known.attempt != found.attempt or len(known.series) != len(table):
            known = self._headers[rank] = dataclasses.replace(
                found,
                run_id=self._run_id,
                started_s=found.started_s or rank_block.block.time_s,
                series=tuple(row.key for row in table),
                placements=tuple(row.placement for row in table),
            )
        return known


def store_exporter(name: str, settings: ExportSettings) -> StoreExporter:
    """Return a new exporter of the form `name` (`csv`, `tensorboard`, `influxdb` …) that follows the store.

    Raises:
        ConfigError: There is none of that name, or it cannot be made.
        StoreError: Another process has it, or what was remembered of that cannot be read.
    """
    made = make_exporter(name, settings)
    if isinstance(made, StoreExporter):
        return made

    def again() -> Exporter:
        found = make_exporter(name, settings)
        assert isinstance(found, Exporter)
        return found

    return StoreFeed(name, made, again, settings)
