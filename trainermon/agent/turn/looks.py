"""The looks at the ranks, a few times a second: who lives, who hangs, and what is due beside the records."""

from __future__ import annotations

import logging
import time

from trainermon.agent.accelerators.node import NodeAccelerators
from trainermon.agent.hang.watch import HangWatch
from trainermon.agent.health import MonitorHealth
from trainermon.agent.pipeline import RecordPipeline
from trainermon.agent.turn.compaction import SegmentCompaction
from trainermon.agent.turn.dumps import DumpFollowUp
from trainermon.agent.turn.rank_files import RankFiles
from trainermon.agent.watch import RankWatch
from trainermon.exporters.prometheus.exposition import Exposition

LOOK_S = 0.2

_log = logging.getLogger(__name__)


class RankLooks:
    """Checks, a few times a second, everything but the records, from heartbeats to accelerators.

    Args:
        watch: The ranks' heartbeats.
        hang: Finds ranks that hang or died.
        metrics: `/metrics`, which shows the result.
        health: Checks the monitor itself.
        pipeline: Knows the ranks' journals.
        rank_files: What the ranks wrote about themselves.
        dumps: Delivers and diagnoses dumps.
        compaction: Keeps the store within its budget.
        accelerators: Reads the ranks' accelerators.
    """

    def __init__(  # noqa: PLR0913 - what is looked at
        self,
        watch: RankWatch,
        *,
        hang: HangWatch,
        metrics: Exposition,
        health: MonitorHealth,
        pipeline: RecordPipeline,
        rank_files: RankFiles,
        dumps: DumpFollowUp,
        compaction: SegmentCompaction,
        accelerators: NodeAccelerators,
    ) -> None:
        self._watch = watch
        self._hang = hang
        self._metrics = metrics
        self._health = health
        self._pipeline = pipeline
        self._rank_files = rank_files
        self._dumps = dumps
        self._compaction = compaction
        self._accelerators = accelerators
        self._looked_s = time.monotonic()

    @property
    def num_alive(self) -> int:
        """How many ranks were alive at the last look."""
        return self._watch.num_alive

    @property
    def idle(self) -> bool:
        """Whether no hang or death of a rank is being looked into, and no process is about to end."""
        return self._hang.idle

    def is_due(self, now_s: float) -> bool:
        """Return whether a check is due in this turn; if so, schedule the next one. `now_s` is monotonic."""
        if now_s - self._looked_s < LOOK_S:
            return False
        self._looked_s = now_s
        return True

    def poll(self) -> None:
        """Record processes that have ended; call it every turn of the loop."""
        self._hang.poll()

    def look(self, now_s: float, *, has_read_all: bool) -> None:
        """Check everything; `now_s` is monotonic, `has_read_all` whether the last turn found nothing new."""
        gone = self._watch.look(now_s)
        for rank in gone:
            _log.info("rank %d is gone", rank)
        self._hang.look(now_s, gone, has_read_all=has_read_all)
        self._hang.show(self._metrics)
        self._rank_files.read_new(self._pipeline.headers)
        self._health.poll(now_s)
        self._dumps.poll()
        self._compaction.poll(now_s)
        living = {state.rank for state in self._watch.living}
        devices = {rank: device for rank, device in self._rank_files.accelerators.items() if rank in living}
        self._accelerators.look(now_s, devices)

    def skip(self, gap_s: float) -> None:
        """Subtract `gap_s` seconds from every rank's silence: this process itself was stopped for that long."""
        _log.warning("this process stood still for %.0f s, which counts as no rank's silence", gap_s)
        self._watch.skip(gap_s)
        self._health.restart_timers()

    async def close(self) -> None:
        """Stop looking into hangs and deaths."""
        await self._hang.close()
