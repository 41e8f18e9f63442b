"""One run as its page asks for it, answered from its files: the same answers as of the agent that wrote them.

The functions that answer are those of the agent: `RunHistory` is filled from the segments of all nodes instead of the
journals, alerts and dumps are listed by `RunFindings`. What only a living agent knows (pulse of the ranks, lag of the
journals) is left open.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

import trainermon
from trainermon.agent.alert_page import PlainAlerts
from trainermon.agent.assembly import ALERTS_FILE
from trainermon.agent.feed import EventFeed
from trainermon.agent.orders.diagnosis_pages import DiagnosisPages
from trainermon.agent.orders.dumps import DumpKey, RunDumps
from trainermon.agent.orders.graphs import DumpGraphs, GraphAnswer
from trainermon.agent.place import AgentPlace
from trainermon.agent.runs.facts import ENDED, RunFacts
from trainermon.agent.runs.stored_history import StoredHistory, first_line
from trainermon.agent.turn.rank_files import RankFile, read_rank_file
from trainermon.agent.web.curves import StoredCurves
from trainermon.agent.web.findings import RunFindings
from trainermon.agent.web.overview import has_values, num_without_loss, place_of
from trainermon.alerts.handling import FILE as HANDLING_FILE
from trainermon.alerts.handling import AlertHandling
from trainermon.alerts.log import AlertLog
from trainermon.alerts.rules import load_rules
from trainermon.core.errors import StoreError
from trainermon.core.values import Alert, measured_as_plain
from trainermon.exporters.store.curves import CurveQuery
from trainermon.exporters.store.segments import cover
from trainermon.exporters.stored_steps import StoredStep

MAX_RANK_FILES = 512
"""Of so many ranks their own files are read at one look; those of others at the next."""
_PREVIEW = "the newest steps only, until the others are read"


class StoredAlerts:
    """The alerts of one node as its log has them: by id, in their last state."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._seen: tuple[int, int] | None = None
        self.latest: dict[str, Alert] = {}

    def reload(self) -> list[Alert]:
        """Read the log if it has changed; return the alerts that are new or in a new state."""
        try:
            status = self._log.stat()
        except OSError:
            return []
        if self._seen == (status.st_mtime_ns, status.st_size):
            return []
        self._seen = (status.st_mtime_ns, status.st_size)
        before, self.latest = self.latest, {alert.id: alert for alert in AlertLog(self._log).read()}
        return [alert for alert in self.latest.values() if before.get(alert.id) != alert]


class StoredNode:
    """The files of one node of a run, and how far they were read."""

    def __init__(self, place: AgentPlace) -> None:
        self.place = place
        self.alerts = StoredAlerts(place.node_dir / ALERTS_FILE)
        self.handling = AlertHandling(place.node_dir / HANDLING_FILE)
        self.last = 0

    def reload(self) -> list[Alert]:
        """Read again what the agent and people say; return the alerts that are new or in a new state."""
        self.handling = AlertHandling(self.place.node_dir / HANDLING_FILE)
        return self.alerts.reload()

    def new_segments(self) -> list[Path] | None:
        """Return the segments that were not asked for; None if one was merged with such as were: all must be read."""
        found = [segment for segment in cover(self.place.segments) if segment.last > self.last]
        if any(segment.first <= self.last for segment in found):
            return None
        self.last = found[-1].last if found else self.last
        return [segment.path for segment in found]


class StoredRun:
    """What the page of a run asks for (`PageInterface`), from its directory. Belongs to the event loop's thread.

    Args:
        run_dir: The run directory.
        executor: Reads files.
        facts: Tells what the list knows of the run, its state among it.
    """

    def __init__(self, run_dir: Path, *, executor: Executor, facts: Callable[[], RunFacts]) -> None:
        self.feed = EventFeed()
        self._run_dir = run_dir
        self._executor = executor
        self._facts = facts
        self._nodes: dict[str, StoredNode] = {}
        self._read = StoredHistory(run_dir)
        self._rank_files: dict[int, RankFile] = {}
        self._rank_files_of = 0
        self._reading_rest: asyncio.Task[None] | None = None
        self._dumps = RunDumps()
        self._pages = DiagnosisPages(run_dir, self._dumps, executor=executor)
        self._graphs = DumpGraphs(run_dir, self._dumps, executor=executor)
        self._curves = StoredCurves(run_dir)
        self._rules = load_rules()
        self._shown: set[str] = set()
        self._reading = asyncio.Lock()
        self._read_s = -math.inf

    async def refresh(self, *, max_age_s: float) -> None:
        """Read what the run's files have got since the last time, unless that was less than `max_age_s` ago.

        The first time all is read, about 0.4 µs a row; whoever asks meanwhile waits for it. Of a run with very many
        rows that is the newest segments only, and the rest follows while these are shown.
        """
        async with self._reading:
            if self._reading_rest is not None or time.monotonic() - self._read_s < max_age_s:
                return
            is_first = self._read_s == -math.inf
            read, steps, alerts = await self._in_thread(self._read_new, is_first=is_first)
            self._show(read, steps)
            self._publish(alerts, is_first=is_first)
            self._read_s = time.monotonic()
            if is_first and read.is_preview:
                self._reading_rest = asyncio.create_task(self._read_rest())

    async def complete(self) -> None:
        """Return when all has been read that `refresh` has left for later."""
        if self._reading_rest is not None:
            await self._reading_rest

    async def _read_rest(self) -> None:
        try:
            self._show(await self._in_thread(self._read_all, may_preview=False), [])
            self.feed.publish("reload", {})
        except StoreError as error:
            self._read.damaged.add(first_line(error))
        finally:
            self._reading_rest = None

    def _show(self, read: StoredHistory, steps: list[StoredStep]) -> None:
        self._read = read
        for step in steps:
            read.add(step)
        if self._facts().state in ENDED:
            read.history.end_all()

    async def _in_thread(self, task: Callable[..., Any], **arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(task, **arguments))

    def run(self) -> dict[str, Any]:
        """Return the state of run and ranks as the agent does; the same keys."""
        facts = self._facts()
        latest = self._read.history.latest
        parameters, bytes_per_step = self._told_by_ranks()
        return {
            "run_id": facts.name,
            "attempt": self._read.attempt or facts.attempt,
            "host": ", ".join(self._nodes),
            "state": facts.state,
            "step": latest.step if latest else None,
            "started_s": facts.started_s,
            "world_size": self._read.world_size,
            "output": str(self._run_dir),
            "ranks": self._ranks(is_alive=facts.state == "running"),
            "loss": measured_as_plain(latest.loss) if latest else None,
            "grad_norm": measured_as_plain(latest.grad_norm) if latest else None,
            "step_time_s": measured_as_plain(latest.step_time_s) if latest else None,
            "tokens_per_second": measured_as_plain(latest.tokens_per_second) if latest else None,
            "alerts_firing": facts.alerts_firing,
            "bytes_per_step": bytes_per_step,
            "skipped_records": 0,
            "lag_s": None,
            "version": trainermon.__version__,
            "model": parameters,
            "heatmaps": self._heatmaps(),
            "rank_quantities": self._read.history.rank_quantities(),
            "rules": len(self._rules),
            "rules_without_loss": num_without_loss(self._rules, self._read.history),
            "problem": None,
            "takes_orders": False,
            "stored": True,
            "diagnosis_pages": True,
            "left_out": self._left_out(facts),
        }

    def lines(self, names: list[str]) -> dict[str, Any]:
        """Return curves over all ranks of all nodes, as the agent does for its own."""
        return self._read.history.lines(names)

    def heatmap(self, kind: str, statistic: str, columns: int) -> bytes:
        """Return a heat map as framed float32."""
        return self._read.history.heatmap(kind, statistic, columns)

    def ranks(self, quantity: str, columns: int) -> bytes:
        """Return a quantity of every rank as framed float32."""
        return self._read.history.ranks(quantity, columns)

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
        """Return every alert of every node in its last state."""
        return [alert for node in self._nodes.values() for alert in self._findings(node).alerts()]

    def dumps(self) -> list[dict[str, Any]]:
        """Return every dump of the run, oldest first."""
        entries = self._dumps.entries.values()
        return [entry.as_plain() for entry in sorted(entries, key=lambda entry: (entry.key.attempt, entry.key.step))]

    async def diagnosis(self, identity: str, attempt: int, step: int) -> bytes | None:
        """Return the diagnosis of a dump; None if there is none. No other file can be named."""
        key = DumpKey(identity, attempt, step)
        nodes = list(self._nodes.values())
        if not nodes or not self._lies_within(key.report):
            return None
        return await self._findings(nodes[0]).diagnosis(identity, attempt, step)

    async def report(self, name: str) -> bytes | None:
        """Return the post-mortem of an alert; None if there is none. No other file can be named."""
        found = [await self._findings(node).post_mortem(name) for node in self._nodes.values()]
        return next((text for text in found if text is not None), None)

    async def graph(self, key: DumpKey) -> GraphAnswer:
        """Return the graph's page with a dump, or what became of it; the first question has it built."""
        return await self._graphs.page(key)

    async def diagnosis_page(self, key: DumpKey) -> bytes | None:
        """Return the diagnosis of the dump `key` as a page with code, values and plots; None if there is none."""
        return await self._pages.page(key) if self._lies_within(key.report) else None

    async def graph_detail(self, key: DumpKey, number: int) -> bytes | None:
        """Return the details of a node of that page."""
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
        """End the streams of open pages, and what was begun for a reader."""
        if self._reading_rest is not None:
            self._reading_rest.cancel()
        self.feed.close()
        await self._graphs.close()

    def _read_new(self, *, is_first: bool) -> tuple[StoredHistory, list[StoredStep], list[tuple[StoredNode, Alert]]]:
        """Return what was read, the steps to add to it, and new alerts; the first time, it has all steps.

        Runs in the executor's thread, and changes what was read only while nobody else has it.
        """
        for node_dir in sorted(self._run_dir.glob("nodes/*")):
            if node_dir.name not in self._nodes and node_dir.is_dir():
                place = AgentPlace(run_id=self._run_dir.name, spool=node_dir, run_dir=self._run_dir, node_dir=node_dir)
                self._nodes[node_dir.name] = StoredNode(place)
        self._dumps.scan(self._run_dir)
        nodes = list(self._nodes.values())
        alerts = [(node, alert) for node in nodes for alert in node.reload()]
        new = [] if is_first else [node.new_segments() for node in nodes]
        if is_first or None in new:
            read, steps = self._read_all(may_preview=is_first), []
        else:
            read, steps = self._read, self._read.read_more([paths or [] for paths in new])
        self._read_rank_files(read)
        return read, steps, alerts

    def _read_all(self, *, may_preview: bool) -> StoredHistory:
        read = StoredHistory(self._run_dir)
        for node in self._nodes.values():
            node.last = 0
        read.fill([node.new_segments() or [] for node in self._nodes.values()], may_preview=may_preview)
        return read

    def _publish(self, alerts: list[tuple[StoredNode, Alert]], *, is_first: bool) -> None:
        summaries = self._read.history.take_summaries()
        if is_first:
            return
        for summary in summaries:
            self.feed.publish("step", summary.as_plain())
        for node, alert in alerts:
            self.feed.publish("alert", self._plain(node).plain(alert))
        self.feed.publish("state", {"state": self._facts().state})

    def _findings(self, node: StoredNode) -> RunFindings:
        return RunFindings(
            node.place, alerts=node.alerts, dumps=self._dumps, plain=self._plain(node), executor=self._executor
        )

    def _plain(self, node: StoredNode) -> PlainAlerts:
        return PlainAlerts(self._rules, self._dumps, node=node.place.node, handling=node.handling)

    def _lies_within(self, name: str) -> bool:
        """Whether the file below the run directory is there and no link that leads out of it."""
        return (self._run_dir / name).resolve().is_relative_to(self._run_dir.resolve())

    def _left_out(self, facts: RunFacts) -> str | None:
        """Return what cannot be read, each file once: the list knows of some, reading has met others."""
        met = [text for text in sorted(self._read.damaged) if text.partition(" ")[0] not in facts.problem]
        preview = [_PREVIEW] if self._read.is_preview else []
        return "; ".join([*preview, *([facts.problem] if facts.problem else []), *met]) or None

    def _ranks(self, *, is_alive: bool) -> list[dict[str, Any]]:
        return [
            {
                "rank": rank,
                "place": place_of(self._read.coordinates[rank]),
                "alive": is_alive,
                "step": self._read.steps[rank],
                "phase": "step",
                "lag_s": 0.0,
            }
            for rank in sorted(self._read.steps)
        ]

    def _told_by_ranks(self) -> tuple[dict[str, Any] | None, int]:
        """Return the model's size, as the agent says it, and the most bytes that a rank writes per step."""
        counted = sum(file.parameters for file in self._rank_files.values())
        is_whole = len(self._rank_files) >= self._read.world_size
        bytes_per_step = max((file.bytes_per_step for file in self._rank_files.values()), default=0)
        return ({"parameters": counted, "is_whole": is_whole} if counted else None), bytes_per_step

    def _read_rank_files(self, read: StoredHistory) -> None:
        """Read what ranks wrote about themselves in this attempt, of not too many ranks at once."""
        if read.attempt != self._rank_files_of:
            self._rank_files, self._rank_files_of = {}, read.attempt
        unknown = [rank for rank in sorted(read.steps) if rank not in self._rank_files]
        told = {rank: read_rank_file(self._run_dir, rank) for rank in unknown[:MAX_RANK_FILES]}
        self._rank_files = {**self._rank_files, **told}

    def _heatmaps(self) -> list[dict[str, Any]]:
        offered = self._read.history.heatmaps()
        for entry in offered:
            kind = entry["kind"]
            if kind not in self._shown and has_values(self._read.history.heatmap(kind, entry["statistics"][0], 1)):
                self._shown.add(kind)
        return [entry for entry in offered if entry["kind"] in self._shown]
