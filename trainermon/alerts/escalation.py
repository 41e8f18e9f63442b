"""Which alerts are followed by a dump, on which ranks, from which step on, and how much may be written.

The first rung of the ladder, the replay of a step that is lost, is decided by the rank itself and needs no command.
Here is the second: alerts whose rule says `escalate` become commands, under a quota of bytes and a rate limit. Whatever
is decided is recorded with its reason, and read back after a restart.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainermon.alerts.rules import AlertRule, RuleEscalation
from trainermon.core.config import EscalationConfig
from trainermon.core.ledger import Ledger
from trainermon.core.strict import build
from trainermon.core.values import Action, Alert, AlertState, Command, Kind

_logger = logging.getLogger(__name__)

_PERIOD_S = 3600.0
_QUOTA_SHARE = 4  # one escalation may take at most a quarter of the quota, so that the first does not take it all
_MIN_BYTES = 1 << 20  # less than this would cut a dump of statistics short

REPLICATED = frozenset(
    {Kind.GRAD_REDUCED, Kind.PARAM_ORIGIN, Kind.PARAM_UPDATED, Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.UPDATE, Kind.COMM}
)
"""Kinds that look alike on all ranks of a group, whichever of them is the cause."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EscalationDecision:
    """The decision about one alert: whether a dump follows, on which ranks, from which step on, and why.

    Attributes:
        alert: Id of the alert.
        incident: Alerts of one rule that began on the same step, on whichever ranks.
        command: Id of the command: that of the first alert of the incident that was followed by a dump.
        time_s: When, as given to `decide`.
        ranks: Which ranks were told to dump; empty if it was suppressed.
        first_step: From which step on; -1 if it was suppressed.
        bytes_per_rank: What each of them may write.
        reason: Why, in words.
    """

    alert: str
    incident: str
    command: str
    time_s: float
    ranks: tuple[int, ...] = ()
    first_step: int = -1
    bytes_per_rank: int = 0
    reason: str


class Escalator:
    """Decides, within limits, which alerts are followed by a dump, and makes the commands for the ranks.

    Args:
        settings: The limits, of one run on one node.
        rules: The rules that the alerts come from.
        path: Where decisions are recorded, one JSON object per line; None keeps them in memory only. Decisions in the
            file count as made.
    """

    def __init__(self, settings: EscalationConfig, rules: Sequence[AlertRule], *, path: Path | None = None) -> None:
        self._settings = settings
        self._max_bytes = int(settings.max_dump_mb * (1 << 20)) if settings.enabled else 0
        self._escalations = {rule.name: rule.escalate for rule in rules if rule.escalate}
        self._ledger = Ledger(path) if path else None
        self._decisions: dict[str, EscalationDecision] = {}
        self._written: dict[tuple[str, int], int] = {}  # by command and rank
        if self._ledger:
            self._ledger.read(self._apply)

    @property
    def decisions(self) -> list[EscalationDecision]:
        """All decisions so far, in order."""
        return list(self._decisions.values())

    @property
    def suppressed(self) -> list[EscalationDecision]:
        """The alerts whose rule says `escalate` that were not followed by a dump, with the reason."""
        return [decision for decision in self._decisions.values() if not decision.ranks]

    def bytes_left(self) -> int:
        """Return how many bytes dumps may still take: the quota less what is written or reserved."""
        return self._max_bytes - sum(
            self._written.get((decision.command, rank), decision.bytes_per_rank)
            for decision in self._decisions.values()
            for rank in decision.ranks
        )

    def decide(
        self, alert: Alert, steps: Mapping[int, int], now_s: float, *, margin_steps: int = 0
    ) -> dict[int, list[Command]]:
        """Return the commands that follow from an alert: at most one for each rank concerned, nothing for most alerts.

        An alert that was decided about before, that is not firing, or whose rule does not escalate has no consequence.
        Of kinds that look alike on all ranks (`REPLICATED`) no rank is known to be the cause: all known ranks dump. Of
        other kinds the alert's own rank dumps. Alerts of one rule that began on the same step are one incident: they
        count once for the rate limit, and their dumps have one id.

        Args:
            alert: As it came from the engine.
            steps: The last known step of every local rank that is alive.
            now_s: Unix time; only differences matter.
            margin_steps: How many steps a rank makes until it can have read the command; the settings' is the least.
        """
        escalation = self._escalations.get(alert.rule)
        if escalation is None or alert.state is not AlertState.FIRING or alert.id in self._decisions:
            return {}
        decision = self._judge(alert, steps, now_s, max(margin_steps, self._settings.margin_steps))
        self._decisions[alert.id] = decision
        self._record({"decision": dataclasses.asdict(decision)})
        if not decision.ranks:
            _logger.info("no dump follows alert %s (%s): %s", alert.id, alert.rule, decision.reason)
        return {rank: [self._command(decision, escalation)] for rank in decision.ranks}

    def decision(self, alert_id: str) -> EscalationDecision | None:
        """Return the decision about the alert with this id; None if there is none yet."""
        return self._decisions.get(alert_id)

    def admit(
        self, alert_ids: Sequence[str], command_id: str, ranks: Sequence[int], *, first_step: int, now_s: float
    ) -> EscalationDecision:
        """Decide, under the same limits, about alerts that somebody else found, such as Prometheus.

        All of them are one incident, and the first one's decision counts for all. One that was decided about before is
        not decided about again.

        Args:
            alert_ids: At least one.
            command_id: What the command will be called.
            ranks: Who is to dump, at least one.
            first_step: From which step on.
            now_s: Unix time; only differences matter.
        """
        known = self._decisions.get(alert_ids[0])
        if known is not None:
            return known
        followed = [other for other in self._decisions.values() if other.ranks]
        share = self._share(len(ranks))
        objection = self._limit(
            self._num_recent(followed, now_s, besides=command_id), share=share, num_ranks=len(ranks)
        )
        decision = EscalationDecision(
            alert=alert_ids[0],
            incident=command_id,
            command=command_id,
            time_s=now_s,
            ranks=() if objection else tuple(sorted(ranks)),
            first_step=-1 if objection else first_step,
            bytes_per_rank=0 if objection else share,
            reason=objection or "ordered from outside",
        )
        others = [
            dataclasses.replace(decision, alert=alert, ranks=(), first_step=-1, bytes_per_rank=0)
            for alert in alert_ids[1:]
        ]
        for each in (decision, *others):
            if each.alert not in self._decisions:
                self._decisions[each.alert] = each
                self._record({"decision": dataclasses.asdict(each)})
        return decision

    def settle(self, command_id: str, rank: int, num_bytes: int) -> None:
        """Record how many bytes a rank wrote for a command, 0 if it was late; the rest of its share is free again."""
        if any(decision.command == command_id for decision in self._decisions.values()):
            self._written[command_id, rank] = num_bytes
            self._record({"settled": {"command": command_id, "rank": rank, "num_bytes": num_bytes}})

    def _judge(self, alert: Alert, steps: Mapping[int, int], now_s: float, margin_steps: int) -> EscalationDecision:
        incident = f"{alert.rule}/{alert.attempt}/{alert.first_step}"
        followed = [other for other in self._decisions.values() if other.ranks]
        same = [other for other in followed if other.incident == incident]
        told = {rank for other in same for rank in other.ranks}
        concerned = set(steps) if alert.kind in REPLICATED else {alert.rank} & set(steps)
        ranks = tuple(sorted(concerned - told))
        share = self._share(len(ranks))
        num_recent = self._num_recent(followed, now_s, besides=incident)
        decision = EscalationDecision(
            alert=alert.id,
            incident=incident,
            command=same[0].command if same else alert.id,
            time_s=now_s,
            reason=self._objection(alert, concerned=concerned, ranks=ranks, num_recent=num_recent, share=share),
        )
        if decision.reason:
            return decision
        ahead = max(alert.step, *steps.values()) + margin_steps
        first_step = max(ahead, *(other.first_step for other in same)) if same else ahead
        return dataclasses.replace(
            decision, ranks=ranks, first_step=first_step, bytes_per_rank=share, reason=alert.message
        )

    def _objection(
        self, alert: Alert, *, concerned: set[int], ranks: tuple[int, ...], num_recent: int, share: int
    ) -> str:
        if not concerned:
            return f"rank {alert.rank} is not running"
        if not ranks:
            return "an alert of the same incident is followed by a dump"
        return self._limit(num_recent, share=share, num_ranks=len(ranks))

    def _share(self, num_ranks: int) -> int:
        """Return how many bytes each of `num_ranks` may write."""
        return min(self.bytes_left(), self._max_bytes // _QUOTA_SHARE) // max(1, num_ranks)

    def _num_recent(self, followed: Sequence[EscalationDecision], now_s: float, *, besides: str) -> int:
        """Return how many incidents of the last hour were followed by a dump."""
        # A clock that was set back leaves decisions in the future; they count as recent.
        return len({other.incident for other in followed if now_s - other.time_s < _PERIOD_S} - {besides})

    def _limit(self, num_recent: int, *, share: int, num_ranks: int) -> str:
        if num_recent >= self._settings.max_per_hour:
            return f"{num_recent} dumps in the last hour, at most {self._settings.max_per_hour} are allowed"
        if share < _MIN_BYTES:
            return f"{self.bytes_left()} of {self._max_bytes} bytes are left, too few for {num_ranks} ranks"
        return ""

    def _command(self, decision: EscalationDecision, escalation: RuleEscalation) -> Command:
        return Command(
            id=decision.command,
            action=Action.DUMP,
            first_step=decision.first_step,
            num_steps=escalation.steps or self._settings.num_steps,
            task=escalation.task or self._settings.task,
            max_bytes=decision.bytes_per_rank,
            reason=decision.reason,
        )

    def _apply(self, entry: Mapping[str, Any]) -> None:
        if "decision" in entry:
            decision = build(EscalationDecision, entry["decision"])
            self._decisions[decision.alert] = decision
        else:
            settled = entry["settled"]
            self._written[settled["command"], settled["rank"]] = settled["num_bytes"]

    def _record(self, entry: Mapping[str, Any]) -> None:
        if self._ledger is None:
            return
        try:
            self._ledger.append(entry)
        except OSError as error:
            # The limits still hold in this process; only a restarted agent would not know of this decision.
            _logger.warning("a decision about dumps cannot be recorded: %s", error)
