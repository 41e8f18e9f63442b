"""A controller without HTTP in front of simulated agents, in one event loop."""

from __future__ import annotations

import asyncio
import time

from benchmarks.simulated_agents import start
from tests.agent.controller.test_planning import request
from trainermon.agent.controller.controller import Controller
from trainermon.agent.controller.journal import EscalationJournal
from trainermon.agent.controller.settings import load_settings


class Scene:
    """A controller without HTTP in front of simulated agents, in one event loop."""

    def __init__(self, folder, *, num_agents=2, steps_per_s=1.0, timeout_s=0.5, tries=3, give_up_s=5.0):
        self.orders = []
        self._folder = folder
        self._shape = num_agents, 2, steps_per_s, self.orders.append
        self._speech = {"poll_s": 0.02, "timeout_s": timeout_s, "tries": tries}
        self._give_up_s = give_up_s

    async def __aenter__(self):
        self.runner, by_port = await start(*self._shape)
        self.agents = list(by_port.values())
        self.addresses = [f"127.0.0.1:{port}" for port in by_port]
        words = {
            "state_dir": str(self._folder),
            "discovery": {"agents": self.addresses, "refresh_s": 0.02},
            "agents": self._speech,
            "limits": {"give_up_s": self._give_up_s},
        }
        self.journal = EscalationJournal(self._folder, now_s=time.time())
        self.controller = Controller(load_settings(None, words), self.journal, token="t")
        self.task = asyncio.ensure_future(self.controller.run())
        await asyncio.wait_for(self.controller.fleet.is_known.wait(), 10)
        return self

    async def __aexit__(self, *exception):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.journal.close()
        await self.runner.cleanup()

    async def escalate(self, ranks=None, *, within_s=900.0):
        """Accept a request and wait until it is over; return it."""
        asked = request(ranks, alerts=())
        await self.controller._accept([asked])
        escalation = self.journal.escalations[asked.id]
        deadline = time.monotonic() + within_s
        while escalation.outcome is None:
            assert time.monotonic() < deadline, escalation
            await asyncio.sleep(0.01)
        return escalation
