"""Simulated agents of a job in a thread of the test."""

from __future__ import annotations

import asyncio
import threading

from benchmarks.simulated_agents import SimulatedAgent, start


class Job(threading.Thread):
    """Agents that a test can change while they answer.

    Attributes:
        agents: By number.
        addresses: Their `host:port`.
        orders: What they have taken, in order, with the number of the agent.
    """

    def __init__(self, num_agents, num_ranks, *, steps_per_s=2.0):
        super().__init__(daemon=True)
        self.agents: list[SimulatedAgent] = []
        self.addresses: list[str] = []
        self.orders: list[dict] = []
        self._shape = num_agents, num_ranks, steps_per_s
        self._begun = threading.Event()
        self._loop = asyncio.new_event_loop()

    def run(self):
        self._loop.run_until_complete(self._serve())

    async def _serve(self):
        self._over = asyncio.Event()
        runner, by_port = await start(*self._shape, self.orders.append)
        self.agents = list(by_port.values())
        self.addresses = [f"127.0.0.1:{port}" for port in by_port]
        self._begun.set()
        await self._over.wait()
        await runner.cleanup()

    def ready(self):
        self.start()
        assert self._begun.wait(900)
        return self

    def close(self):
        self._loop.call_soon_threadsafe(self._over.set)
        self.join(900)
        self._loop.close()
