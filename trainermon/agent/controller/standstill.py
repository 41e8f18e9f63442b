"""Who holds a whole job up: the evidence of all nodes joined, while the agent of one of them says that a rank hangs.

An agent knows only the ranks of its own node, and the rank that the others wait for may be on another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from trainermon.agent.controller.client import FAULTS, AgentClient, describe
from trainermon.agent.controller.fleet import AgentFleet, AgentHandle
from trainermon.agent.hang.evidence import RankEvidence, parse_evidence
from trainermon.agent.hang.verdict import HangVerdict, verdict

EVIDENCE_PATH = "api/v1/evidence"
RULES = frozenset({"hang", "rank-dead"})
LOOK_S = 2.0

_log = logging.getLogger(__name__)


class StandstillInquiry:
    """Asks the agents of a run that hangs for their evidence, and finds which rank of the whole job is to blame.

    Attributes:
        verdicts: By id of a run that stands still now, who is to blame.
    """

    def __init__(self, fleet: AgentFleet, client: AgentClient) -> None:
        self.verdicts: dict[str, HangVerdict] = {}
        self._fleet = fleet
        self._client = client

    async def look(self) -> None:
        """Update the verdicts of runs that hang; asks no agent while no rank hangs."""
        still = [run for run in self._fleet.runs if any(map(_stands_still, self._fleet.of_run(run)))]
        verdicts: dict[str, HangVerdict] = {}
        for run in still:
            hang = await self._judge(run)
            if hang is not None:
                verdicts[run] = hang
        for run, hang in verdicts.items():
            if self.verdicts.get(run) != hang:
                _log.warning("run %s stands still: %s", run, hang.text)
        self.verdicts = verdicts

    async def _judge(self, run: str) -> HangVerdict | None:
        agents = self._fleet.of_run(run)
        attempt = max((agent.report.attempt for agent in agents if agent.report), default=0)
        answers = await asyncio.gather(*map(self._ask, agents))
        # Not in the event loop: for thousands of ranks this takes seconds.
        return await asyncio.to_thread(
            _judged, [(a.target.url, b) for a, b in zip(agents, answers, strict=True)], attempt
        )

    async def _ask(self, agent: AgentHandle) -> Any:
        try:
            return await self._client.get(agent.target, EVIDENCE_PATH)
        except FAULTS as error:
            _note_silent(agent.target.url, error)
            return None


def _judged(answers: Sequence[tuple[str, Any]], attempt: int) -> HangVerdict | None:
    """Return who holds up an attempt after the agents' answers, by address; None without any evidence."""
    evidence = [one for url, answer in answers if answer is not None for one in _parsed(url, answer)]
    known = [one for one in evidence if one.attempt == attempt]
    return verdict(known) if known else None


def _parsed(url: str, answer: Any) -> list[RankEvidence]:
    try:
        return [parse_evidence(one) for one in answer["ranks"]]
    except (ValueError, KeyError, TypeError) as error:
        _note_silent(url, error)
        return []


def _note_silent(url: str, error: Exception) -> None:
    _log.info("%s gives no evidence: %s", url, describe(error))


def _stands_still(agent: AgentHandle) -> bool:
    return agent.report is not None and any(alert.rule in RULES for alert in agent.report.alerts)
