"""What the agents of a run tell of single steps, kept until all of them have come as far."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from trainermon.agent.controller.client import FAULTS, AgentClient, describe
from trainermon.agent.controller.fleet import AgentFleet, AgentHandle

MAX_OPEN_STEPS = 16

Told = TypeVar("Told")

_log = logging.getLogger(__name__)


class RunSteps(NamedTuple, Generic[Told]):
    """The steps of a run that can be judged now.

    Attributes:
        run: Its name.
        attempt: Its newest start.
        steps: Oldest first, each with what every agent told of it.
    """

    run: str
    attempt: int
    steps: Sequence[tuple[int, Sequence[tuple[AgentHandle, Told]]]]


class StepInquiry(Generic[Told]):
    """Asks all agents of a job for what is new to them at one address. Make it inside the event loop.

    Args:
        fleet: The agents.
        client: Speaks to them.
        path: What they are asked for, below their address; they are told after which step.
        read: Makes of one step's part of an answer what is kept of it; a step that it raises at is not told.
    """

    def __init__(self, fleet: AgentFleet, client: AgentClient, path: str, read: Callable[[Any], Told]) -> None:
        self._fleet = fleet
        self._client = client
        self._path = path
        self._read = read
        self._runs: dict[str, UnjudgedSteps[Told]] = {}

    async def look(self) -> list[RunSteps[Told]]:
        """Return what can be judged since the last call, for each run; none of runs that one agent sees completely."""
        runs = self._fleet.runs
        self._runs = {run: self._runs.get(run) or UnjudgedSteps() for run in runs}
        return [await self._look_at(run) for run in runs]

    async def ask(self, agent: AgentHandle, path: str, read: Callable[[Any], Any]) -> Any:
        """Return what `read` makes of an agent's answer; None if it gives none, or not that of this version."""
        try:
            return read(await self._client.get(agent.target, path))
        except (*FAULTS, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.info("%s tells nothing of %s: %s", agent.target.url, path, describe(error))
            return None

    async def _look_at(self, run: str) -> RunSteps[Told]:
        agents = [agent for agent in self._fleet.of_run(run) if agent.is_up]
        attempt = max((agent.report.attempt for agent in agents if agent.report), default=0)
        if self._runs[run].attempt != attempt:
            self._runs[run] = UnjudgedSteps(attempt)
        known = self._runs[run]
        if len(agents) < 2:
            return RunSteps(run, attempt, ())
        paths = [f"{self._path}?after={known.newest.get(agent.target.url, -1)}" for agent in agents]
        answers = await asyncio.gather(*(self.ask(*each, self._steps_of) for each in zip(agents, paths, strict=True)))
        for agent, answer in zip(agents, answers, strict=True):
            if answer is not None:
                known.add(agent, *answer)
        return RunSteps(run, attempt, known.complete([agent.target.url for agent in agents]))

    def _steps_of(self, answer: Any) -> tuple[int, dict[int, Told]]:
        return int(answer["attempt"]), {int(step): self._read(told) for step, told in answer["steps"].items()}


class UnjudgedSteps(Generic[Told]):
    """What the agents of an attempt have told, of the steps that are not judged yet.

    A step is judged when every agent that answers has come as far, or when so many later ones are open that whoever is
    missing will not come soon.

    Args:
        attempt: The start of the run.

    Attributes:
        newest: By address, the last step that an agent has told of.
    """

    def __init__(self, attempt: int = -1) -> None:
        self.attempt = attempt
        self.newest: dict[str, int] = {}
        self._open: dict[int, dict[str, tuple[AgentHandle, Told]]] = {}
        self._judged = -1

    def add(self, agent: AgentHandle, attempt: int, steps: Mapping[int, Told]) -> None:
        """Add what an agent told of steps; of another attempt, and of steps that are judged, nothing is kept."""
        if attempt != self.attempt:
            return
        url = agent.target.url
        for step, told in steps.items():
            self.newest[url] = max(step, self.newest.get(url, -1))
            if step > self._judged:
                self._open.setdefault(step, {})[url] = agent, told

    def complete(self, urls: Sequence[str]) -> list[tuple[int, Sequence[tuple[AgentHandle, Told]]]]:
        """Return, oldest first, the steps that can be judged with what each agent told, and forget them."""
        reached = min((self.newest[url] for url in urls if url in self.newest), default=-1)
        steps = sorted(self._open)
        late = steps[: max(0, len(steps) - MAX_OPEN_STEPS)]
        ready = [step for step in steps if step <= reached or step in late]
        self._judged = max([self._judged, *ready])
        return [(step, list(self._open.pop(step).values())) for step in ready]
