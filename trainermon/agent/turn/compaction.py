"""Has the segments of a node kept within their budget, by a process beside the agent."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path

from trainermon.agent.background import BackgroundTask
from trainermon.agent.lifecycle.child import output_of
from trainermon.agent.settings import RetentionSettings

COMPACT_MODULE = "trainermon.exporters.store.retention"
COMPACT_S = 600.0
COMPACT_LIMIT_S = 1800.0

_log = logging.getLogger(__name__)


class SegmentCompaction:
    """Merges old segments of the store every ten minutes, in a process of its own that ends with the agent.

    Args:
        segments: Folder of the segments.
        retention: How much stays in full detail.
    """

    def __init__(self, segments: Path, retention: RetentionSettings) -> None:
        self._segments = segments
        self._retention = retention
        self._compacted_s = time.monotonic()
        self._work = BackgroundTask("segments were not merged")

    def poll(self, now_s: float) -> None:
        """Start a merge when one is due, unless the last one still runs; `now_s` is monotonic."""
        if now_s - self._compacted_s >= COMPACT_S:
            self._compacted_s = now_s
            if not self._work.is_running:
                self._work.start(self._compact())

    async def _compact(self) -> None:
        wanted = self._retention
        command = [sys.executable, "-m", COMPACT_MODULE, str(self._segments)]
        command += ["--max-bytes", str(wanted.max_bytes), "--full-detail-hours", str(wanted.full_detail_hours)]
        try:
            await output_of(command, limit_s=COMPACT_LIMIT_S)
        except asyncio.TimeoutError:
            _log.warning("segments were not merged within %g s", COMPACT_LIMIT_S)
        except OSError as error:
            _log.warning("segments were not merged: %s", error)
