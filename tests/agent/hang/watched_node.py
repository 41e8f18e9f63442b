"""Ranks of one node as pages and locks, and a watch that looks at them at times that the test makes up."""

from __future__ import annotations

import asyncio

from trainermon.agent.hang.records import LastRecords
from trainermon.agent.hang.reporting import HangReporter
from trainermon.agent.hang.watch import HangWatch
from trainermon.agent.place import AgentPlace
from trainermon.agent.watch import RankWatch
from trainermon.core.config import HangConfig
from trainermon.core.control import ControlPage, Phase
from trainermon.core.journal import Header
from trainermon.core.spool import RankLock, open_spool
from trainermon.core.values import Coordinates, Severity

# Without any rung that would ask this process, which is every rank at once here.
SETTINGS = HangConfig(
    step_s=10, checkpoint_s=100, evaluation_s=50, setup_s=200, recorder=False, stacks=False, py_spy=False
)


class Node:
    """Ranks of one node as their files show them, and what the watch says about them."""

    def __init__(self, folder, executor, *, world_size=2, settings=SETTINGS):
        self.folder = folder
        self.spool = open_spool(folder / "spool" / "run")
        self.pages, self.locks, self.headers = {}, {}, {}
        self.records = LastRecords()
        self.alerts = []
        self.has_read_all = True
        self.ranks = RankWatch(self.spool)
        self._executor, self._settings = executor, settings
        for rank in range(world_size):
            self.start(rank)
        self.watch = self.make_watch()

    def make_watch(self, open_alerts=()):
        place = AgentPlace(
            run_id="run", spool=self.spool, run_dir=self.folder / "output", node_dir=self.folder / "node"
        )
        reporter = HangReporter(
            place,
            records=self.records,
            report=self.alerts.append,
            severities={"hang": Severity.WARNING},
            executor=self._executor,
        )
        return HangWatch(
            self._settings,
            place,
            ranks=self.ranks,
            headers=lambda: self.headers,
            records=self.records,
            reporter=reporter,
            open_alerts=open_alerts,
        )

    def start(self, rank, *, attempt=1):
        self.locks[rank] = RankLock(self.spool, rank)
        self.pages[rank] = ControlPage(self.spool, rank)
        self.headers[rank] = Header(
            run_id="run",
            attempt=attempt,
            coordinates=Coordinates(rank=rank, world_size=2),
            host="node",
            pid=1,
            started_s=0.0,
            series=(),
            placements=(),
        )
        self.pages[rank].beat(7, Phase.STEP, 0.0)

    def beat(self, *ranks, step=8, phase=Phase.STEP):
        for rank in ranks:
            self.pages[rank].beat(step, phase, 0.0)

    def end(self, rank):
        self.pages[rank].close()
        self.locks[rank].close()

    async def look(self, now_s):
        """Look at the ranks at this time, and wait for what follows; return the alerts since the last look."""
        self.watch.look(now_s, self.ranks.look(now_s), has_read_all=self.has_read_all)
        while self.watch._work.is_running:
            await asyncio.sleep(0.001)
        alerts, self.alerts[:] = list(self.alerts), []
        return alerts

    async def close(self):
        await self.watch.close()
        self.ranks.close()
        for rank in self.pages:
            self.end(rank)
