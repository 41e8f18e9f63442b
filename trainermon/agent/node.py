"""What the page, Prometheus and control calls get to see of an agent: answers made from its parts, nothing kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Any

from trainermon.agent.assembly import AgentParts
from trainermon.agent.hang.watch import HangWatch
from trainermon.agent.orders.answers import OrderAnswer
from trainermon.agent.orders.desk import OrderDesk
from trainermon.agent.self_metrics import AgentMetrics
from trainermon.agent.turn.faults import TurnFaults
from trainermon.agent.web.findings import RunFindings
from trainermon.agent.web.overview import RunOverview


class RunNode:
    """The `NodeInterface` of `trainermon.agent.web.http`, for a running agent.

    Args:
        parts: Of the agent.
        overview: State of run and ranks.
        hang: Watches for ranks that stand still or die.
        faults: Of the loop.
        executor: Reads files of the run directory.
        flush: Commits what was followed; returns whether it succeeded.
        stop: Ends the agent soon.
    """

    def __init__(  # noqa: PLR0913 - what is asked of an agent
        self,
        parts: AgentParts,
        *,
        overview: RunOverview,
        hang: HangWatch,
        faults: TurnFaults,
        executor: Executor,
        flush: Callable[[], Awaitable[bool]],
        stop: Callable[[], None],
    ) -> None:
        alerting, orders = parts.alerting, parts.orders
        self.feed = parts.views.feed
        self._overview = overview
        self._findings = RunFindings(
            parts.place, alerts=alerting.book, dumps=orders.dumps, plain=alerting.plain, executor=executor
        )
        self._history = parts.views.history
        self._checksums = parts.checksums
        self._metrics = AgentMetrics(parts, faults)
        self._desk = OrderDesk(
            orders.commands, parts.watch, orders.reactions, margin_steps=parts.settings.escalation.margin_steps
        )
        self._hang = hang
        self._flush = flush
        self._stop = stop

    def run(self) -> dict[str, Any]:
        """Return the state of run and ranks, ready for JSON."""
        return self._overview.plain()

    def lines(self, names: list[str]) -> dict[str, Any]:
        """Return {"steps": [...], "series": {name: [...]}} over all local ranks, ready for JSON."""
        return self._history.lines(names)

    def heatmap(self, kind: str, statistic: str, columns: int) -> bytes:
        """Return a heat map in the page's binary form."""
        return self._history.heatmap(kind, statistic, columns)

    def ranks(self, quantity: str, columns: int) -> bytes:
        """Return ranks x steps in the page's binary form."""
        return self._history.ranks(quantity, columns)

    def alerts(self) -> list[dict[str, Any]]:
        """Return every alert of the run in its last state."""
        return self._findings.alerts()

    def dumps(self) -> list[dict[str, Any]]:
        """Return every dump of the run, oldest first."""
        return self._findings.dumps()

    async def diagnosis(self, identity: str, attempt: int, step: int) -> bytes | None:
        """Return the report of a dump that is known here; no other file can be named."""
        return await self._findings.diagnosis(identity, attempt, step)

    def evidence(self) -> dict[str, Any]:
        """Return the evidence found in a hang, else what the control pages of the local ranks tell."""
        return self._hang.plain()

    def checksums(self, after: int) -> dict[str, Any]:
        """Return {"attempt", "steps"}: by step after `after`, group and rank, a digest of the checksums of replicas."""
        return self._checksums.digests(after)

    def copies(self, step: int, group: str) -> dict[int, dict[str, str]]:
        """Return, by rank and name, the checksums (hexadecimal) of a group of copies on one step; empty if not kept."""
        found = self._checksums.copies(step, group)
        return {rank: {name: f"{checksum:x}" for name, checksum in held.items()} for rank, held in found.items()}

    async def report(self, name: str) -> bytes | None:
        """Return the post-mortem of an alert of this node as Markdown; no other file can be named."""
        return await self._findings.post_mortem(name)

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """Return the exposition and its content type."""
        return self._metrics.render(accept)

    def order(self, body: Any) -> OrderAnswer:
        """Send a client's command to the ranks it names in `ranks`, or to all that live; return how it was taken."""
        return self._desk.order(body)

    async def flush(self) -> bool:
        """Commit everything followed so far; return whether that succeeded."""
        return await self._flush()

    def stop(self) -> None:
        """Store everything, and end soon."""
        self._stop()
