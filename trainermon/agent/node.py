"""What the page, Prometheus and control calls get to see of an agent: answers made from its parts, nothing kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Any

from trainermon.agent.assembly import AgentParts
from trainermon.agent.hang.watch import HangWatch
from trainermon.agent.orders.answers import OrderAnswer
from trainermon.agent.orders.desk import OrderDesk
from trainermon.agent.orders.diagnosis_pages import DiagnosisPages
from trainermon.agent.orders.dumps import DumpKey
from trainermon.agent.orders.findings import FindingDesk
from trainermon.agent.orders.graphs import DumpGraphs, GraphAnswer
from trainermon.agent.orders.handling import HandlingDesk
from trainermon.agent.self_metrics import AgentMetrics
from trainermon.agent.turn.faults import TurnFaults
from trainermon.agent.web.curves import StoredCurves
from trainermon.agent.web.findings import RunFindings
from trainermon.agent.web.overview import RunOverview
from trainermon.exporters.store.curves import CurveQuery


class RunNode:
    """What the web application (`trainermon.agent.web.http`) can ask of a running agent: its `NodeInterface`.

    Args:
        parts: Those of the agent.
        overview: State of run and ranks.
        hang: Watches for ranks that stand still or die.
        faults: Counts failed turns of the loop.
        executor: Reads files of the run directory.
        flush: Stores what was read; returns whether it succeeded.
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
        self._pages = DiagnosisPages(parts.place.run_dir, orders.dumps, executor=executor)
        self._graphs = DumpGraphs(parts.place.run_dir, orders.dumps, executor=executor)
        self._curves = StoredCurves(parts.place.run_dir, node=parts.place.node, flush=flush)
        self._history = parts.views.history
        self._checksums = parts.checksums
        self._folds = parts.folds
        self._metrics = AgentMetrics(parts, faults)
        self._desk = OrderDesk(
            orders.commands, parts.watch, orders.reactions, margin_steps=parts.settings.escalation.margin_steps
        )
        self._found = FindingDesk(parts.watch, orders.reactions, alerting.judge.report)
        self._handling = HandlingDesk(
            alerting.handling,
            alerting.book,
            plain=alerting.plain,
            publish=self.feed.publish,
            rules=frozenset(rule.name for rule in alerting.rules),
            executor=executor,
        )
        self._hang = hang
        self._flush = flush
        self._stop = stop

    def run(self) -> dict[str, Any]:
        """Return the state of run and ranks as a mapping ready for JSON."""
        return self._overview.plain()

    def lines(self, names: list[str]) -> dict[str, Any]:
        """Return curves over all local ranks for the page: {"steps": [...], "series": {name: [...]}}.

        `names` are such as `loss`. Raises QueryError for an unknown one.
        """
        return self._history.lines(names)

    def heatmap(self, kind: str, statistic: str, columns: int) -> bytes:
        """Return the heat map of a statistic of a kind of tensors, rows × steps, as framed float32 for the page.

        `columns` is the largest number of steps; more are merged.
        """
        return self._history.heatmap(kind, statistic, columns)

    def ranks(self, quantity: str, columns: int) -> bytes:
        """Return a quantity of every rank, ranks × steps, as framed float32 for the page.

        More steps than `columns` are merged.
        """
        return self._history.ranks(quantity, columns)

    async def curve(self, query: CurveQuery) -> bytes:
        """Return a row of a heat map as lines over all steps, in the page's binary format."""
        return await self._curves.curve(query)

    async def curve_table(self, query: CurveQuery) -> bytes:
        """Return the same steps as CSV, with all moments."""
        return await self._curves.curve_table(query)

    async def steps_table(self, first: int | None, last: int | None) -> bytes:
        """Return the numbers of these steps as they are stored, as CSV; None: from the first, to the last."""
        return await self._curves.steps_table(first, last)

    async def histograms(self, query: CurveQuery) -> bytes:
        """Return the histograms of a row of a heat map, in the page's binary format."""
        return await self._curves.histograms(query)

    async def histogram_table(self, query: CurveQuery) -> bytes:
        """Return them as CSV."""
        return await self._curves.histogram_table(query)

    def alerts(self) -> list[dict[str, Any]]:
        """Return every alert of the run in its last state, as mappings ready for JSON."""
        return self._findings.alerts()

    def dumps(self) -> list[dict[str, Any]]:
        """Return every dump of the run, oldest first, as mappings ready for JSON."""
        return self._findings.dumps()

    async def diagnosis(self, identity: str, attempt: int, step: int) -> bytes | None:
        """Return the diagnosis (JSON) of the dump with this id, attempt and step; None if there is none.

        No other file can be named.
        """
        return await self._findings.diagnosis(identity, attempt, step)

    async def diagnosis_page(self, key: DumpKey) -> bytes | None:
        """Return the diagnosis of the dump `key` as a page with code, values and plots; None if there is none."""
        return await self._pages.page(key)

    async def graph(self, key: DumpKey) -> GraphAnswer:
        """Return the graph's page with the dump `key`, or what became of it; the first question has it built."""
        return await self._graphs.page(key)

    async def graph_detail(self, key: DumpKey, number: int) -> bytes | None:
        """Return the details of a node of that page, packed by gzip; None if there are none."""
        return await self._graphs.detail(key, number)

    async def graph_piece(self, key: DumpKey, number: int) -> bytes | None:
        """Return a piece of that page's data, packed by gzip; None if there is none."""
        return await self._graphs.piece(key, number)

    async def graph_notes(self, key: DumpKey) -> dict[str, Any] | None:
        """Return what was written at nodes of that graph, ready for JSON; None: no such dump. Raises DumpError."""
        return await self._graphs.notes(key)

    async def keep_graph_notes(self, key: DumpKey, content: bytes) -> dict[str, Any] | None:
        """Keep what was changed at nodes of that graph, and return what there is now; None: no such dump.

        Raises:
            DumpError: The file with the notes is damaged.
            ValueError: It is not of the form of a change.
            OSError: It cannot be written.
        """
        return await self._graphs.keep_notes(key, content)

    async def close(self) -> None:
        """Stop what was begun for a reader."""
        await self._graphs.close()

    def evidence(self) -> dict[str, Any]:
        """Return what is known of hung or dead local ranks, ready for JSON.

        Without a hang, what the control pages tell.
        """
        return self._hang.plain()

    def folds(self, after: int) -> dict[str, Any]:
        """Return {"attempt", "steps"}: by step after `after` and rank, its place and its gradients, folded."""
        return self._folds.rows(after)

    def checksums(self, after: int) -> dict[str, Any]:
        """Return {"attempt", "steps"}: by step after `after`, group and rank, a digest of the checksums of replicas."""
        return self._checksums.digests(after)

    def copies(self, step: int, group: str) -> dict[int, dict[str, str]]:
        """Return, by rank and name, the checksums (hexadecimal) of a group of copies on one step; empty if not kept."""
        found = self._checksums.copies(step, group)
        return {rank: {name: f"{checksum:x}" for name, checksum in held.items()} for rank, held in found.items()}

    async def report(self, name: str) -> bytes | None:
        """Return the post-mortem `name` of an alert of this node as Markdown; None if there is none.

        No other file can be named.
        """
        return await self._findings.post_mortem(name)

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """Return the text of `/metrics` and its content type, in the format that the `Accept` header asks for."""
        return self._metrics.render(accept)

    def order(self, body: Any) -> OrderAnswer:
        """Send a client's command to the ranks it names in `ranks`, or to all that live; return how it was taken."""
        return self._desk.order(body)

    def take_finding(self, body: Any) -> OrderAnswer:
        """Evaluate what another program has found about a local rank; return that it was taken."""
        return self._found.take(body)

    async def acknowledge(self, body: Any) -> OrderAnswer:
        """Record who knows of some alerts; return that it was taken."""
        return await self._handling.acknowledge(body)

    async def silence(self, body: Any) -> OrderAnswer:
        """Mute a rule for a while; return that it was taken."""
        return await self._handling.silence(body)

    async def flush(self) -> bool:
        """Store everything read so far in the run directory; return whether that succeeded."""
        return await self._flush()

    def stop(self) -> None:
        """Ask the agent to store everything, and to end soon."""
        self._stop()
