"""What a program beside the agent has found about a rank, and tells it over HTTP: so far `trainermon check follow`.

    POST /api/findings {"rule": "kernel-inaccurate", "rank": 3, "step": 40, "holds": true, "value": 2, "detail": "…"}

It becomes an alert by the `reported` rule of that name, and ends it, like a statement of the agent's own.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from trainermon.agent.orders.answers import OrderAnswer, OrderStatus
from trainermon.agent.orders.commands import ConflictError
from trainermon.agent.reactions import Reactions
from trainermon.agent.watch import RankWatch
from trainermon.alerts.reported import AgentStatement
from trainermon.core.strict import build, require
from trainermon.core.values import well_formed

RULES = ("kernel-inaccurate",)
"""What may be told; the other rules are the agent's own."""
MAX_DETAIL = 500
_MAX_STEP = 2**53


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutsideFinding:
    """What was found.

    Attributes:
        rule: Name of the rule.
        rank: The rank that it is about, one of this agent's.
        step: On which step.
        holds: Whether the rule's condition holds there, or is over.
        value: A number that says how bad.
        detail: What the rule's summary calls `{detail}`.
    """

    rule: str
    rank: int
    step: int
    holds: bool
    value: float = math.nan
    detail: str = ""

    def __post_init__(self) -> None:
        require(self.rule in RULES, "rule", self.rule, " or ".join(RULES))
        require(0 <= self.step < _MAX_STEP, "step", self.step, "the number of a step")
        require(len(self.detail) <= MAX_DETAIL, "detail", self.detail, f"at most {MAX_DETAIL} characters")


class FindingDesk:
    """Takes what programs beside the agent have found.

    Args:
        watch: Knows the local ranks.
        reactions: Know the number of the attempt.
        report: Receives it as a statement.
    """

    def __init__(self, watch: RankWatch, reactions: Reactions, report: Callable[[AgentStatement], None]) -> None:
        self._watch, self._reactions, self._report = watch, reactions, report

    def take(self, body: Any) -> OrderAnswer:
        """Evaluate the finding that a client's JSON describes. Told again it changes nothing.

        Raises:
            ConfigError: The body is wrong.
            ConflictError: The rank is not one of this node's.
        """
        require(isinstance(body, Mapping), "the body", body, "an object")
        finding = build(OutsideFinding, body)
        if finding.rank not in self._watch.ranks:
            raise ConflictError(f"rank {finding.rank} is none of this node's: {sorted(self._watch.ranks)}")
        self._report(
            AgentStatement(
                rule=finding.rule,
                holds=finding.holds,
                rank=finding.rank,
                attempt=self._reactions.attempt,
                step=finding.step,
                time_s=time.time(),
                detail=well_formed(finding.detail),
                value=finding.value,
            )
        )
        return OrderAnswer(status=OrderStatus.ACCEPTED)
