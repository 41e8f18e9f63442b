"""Sends committed segments to an InfluxDB, each at least once; a point that is sent twice overwrites itself.

What the server cannot take now (away, busy, a wrong token) is tried again for as long as it lasts: the store keeps it.
What it refuses for good (400, 422) goes to a dead-letter file beside the segments, `influxdb.rejected.lp`, and is
counted, so that one bad batch does not hold up all that follow. Training knows nothing of any of this.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from trainermon.core.values import Coordinates
from trainermon.exporters.export import ExportSettings, StoreExporter
from trainermon.exporters.influxdb.points import RankPoints
from trainermon.exporters.influxdb.server import InfluxDBServer, ServerAnswer
from trainermon.exporters.store.segment_follower import SegmentFollower, state_file
from trainermon.exporters.store.segments import SegmentFile

REJECTED_FILE = "influxdb.rejected.lp"
MAX_REJECTED_BYTES = 64 << 20
FIRST_PAUSE_S = 0.5
MAX_RETRY_AFTER_S = 600.0

_POINTS = "trainermon_exported_points_total"
_REJECTED = "trainermon_export_rejected_points_total"
_NONFINITE = "trainermon_export_nonfinite_values_total"
_RETRIES = "trainermon_export_retries_total"
_WAITING = "trainermon_export_waiting_bytes"
_LAST_SUCCESS = "trainermon_export_last_success_timestamp_seconds"

_TAKEN = range(200, 300)
_REFUSED = frozenset({400, 422})
_TOO_LARGE = 413
_GZIP = 31  # window bits: the largest window, with a gzip header

_log = logging.getLogger(__name__)


class LineServer(Protocol):
    """Interface of a server that accepts points in InfluxDB's line protocol; `InfluxDBServer` is one."""

    def write(self, lines_gz: bytes) -> ServerAnswer:
        """Send gzip-compressed lines of points; return how the server answered."""

    def close(self) -> None:
        """Close the connections to the server."""


class InfluxDBExporter(StoreExporter):
    """Sends the committed segments of one node to an InfluxDB server, as points.

    Args:
        settings: Where the segments are, and which server.
        server: Used instead of the one that the settings name.
        wait: Waits for so many seconds, less once the event is set; for tests that have no time.

    Raises:
        ImportError: influxdb-client is not installed.
        StoreError: What was remembered of an earlier agent cannot be read.
    """

    def __init__(
        self,
        settings: ExportSettings,
        server: LineServer | None = None,
        *,
        wait: Callable[[threading.Event, float], object] = threading.Event.wait,
    ) -> None:
        self._settings = settings
        self._server = server or InfluxDBServer(settings.influxdb)
        self._wait = wait
        self._follower = SegmentFollower(settings.segments, state_file(settings.node_dir, "influxdb"))
        self._points: dict[int, tuple[tuple[int, int], RankPoints]] = {}
        self._failures = 0
        self._counts = dict.fromkeys((_POINTS, _REJECTED, _NONFINITE, _RETRIES, _WAITING), 0.0)

    def metrics(self) -> Mapping[str, float]:
        """Return, by name of metric, the numbers of points, retries and the like.

        The time of the last success is there only once there was one.
        """
        return dict(self._counts)

    def send(self, stop: threading.Event) -> None:
        """Send every committed segment that was not sent yet, and remember which are; returns soon once `stop` is set.

        Raises:
            StoreError: A segment cannot be read, or its end not be noted; the next call begins with it again.
        """
        self._counts[_WAITING] = self._follower.waiting_bytes()
        for segment in self._follower.waiting():
            if not self._send_segment(segment, stop):
                return
            self._follower.done(segment)
            self._counts[_WAITING] = self._follower.waiting_bytes()

    def close(self) -> None:
        """Close the connections, and release the state file to other exporters."""
        self._server.close()
        self._follower.close()

    def _send_segment(self, segment: SegmentFile, stop: threading.Event) -> bool:
        """Send the points of a segment; return whether the server has all of them, or has refused them."""
        lines: list[str] = []
        num_nonfinite = 0
        for header, block in self._follower.read(segment):
            text, missing = self._points_of(header.coordinates).lines(block, attempt=header.attempt)
            lines += text
            num_nonfinite += missing
            while len(lines) >= self._settings.influxdb.batch_points:
                if not self._deliver(lines[: self._settings.influxdb.batch_points], stop):
                    return False
                del lines[: self._settings.influxdb.batch_points]
        if lines and not self._deliver(lines, stop):
            return False
        self._counts[_NONFINITE] += num_nonfinite
        return True

    def _points_of(self, coordinates: Coordinates) -> RankPoints:
        table = self._follower.table(coordinates.rank)
        budget = self._settings.budget.of_rank(coordinates, node_series=0, num_local=self._follower.num_ranks)
        version = (len(table), budget)
        known = self._points.get(coordinates.rank)
        if known is None or known[0] != version:
            points = RankPoints(self._settings.run_id, coordinates.rank, table, budget=budget)
            known = self._points[coordinates.rank] = (version, points)
        return known[1]

    def _deliver(self, lines: list[str], stop: threading.Event) -> bool:
        """Send lines until the server has taken or refused them; return False if `stop` was set before."""
        body = compress(lines)
        while not stop.is_set():
            answer = self._server.write(body)
            if answer.status in _TAKEN:
                self._succeed(len(lines))
                return True
            if answer.status == _TOO_LARGE and len(lines) > 1:
                half = len(lines) // 2
                return self._deliver(lines[:half], stop) and self._deliver(lines[half:], stop)
            if answer.status in _REFUSED or answer.status == _TOO_LARGE:
                self._reject(lines, answer)
                return True
            self._fail(answer)
            self._wait(stop, self._pause(answer))
            self._counts[_RETRIES] += 1
        return False

    def _succeed(self, num_points: int) -> None:
        if self._failures:
            _log.info("InfluxDB takes points again, after %d requests that failed", self._failures)
        self._failures = 0
        self._counts[_POINTS] += num_points
        self._counts[_LAST_SUCCESS] = time.time()

    def _fail(self, answer: ServerAnswer) -> None:
        self._failures += 1
        if self._failures.bit_count() == 1:  # 1st, 2nd, 4th …
            url, status, message = self._settings.influxdb.url, answer.status or "no answer", answer.message
            _log.warning("InfluxDB at %s takes no points (failure %d): %s %s", url, self._failures, status, message)

    def _pause(self, answer: ServerAnswer) -> float:
        """Return for how long to wait after a failure: twice as long each time, spread, as many agents fail at once."""
        longest = min(self._settings.influxdb.max_backoff_s, FIRST_PAUSE_S * 2.0 ** min(self._failures, 30))
        spread = random.uniform(0.5, 1.0)  # noqa: S311  (no secret)
        return max(longest * spread, min(answer.retry_after_s, MAX_RETRY_AFTER_S))

    def _reject(self, lines: list[str], answer: ServerAnswer) -> None:
        path = self._settings.node_dir / REJECTED_FILE
        if not self._counts[_REJECTED]:
            _log.error("InfluxDB refuses points (%d %s); they are in %s", answer.status, answer.message, path)
        self._counts[_REJECTED] += len(lines)
        _append(path, [f"# {answer.status} {answer.message}".replace("\n", " "), *lines])


def compress(lines: list[str]) -> bytes:
    """Return lines of points as one gzip-compressed body, at a low level: 6 would cost as much as all the rest."""
    compressor = zlib.compressobj(1, zlib.DEFLATED, _GZIP)
    return compressor.compress("\n".join(lines).encode("utf-8", "replace")) + compressor.flush()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _append(path: Path, lines: list[str]) -> None:
    """Append lines to a file that only the owner may read; not when it is too large already."""
    with open(path, "a", encoding="utf-8", errors="replace", opener=_private) as file:
        if file.tell() < MAX_REJECTED_BYTES:
            file.write("\n".join([*lines, ""]))
