"""One run as its page asks for it, answered from its files: the same answers as of the agent that wrote them.

The functions that answer are those of the agent: `RunHistory` is filled from the segments of all nodes instead of the
journals, alerts and dumps are listed by `RunFindings`. What only a living agent knows (pulse of the ranks, lag of the
journals) is left open.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator
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
from trainermon.agent.runs.facts import RunFacts
from trainermon.agent.runs.model_order import ModelOrder
from trainermon.agent.turn.rank_files import read_rank_file
from trainermon.agent.web.curves import StoredCurves
from trainermon.agent.web.findings import RunFindings
from trainermon.agent.web.overview import has_values, place_of
from trainermon.alerts.handling import FILE as HANDLING_FILE
from trainermon.alerts.handling import AlertHandling
from trainermon.alerts.log import AlertLog
from trainermon.alerts.rules import load_rules
from trainermon.core.errors import StoreError
from trainermon.core.journal import Header
from trainermon.core.values import Alert, Kind, StatBlock
from trainermon.exporters.store.blocks import read_segment_blocks
from trainermon.exporters.store.curves import CurveQuery
from trainermon.exporters.store.segments import SegmentFile, cover, is_whole, read_metadata
from trainermon.exporters.views import RunHistory

WHOLE_ROWS = 16_000_000
"""So many of the newest rows are shown with all that they say; of earlier ones the lines and reduced gradients."""
SLIM = f"kind IN ('{Kind.LOSS}', '{Kind.STEP}') OR kind = '{Kind.GRAD_REDUCED}' AND in_global_norm"

Entry = tuple[Header, StatBlock]


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

    def new_segments(self) -> list[SegmentFile] | None:
        """Return the segments that were not read; None if one was merged with such as were, so all must be read."""
        found = [segment for segment in cover(self.place.segments) if segment.last > self.last]
        return None if any(segment.first <= self.last for segment in found) else found


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
        self._history = RunHistory(order=ModelOrder(run_dir))
        self._headers: dict[int, Header] = {}
        self._steps: dict[int, int] = {}
        self._damaged: set[str] = set()
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

        The first time all is read, about a microsecond a row; whoever asks meanwhile waits for it.
        """
        async with self._reading:
            if time.monotonic() - self._read_s < max_age_s:
                return
            loop = asyncio.get_running_loop()
            is_first = self._read_s == -math.inf
            history, entries, alerts = await loop.run_in_executor(
                self._executor, partial(self._read, is_first=is_first)
            )
            self._history = history
            self._add(entries)
            if self._facts().state == "finished":
                for rank in self._headers:
                    history.end(rank)
            self._publish(alerts, is_first=is_first)
            self._read_s = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Return the state of run and ranks as the agent does; the same keys."""
        facts = self._facts()
        latest = self._history.latest
        parameters, bytes_per_step = self._told_by_ranks()
        return {
            "run_id": facts.name,
            "attempt": max((header.attempt for header in self._headers.values()), default=facts.attempt),
            "host": ", ".join(self._nodes),
            "state": facts.state,
            "step": latest.step if latest else None,
            "started_s": facts.started_s,
            "world_size": self._world_size,
            "output": str(self._run_dir),
            "ranks": self._ranks(is_alive=facts.state == "running"),
            "loss": latest.loss if latest else math.nan,
            "grad_norm": latest.grad_norm if latest else math.nan,
            "step_time_s": latest.step_time_s if latest else math.nan,
            "tokens_per_second": latest.tokens_per_second if latest else math.nan,
            "alerts_firing": facts.alerts_firing,
            "bytes_per_step": bytes_per_step,
            "skipped_records": 0,
            "lag_s": None,
            "version": trainermon.__version__,
            "model": parameters,
            "heatmaps": self._heatmaps(),
            "rank_quantities": self._history.rank_quantities(),
            "rules": len(self._rules),
            "problem": None,
            "takes_orders": False,
            "stored": True,
            "diagnosis_pages": True,
            "left_out": self._left_out(facts),
        }

    def lines(self, names: list[str]) -> dict[str, Any]:
        """Return curves over all ranks of all nodes, as the agent does for its own."""
        return self._history.lines(names)

    def heatmap(self, kind: str, statistic: str, columns: int) -> bytes:
        """Return a heat map as framed float32."""
        return self._history.heatmap(kind, statistic, columns)

    def ranks(self, quantity: str, columns: int) -> bytes:
        """Return a quantity of every rank as framed float32."""
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

    async def keep_graph_notes(self, key: DumpKey, content: bytes) -> bool:
        """Keep what was written at nodes of that graph; return whether there is such a dump.

        Raises:
            ValueError: It is not of the form of notes.
            OSError: It cannot be written.
        """
        return await self._graphs.keep_notes(key, content)

    async def close(self) -> None:
        """End the streams of open pages, and what was begun for a reader."""
        self.feed.close()
        await self._graphs.close()

    def _read(self, *, is_first: bool) -> tuple[RunHistory, list[Entry], list[tuple[StoredNode, Alert]]]:
        """Return the history, the blocks to add to it, and new alerts; the first time, the history holds all blocks.

        Runs in the executor's thread, and touches the history only while nobody else has it.
        """
        for node_dir in sorted(self._run_dir.glob("nodes/*")):
            if node_dir.name not in self._nodes and node_dir.is_dir():
                place = AgentPlace(run_id=self._run_dir.name, spool=node_dir, run_dir=self._run_dir, node_dir=node_dir)
                self._nodes[node_dir.name] = StoredNode(place)
        self._dumps.scan(self._run_dir)
        nodes = list(self._nodes.values())
        alerts = [(node, alert) for node in nodes for alert in node.reload()]
        found = {node: node.new_segments() for node in nodes}
        if is_first or any(segments is None for segments in found.values()):
            history = RunHistory(order=ModelOrder(self._run_dir))
            for node in nodes:
                node.last = 0
            _fill(history, self._blocks({node: node.new_segments() or [] for node in nodes}))
            return history, [], alerts
        return self._history, list(self._blocks({node: segments or [] for node, segments in found.items()})), alerts

    def _blocks(self, segments: dict[StoredNode, list[SegmentFile]]) -> Iterator[Entry]:
        """Yield the blocks of the segments of all nodes together, by attempt, step and rank."""
        chosen = [list(self._chosen(node, found)) for node, found in segments.items()]
        return heapq.merge(*map(self._of_node, chosen), key=_order)

    def _chosen(self, node: StoredNode, segments: list[SegmentFile]) -> Iterator[tuple[Path, str]]:
        """Yield the segments with what is read of each, oldest first."""
        num_rows = 0
        chosen: list[tuple[Path, str]] = []
        for segment in reversed(segments):
            node.last = max(node.last, segment.last)
            chosen.append((segment.path, "true" if num_rows <= WHOLE_ROWS else SLIM))
            if is_whole(segment.path) and num_rows <= WHOLE_ROWS:
                try:
                    num_rows += read_metadata(segment.path).num_rows
                except StoreError:
                    continue  # said when it is read
        yield from reversed(chosen)

    def _of_node(self, chosen: list[tuple[Path, str]]) -> Iterator[Entry]:
        for path, where in chosen:
            yield from self._of_segment(path, where)

    def _of_segment(self, path: Path, where: str) -> Iterator[Entry]:
        try:
            for header, block in read_segment_blocks(path, read_metadata(path), where=where):
                self._note(header, block)
                yield header, block
        except (StoreError, OSError) as error:
            if path.exists():  # else it was merged, and is read with the next segments
                self._damaged.add(f"{path.name} of {path.parts[-3]} is damaged and left out ({_first_line(error)})")

    def _note(self, header: Header, block: StatBlock) -> None:
        rank = header.coordinates.rank
        self._headers[rank] = header
        self._steps[rank] = block.step

    def _add(self, entries: list[Entry]) -> None:
        for header, block in entries:
            self._history.add(header, header.series, block)

    def _publish(self, alerts: list[tuple[StoredNode, Alert]], *, is_first: bool) -> None:
        summaries = self._history.take_summaries()
        if is_first:
            return
        for summary in summaries:
            self.feed.publish("step", summary)
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
        met = [text for text in sorted(self._damaged) if text.partition(" ")[0] not in facts.problem]
        return "; ".join([*([facts.problem] if facts.problem else []), *met]) or None

    @property
    def _world_size(self) -> int:
        return max((header.coordinates.world_size for header in self._headers.values()), default=0)

    def _ranks(self, *, is_alive: bool) -> list[dict[str, Any]]:
        return [
            {
                "rank": rank,
                "place": place_of(self._headers[rank].coordinates),
                "alive": is_alive,
                "step": self._steps[rank],
                "phase": "step",
                "lag_s": 0.0,
            }
            for rank in sorted(self._headers)
        ]

    def _told_by_ranks(self) -> tuple[dict[str, Any] | None, int]:
        """Return the model's size, as the agent says it, and the most bytes that a rank writes per step."""
        files = [read_rank_file(self._run_dir, rank) for rank in sorted(self._headers)]
        counted = sum(file.parameters for file in files)
        is_whole = len(files) >= self._world_size
        bytes_per_step = max((file.bytes_per_step for file in files), default=0)
        return ({"parameters": counted, "is_whole": is_whole} if counted else None), bytes_per_step

    def _heatmaps(self) -> list[dict[str, Any]]:
        offered = self._history.heatmaps()
        for entry in offered:
            kind = entry["kind"]
            if kind not in self._shown and has_values(self._history.heatmap(kind, entry["statistics"][0], 1)):
                self._shown.add(kind)
        return [entry for entry in offered if entry["kind"] in self._shown]


def _fill(history: RunHistory, blocks: Iterator[Entry]) -> None:
    """Add blocks in order; all ranks of a step are announced before the first of them, so that it stays open."""
    for _, of_step in itertools.groupby(blocks, lambda entry: (entry[0].attempt, entry[1].step)):
        step = list(of_step)
        for header, _ in step:
            history.start(header)
        for header, block in step:
            history.add(header, header.series, block)


def _order(entry: Entry) -> tuple[int, int, int]:
    header, block = entry
    return header.attempt, block.step, header.coordinates.rank


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
