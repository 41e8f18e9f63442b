"""Agents without ranks, many in one process: they answer a controller as agents do, each on a port of its own.

    python -m benchmarks.simulated_agents 128 8 10.0        # agents, ranks of each, steps per second

prints the addresses as one JSON list, and then, for every order that an agent takes, a line with what it took. An agent
takes an id once, whatever it is asked for later; a step that is past is late. It reports a dump as written at once.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

FIRST_STEP = 100


class SimulatedAgent:
    """One agent and its ranks, which do `steps_per_s` steps per second from the start on.

    Attributes:
        attempt: Of the run.
        alerts: Its firing alerts, as an agent tells them.
        gone: Ranks that do not live any more.
        evidence: What is known of its ranks, where they stand still.
        checksums: By step, group, rank and name, of the replicas that its ranks hold.
        reports: What its ranks say of each dump; None for nothing.
        delay_s: How long the next order takes to arrive.
    """

    def __init__(
        self, number: int, *, num_agents: int, num_ranks: int, steps_per_s: float, note: Callable[[Any], None]
    ) -> None:
        self.attempt = 1
        self.alerts: list[dict[str, Any]] = []
        self.gone: set[int] = set()
        self.evidence: list[dict[str, Any]] = []
        self.checksums: dict[int, dict[str, dict[int, dict[str, int]]]] = {}
        self.reports: str | None = "written"
        self.delay_s: Callable[[], float] = lambda: 0.0
        self._number = number
        self._ranks = range(number * num_ranks, (number + 1) * num_ranks)
        self._world_size = num_agents * num_ranks
        self._steps_per_s = steps_per_s
        self._note = note
        self._began_s = time.monotonic()
        self._taken: dict[str, Mapping[str, Any]] = {}

    @property
    def step(self) -> int:
        """The step that every rank is on."""
        return FIRST_STEP + int((time.monotonic() - self._began_s) * self._steps_per_s)

    def states(self) -> dict[str, Any]:
        """Answer `GET /api/v1/ranks`."""
        step = self.step
        ranks = [
            {
                "rank": r,
                "alive": r not in self.gone,
                "step": step,
                "phase": "step",
                "lag_s": 0.05,
                "place": {"dp": r // 8, "tp": r % 8},
            }
            for r in self._ranks
        ]
        return {
            "run_id": "run",
            "host": f"node{self._number:03d}",
            "attempt": self.attempt,
            "world_size": self._world_size,
            "steps_per_s": self._steps_per_s,
            "ranks": ranks,
            "alerts": self.alerts,
            "dumps": self._dumps(),
        }

    def digests(self, after: int) -> dict[str, Any]:
        """Answer `GET /api/v1/checksums`."""
        steps = {
            str(step): {
                group: {str(rank): f"{sum(held.values()):x}" for rank, held in ranks.items()}
                for group, ranks in groups.items()
            }
            for step, groups in self.checksums.items()
            if step > after
        }
        return {"attempt": self.attempt, "steps": steps}

    def copies(self, step: int, group: str) -> dict[str, Any]:
        """Answer `GET /api/v1/copies`."""
        ranks = self.checksums.get(step, {}).get(group, {})
        return {
            "ranks": {str(rank): {name: f"{value:x}" for name, value in held.items()} for rank, held in ranks.items()}
        }

    def _dumps(self) -> dict[str, dict[str, str]]:
        if self.reports is None:
            return {}
        return {name: {str(r): self.reports for r in order["ranks"]} for name, order in self._taken.items()}

    def escalate(self, order: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Answer `POST /api/v1/escalations`."""
        known = self._taken.get(order["id"])
        if known is not None:
            return 200, {"status": "duplicate", "ranks": known["ranks"], "late": []}
        if order["attempt"] != self.attempt:
            return 409, {"detail": f"attempt: found {order['attempt']}, the run is in attempt {self.attempt}"}
        if order["first_step"] < self.step:
            return 200, {"status": "late", "ranks": [], "late": order["ranks"]}
        self._taken[order["id"]] = order
        self._note({"agent": self._number, **order})
        return 202, {"status": "accepted", "ranks": order["ranks"], "late": []}


async def start(
    num_agents: int, num_ranks: int, steps_per_s: float, note: Callable[[Any], None]
) -> tuple[web.AppRunner, dict[int, SimulatedAgent]]:
    """Start the agents; return what serves them, to be cleaned up at the end, and each one by its port."""
    agents: dict[int, SimulatedAgent] = {}

    async def states(request: web.Request) -> web.Response:
        return web.json_response(agents[_port(request)].states())

    async def escalate(request: web.Request) -> web.Response:
        agent = agents[_port(request)]
        await asyncio.sleep(agent.delay_s())
        status, answer = agent.escalate(await request.json())
        return web.json_response(answer, status=status)

    async def evidence(request: web.Request) -> web.Response:
        return web.json_response({"ranks": agents[_port(request)].evidence})

    async def checksums(request: web.Request) -> web.Response:
        return web.json_response(agents[_port(request)].digests(int(request.query["after"])))

    async def copies(request: web.Request) -> web.Response:
        return web.json_response(agents[_port(request)].copies(int(request.query["step"]), request.query["group"]))

    application = web.Application()
    application.router.add_get("/api/v1/checksums", checksums)
    application.router.add_get("/api/v1/copies", copies)
    application.router.add_get("/api/v1/ranks", states)
    application.router.add_get("/api/v1/evidence", evidence)
    application.router.add_post("/api/v1/escalations", escalate)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    for number in range(num_agents):
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        agents[runner.addresses[-1][1]] = SimulatedAgent(
            number, num_agents=num_agents, num_ranks=num_ranks, steps_per_s=steps_per_s, note=note
        )
    return runner, agents


def _port(request: web.Request) -> int:
    assert request.transport is not None
    return int(request.transport.get_extra_info("sockname")[1])


def _print(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def _main() -> None:
    num_agents, num_ranks, steps_per_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    _, agents = await start(num_agents, num_ranks, steps_per_s, _print)
    _print([f"127.0.0.1:{port}" for port in agents])
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
