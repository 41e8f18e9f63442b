"""Agents without ranks, many in one process: they answer a controller as agents do, each on a port of its own.

    python -m benchmarks.simulated_agents 128 8 10.0           # agents, ranks of each, steps per second
    python -m benchmarks.simulated_agents 128 8 10.0 troubled   # every hundredth agent has an alert, and a rank less

prints the addresses as one JSON list, and then, for every order that an agent takes, a line with what it took. An agent
takes an id once, whatever it is asked for later; a step that is past is late. It reports a dump as written at once.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from benchmarks.many_servers import Answer, ManyServers

FIRST_STEP = 100


class SimulatedAgent:
    """One agent and its ranks, which do `steps_per_s` steps per second from the start on.

    Attributes:
        run_id: The run.
        attempt: Of the run.
        alerts: Its firing alerts, as an agent tells them.
        gone: Ranks that do not live any more, and have not said why.
        ended: Ranks that have ended in good order.
        evidence: What is known of its ranks, where they stand still.
        folded: By step and rank, its place and its gradients, folded.
        checksums: By step, group, rank and name, of the replicas that its ranks hold.
        reports: What its ranks say of each dump; None for nothing.
        delay_s: How long the next order takes to arrive.
    """

    def __init__(
        self, number: int, *, num_agents: int, num_ranks: int, steps_per_s: float, note: Callable[[Any], None]
    ) -> None:
        self.run_id = "run"
        self.attempt = 1
        self.alerts: list[dict[str, Any]] = []
        self.gone: set[int] = set()
        self.ended: set[int] = set()
        self.evidence: list[dict[str, Any]] = []
        self.folded: dict[int, dict[str, Any]] = {}
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

    def trouble(self) -> None:
        """Have the last rank die, and an alert fire for the one before it."""
        self.gone = {self._ranks[-1]}
        message = "gradient-nonfinite: NaN or Inf in 44 of 44 gradients"
        alert = {"id": str(self._number), "rule": "gradient-nonfinite", "severity": "fatal", "step": 90}
        self.alerts = [{**alert, "rank": self._ranks[-2], "message": message}]

    def states(self) -> dict[str, Any]:
        """Answer `GET /api/v1/ranks`."""
        step = self.step
        ranks = [
            {
                "rank": r,
                "alive": r not in self.gone | self.ended,
                "step": step,
                "phase": "closed" if r in self.ended else "step",
                "lag_s": 0.05,
                "place": {"dp": r // 8, "tp": r % 8},
            }
            for r in self._ranks
        ]
        return {
            "run_id": self.run_id,
            "host": f"node{self._number:03d}",
            "attempt": self.attempt,
            "world_size": self._world_size,
            "step": step - 1,
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

    def folds(self, after: int) -> dict[str, Any]:
        """Answer `GET /api/v1/folds`."""
        steps = {str(step): ranks for step, ranks in self.folded.items() if step > after}
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
) -> tuple[ManyServers, dict[int, SimulatedAgent]]:
    """Start the agents; return what serves them, to be cleaned up at the end, and each one by its port."""
    agents: dict[int, SimulatedAgent] = {}

    def answer(port: int, method: str, path: str, body: bytes) -> Answer | Awaitable[Answer]:
        agent, url = agents[port], urllib.parse.urlsplit(path)
        asked = dict(urllib.parse.parse_qsl(url.query))
        match method, url.path:
            case "GET", "/api/v1/ranks":
                return _json(agent.states())
            case "GET", "/api/v1/evidence":
                return _json({"ranks": agent.evidence})
            case "GET", "/api/v1/checksums" | "/api/v1/folds":
                tell = agent.digests if url.path.endswith("checksums") else agent.folds
                return _json(tell(int(asked["after"])))
            case "GET", "/api/v1/copies":
                return _json(agent.copies(int(asked["step"]), asked["group"]))
            case "POST", "/api/v1/escalations":
                return _escalate(agent, json.loads(body))
        return _json({"detail": f"no {method} {url.path}"}, status=404)

    servers = ManyServers(answer)
    await servers.start(num_agents)
    for number, port in enumerate(servers.ports):
        agents[port] = SimulatedAgent(
            number, num_agents=num_agents, num_ranks=num_ranks, steps_per_s=steps_per_s, note=note
        )
    return servers, agents


async def _escalate(agent: SimulatedAgent, order: Mapping[str, Any]) -> Answer:
    await asyncio.sleep(agent.delay_s())
    status, answer = agent.escalate(order)
    return _json(answer, status=status)


def _json(value: Any, *, status: int = 200) -> Answer:
    return status, "application/json", json.dumps(value).encode()


def _print(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def _main() -> None:
    num_agents, num_ranks, steps_per_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    _, agents = await start(num_agents, num_ranks, steps_per_s, _print)
    if sys.argv[4:] == ["troubled"]:
        for number, agent in enumerate(agents.values()):
            if number % 100 == 7:
                agent.trouble()
    _print([f"127.0.0.1:{port}" for port in agents])
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
