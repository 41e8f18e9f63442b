"""The agents of a job, as last seen.

Ages are measured by this process's own monotonic clock. An agent that is no longer found is forgotten; while nothing
can be found at all, for example because the name server does not answer, the agents stay those that were found last.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import resource
import time
from collections.abc import Iterable, Sequence

from trainermon.agent.controller.client import FAULTS, AgentAddress, AgentClient, describe
from trainermon.agent.controller.discovery import AgentFinder
from trainermon.agent.controller.report import parse_report
from trainermon.agent.orders.answers import AgentReport, RankSummary

STATES_PATH = "api/v1/ranks"
NOT_ASKED = "not asked yet"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class AgentHandle:
    """One agent as the controller knows it, with its last report.

    Attributes:
        target: Its address.
        report: Its last answer on ranks and alerts; None before the first.
        seen_s: When that came, monotonic seconds.
        problem: Why there was no answer to the last request; empty if there was.
    """

    target: AgentAddress
    report: AgentReport | None = None
    seen_s: float = 0.0
    problem: str = NOT_ASKED

    @property
    def is_up(self) -> bool:
        """Whether the agent has answered the last request."""
        return not self.problem


class AgentFleet:
    """Finds all agents, and asks them again and again for the state of their ranks.

    Args:
        client: Sends the requests.
        finders: The ways of finding agents.

    Attributes:
        agents: By address.
        is_known: Every way of finding agents has worked, and each agent was asked, at least once.
        num_polls: Requests sent.
        num_poll_failures: Those without an answer.
        num_discovery_failures: Attempts to find agents that failed.
        poll_duration_s: Wall time of the last round.
    """

    def __init__(self, client: AgentClient, finders: Sequence[AgentFinder]) -> None:
        self.agents: dict[str, AgentHandle] = {}
        self.is_known = asyncio.Event()
        self.num_polls = self.num_poll_failures = self.num_discovery_failures = 0
        self.poll_duration_s = 0.0
        self.discovered_s = 0.0
        self._client = client
        self._finders = finders
        self._found: dict[AgentFinder, list[AgentAddress]] = {}

    async def discover(self) -> None:
        """Find the agents anew by every way, add those that are new, and ask them; drop those that are gone."""
        await asyncio.gather(*map(self._look, self._finders))
        targets = {target.url: target for found in self._found.values() for target in found}
        self.agents = {url: self._kept(target) for url, target in targets.items()}
        max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._client.keeps_connections = 2 * len(self.agents) < max_files or max_files == resource.RLIM_INFINITY
        await self._ask_all([agent for agent in self.agents.values() if agent.problem == NOT_ASKED])

    async def poll(self, run: str | None = None) -> None:
        """Ask every agent for its report, or with `run` only those of that run and those whose run is not known yet.

        Those that have answered last time are asked first.
        """
        began_s = time.monotonic()
        asked = [agent for agent in self.agents.values() if run is None or _may_be_of(agent, run)]
        await self._ask_all(sorted(asked, key=lambda agent: not agent.is_up))
        if run is None:
            self.poll_duration_s = time.monotonic() - began_s

    def of_run(self, run: str) -> list[AgentHandle]:
        """Return the agents of the newest attempt (start) of a run, whether they answer now or not."""
        found = [agent for agent in self.agents.values() if agent.report is not None and agent.report.run_id == run]
        newest = max((agent.report.attempt for agent in found if agent.report), default=0)
        return [agent for agent in found if agent.report and agent.report.attempt == newest]

    @property
    def runs(self) -> list[str]:
        """The ids of all runs that an agent has named, sorted."""
        return sorted({agent.report.run_id for agent in self.agents.values() if agent.report})

    async def _look(self, finder: AgentFinder) -> None:
        try:
            self._found[finder] = await finder.find()
            self.discovered_s = time.time()
        except FAULTS as error:
            self.num_discovery_failures += 1
            _log.warning("%s: %s", finder, describe(error))

    def _kept(self, target: AgentAddress) -> AgentHandle:
        known = self.agents.get(target.url)
        if known is None:
            return AgentHandle(target)
        known.target = target
        return known

    async def _ask_all(self, agents: Iterable[AgentHandle]) -> None:
        await asyncio.gather(*map(self._ask, agents))
        if len(self._found) == len(self._finders) and all(a.problem != NOT_ASKED for a in self.agents.values()):
            self.is_known.set()

    async def _ask(self, agent: AgentHandle) -> None:
        self.num_polls += 1
        try:
            agent.report = parse_report(await self._client.get(agent.target, STATES_PATH))
            agent.seen_s = time.monotonic()
            agent.problem = ""
        except FAULTS as error:
            self.num_poll_failures += 1
            if agent.is_up:
                _log.warning("%s does not answer: %s", agent.target.url, describe(error))
            agent.problem = describe(error)


def living_ranks(agents: Iterable[AgentHandle]) -> dict[int, tuple[AgentHandle, RankSummary]]:
    """Return, by rank number, (agent, summary) of each living rank of `agents`."""
    return {state.rank: (agent, state) for agent in agents if agent.report for state in agent.report.living}


def _may_be_of(agent: AgentHandle, run: str) -> bool:
    return agent.report is None or agent.report.run_id == run
