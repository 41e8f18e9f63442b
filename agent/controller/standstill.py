"""Who holds a whole job up: the evidence of all nodes joined, while the agent of one of them says that a rank hangs.

An agent knows only the ranks of its own node, and the rank that the others wait for may be on another one.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from trainermon.agent.controller.client import FAULTS, AgentClient, describe
from trainermon.agent.controller.fleet import Agent, Fleet
from trainermon.agent.hang.evidence import RankEvidence, parse_evidence
from trainermon.agent.hang.verdict import Hang, verdict

EVIDENCE_PATH = "api/v1/evidence"
RULES = frozenset({"hang", "rank-dead"})
LOOK_S = 2.0

_log = logging.getLogger(__name__)


class Standstill:
    """Asks the nodes of a run that stands still for their evidence.

    Attributes:
        verdicts: By run that stands still now, the answer for the whole job.
    """

    def __init__(self, fleet: Fleet, client: AgentClient) -> None:
        self.verdicts: dict[str, Hang] = {}
        self._fleet = fleet
        self._client = client

    async def look(self) -> None:
        """Bring the verdicts up to date; asks nobody while no rank hangs."""
        still = [run for run in self._fleet.runs if any(map(_stands_still, self._fleet.of_run(run)))]
        found = await asyncio.gather(*map(self._judge, still))
        verdicts = {run: hang for run, hang in zip(still, found, strict=True) if hang is not None}
        for run, hang in verdicts.items():
            if self.verdicts.get(run) != hang:
                _log.warning("run %s stands still: %s", run, hang.text)
        self.verdicts = verdicts

    async def _judge(self, run: str) -> Hang | None:
        agents = self._fleet.of_run(run)
        attempt = max((agent.report.attempt for agent in agents if agent.report), default=0)
        parts = await asyncio.gather(*map(self._ask, agents))
        evidence = [one for part in parts for one in part if one.attempt == attempt]
        return verdict(evidence) if evidence else None

    async def _ask(self, agent: Agent) -> list[RankEvidence]:
        try:
            plain: Any = await self._client.get(agent.target, EVIDENCE_PATH)
            return [parse_evidence(one) for one in plain["ranks"]]
        except (*FAULTS, KeyError, TypeError) as error:
            _log.info("%s gives no evidence: %s", agent.target.url, describe(error))
            return []


def _stands_still(agent: Agent) -> bool:
    return agent.report is not None and any(alert.rule in RULES for alert in agent.report.alerts)
