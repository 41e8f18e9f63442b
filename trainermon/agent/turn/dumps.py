"""What becomes of dumps: delivered to the run directory, diagnosed, and shown."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future

from trainermon.agent.alert_page import PlainAlerts
from trainermon.agent.alerting import AlertBook
from trainermon.agent.feed import EventFeed
from trainermon.agent.orders.deliveries import DumpDeliveries
from trainermon.agent.orders.dumps import DumpDiagnoser, DumpEntry, RunDumps
from trainermon.agent.place import AgentPlace
from trainermon.agent.watch import RankWatch

FLUSH_LIMIT_S = 20.0

_log = logging.getLogger(__name__)


async def flush_within(flush: Callable[[], Future[None]], *, limit_s: float = FLUSH_LIMIT_S) -> bool:
    """Store everything read so far; return whether it was done within `limit_s` seconds.

    `flush` begins it; the turns of the agent's loop do the work.
    """
    done = asyncio.wrap_future(flush())
    await asyncio.wait([done], timeout=limit_s)
    return done.done()


class DumpFollowUp:
    """Delivers the dumps of this node's ranks to the run directory and has them diagnosed.

    Args:
        place: The agent's folders.
        executor: Writes reports.
        plain: Turns alerts into JSON for the page.
        alerts: The alerts, which get the diagnosis.
        feed: Tells open pages.
        flush: Begins to store what was read; a diagnosis reads the store.
    """

    def __init__(  # noqa: PLR0913 - where a diagnosis is shown
        self,
        place: AgentPlace,
        *,
        executor: Executor,
        plain: PlainAlerts,
        alerts: AlertBook,
        feed: EventFeed,
        flush: Callable[[], Future[None]],
    ) -> None:
        self._deliveries = DumpDeliveries(place.spool, place.run_dir)
        self._diagnoser = DumpDiagnoser(
            place.run_dir, executor=executor, commit=self._settle, finished=self._show_diagnosis
        )
        self._run_dir = place.run_dir
        self._plain = plain
        self._alerts = alerts
        self._feed = feed
        self._flush = flush

    def resume(self, dumps: RunDumps, watch: RankWatch) -> None:
        """Schedule diagnoses of the local ranks' dumps that an earlier agent did not diagnose."""
        for entry in dumps.entries.values():
            if not entry.diagnosed and not watch.ranks.keys().isdisjoint(entry.ranks):
                self._diagnoser.schedule(entry)

    @property
    def is_diagnosed(self) -> bool:
        """Whether no diagnosis is running or waiting."""
        return self._diagnoser.idle

    @property
    def is_delivered(self) -> bool:
        """Whether no dump is being delivered to the run directory or waits to be. Cost: one listing."""
        return self._deliveries.idle

    @property
    def problem(self) -> str:
        """Why dumps could not be delivered; empty if they could."""
        return self._deliveries.problem

    def schedule(self, entry: DumpEntry) -> None:
        """Schedule the diagnosis of a dump for when its ranks' reports have settled."""
        self._diagnoser.schedule(entry)

    def poll(self) -> None:
        """Start deliveries of dumps to the run directory, and diagnoses, that are due; never waits."""
        self._deliveries.poll()
        self._diagnoser.poll()

    async def close(self) -> None:
        """Stop deliveries and diagnoses; the next agent goes on with them."""
        await self._diagnoser.close()
        await self._deliveries.close()

    def _show_diagnosis(self, entry: DumpEntry) -> None:
        _log.info("diagnosis of %s: %s", entry.key.folder, self._run_dir / entry.key.report)
        self._feed.publish("dump", entry.as_plain())
        for alert in self._alerts.latest.values():
            plain = self._plain.plain(alert)
            if plain["diagnosis"] == entry.key.url:
                self._feed.publish("alert", plain)

    async def _settle(self) -> bool:
        """Deliver and commit everything, which is what a diagnosis reads."""
        await self._deliveries.done()
        return await flush_within(self._flush)
