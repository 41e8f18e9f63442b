"""What the page, Prometheus and control calls get to see of an agent: answers made from its parts, nothing kept."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np

import trainermon
from trainermon.agent.assembly import AgentParts
from trainermon.agent.hang.report import FOLDER as REPORTS
from trainermon.agent.hang.report import RULES as REPORTED
from trainermon.agent.hang.report import report_name
from trainermon.agent.hang.watch import HangWatch
from trainermon.agent.orders.commands import ConflictError, parse_command, require_possible
from trainermon.agent.orders.dumps import MAX_REPORT_BYTES, DumpKey
from trainermon.agent.self_metrics import show_agent
from trainermon.core.errors import ConfigError
from trainermon.core.values import Coordinates, as_plain

READ_TIMEOUT_S = 10.0
AXES = ("dp", "tp", "pp", "cp", "ep")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankFile:
    """What a rank wrote about itself in `ranks/rank00000.json`."""

    parameters: int = 0
    bytes_per_step: int = 0


class RunNode:
    """The `Node` of `trainermon.agent.web.http`, for a running agent.

    Args:
        parts: Of the agent.
        executor: Reads files of the run directory.
        host: Name of this node.
        flush: Commits what was followed; returns whether it succeeded.
        stop: Ends the agent soon.
        hang: Watches for ranks that stand still or die.

    Attributes:
        state: `running`, `draining` or `finished`.
        rank_files: By rank, what it wrote about itself.
        num_faults: Faults of the loop that were survived.
    """

    def __init__(  # noqa: PLR0913 - what is asked of an agent
        self,
        parts: AgentParts,
        *,
        executor: Executor,
        host: str,
        flush: Callable[[], Awaitable[bool]],
        stop: Callable[[], None],
        hang: HangWatch,
    ) -> None:
        self.feed = parts.feed
        self.state = "running"
        self.rank_files: dict[int, RankFile] = {}
        self.num_faults = 0
        self._shown: set[str] = set()  # kinds that have had a value
        self._parts = parts
        self._executor = executor
        self._host = host
        self._flush = flush
        self._stop = stop
        self._hang = hang

    def run(self) -> dict[str, Any]:
        """Return the state of run and ranks."""
        parts = self._parts
        headers = parts.pipeline.follower.headers.values()
        files = self.rank_files.values()
        latest = parts.history.latest
        now_s = time.monotonic()
        return {
            "run_id": parts.settings.run_id,
            "attempt": max((header.attempt for header in headers), default=0),
            "host": self._host,
            "state": self.state,
            "step": latest.step if latest else None,
            "started_s": min((header.started_s for header in headers), default=None),
            "world_size": max((header.coordinates.world_size for header in headers), default=0),
            "output": parts.settings.output,
            "ranks": self._ranks(now_s),
            "loss": latest.loss if latest else math.nan,
            "grad_norm": latest.grad_norm if latest else math.nan,
            "step_time_s": latest.step_time_s if latest else math.nan,
            "tokens_per_second": latest.tokens_per_second if latest else math.nan,
            "alerts_firing": len(parts.alerts.firing),
            "bytes_per_step": max((file.bytes_per_step for file in files), default=0),
            "skipped_records": parts.pipeline.follower.lost_files,
            "lag_s": parts.reactions.lag_s,
            "version": trainermon.__version__,
            "model": self._model(),
            "heatmaps": self._heatmaps(),
            "rank_quantities": parts.history.rank_quantities(),
            "rules": len(parts.rules),
            "problem": parts.pipeline.status.store_error,
        }

    def lines(self, names: list[str]) -> dict[str, Any]:
        """Return values per step over all local ranks."""
        return self._parts.history.lines(names)

    def heatmap(self, kind: str, statistic: str, columns: int) -> bytes:
        """Return a heat map in the page's binary form."""
        return self._parts.history.heatmap(kind, statistic, columns)

    def ranks(self, quantity: str, columns: int) -> bytes:
        """Return ranks x steps in the page's binary form."""
        return self._parts.history.ranks(quantity, columns)

    def alerts(self) -> list[dict[str, Any]]:
        """Return every alert of the run in its last state."""
        return [self._parts.reactions.plain_alert(alert) for alert in self._parts.alerts.latest.values()]

    def dumps(self) -> list[dict[str, Any]]:
        """Return every dump of the run, oldest first."""
        entries = self._parts.dumps.entries.values()
        return [entry.as_plain() for entry in sorted(entries, key=lambda entry: (entry.key.attempt, entry.key.step))]

    async def diagnosis(self, identity: str, attempt: int, step: int) -> bytes | None:
        """Return the report of a dump that is known here; no other file can be named."""
        entry = self._parts.dumps.entries.get(DumpKey(identity, attempt, step))
        if entry is None or not entry.diagnosed:
            return None
        path = self._parts.settings.run_dir / entry.key.report
        try:
            return await asyncio.wait_for(self._read(path), READ_TIMEOUT_S)
        except (OSError, asyncio.TimeoutError):
            return None

    def evidence(self) -> dict[str, Any]:
        """Return what is known of the local ranks: of a standstill what was found, else their control pages."""
        return self._hang.plain()

    def checksums(self, after: int) -> dict[str, Any]:
        """Return digests of the checksums of replicas on the kept steps after `after`."""
        return self._parts.checksums.digests(after)

    def copies(self, step: int, group: str) -> dict[int, dict[str, str]]:
        """Return the single checksums of one group of copies on one step, by rank and name."""
        found = self._parts.checksums.copies(step, group)
        return {rank: {name: f"{checksum:x}" for name, checksum in held.items()} for rank, held in found.items()}

    async def report(self, name: str) -> bytes | None:
        """Return the post-mortem of an alert of this node as Markdown; no other file can be named."""
        alerts = self._parts.alerts.latest.values()
        host = self._parts.node_dir.name
        if not any(alert.rule in REPORTED and report_name(alert, host) == name for alert in alerts):
            return None
        path = self._parts.settings.run_dir / REPORTS / f"{name}.md"
        try:
            return await asyncio.wait_for(self._read(path), READ_TIMEOUT_S)
        except (OSError, asyncio.TimeoutError):
            return None

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """Return the exposition."""
        show_agent(self._parts, num_faults=self.num_faults)
        return self._parts.metrics.render(accept)

    def order(self, body: Any) -> dict[str, Any]:
        """Hand a client's command to the ranks it names in `ranks`, without that to all that live.

        An id that was accepted before is only acknowledged, whatever has become of the run since.
        """
        watch, book = self._parts.watch, self._parts.commands
        body = dict(body) if isinstance(body, dict) else body
        ranks = body.pop("ranks", None) if isinstance(body, dict) else None
        steps = watch.steps
        known = book.first_step(str(body.get("id"))) if isinstance(body, dict) else None
        soon = max(steps.values(), default=0) + self._parts.settings.escalation.margin_steps
        command = parse_command(body, next_step=soon if known is None else known)
        chosen: list[int] = []
        if known is None:
            if not steps:
                raise ConflictError("the run has ended" if watch.ranks else "no rank has begun yet: try again then")
            chosen = _checked_ranks(ranks, steps)
            require_possible(command, chosen, steps)
        if not book.submit(command, chosen, attempt=self._parts.reactions.attempt, steps=steps):
            return {"status": "duplicate"}
        return {"status": "accepted", "command": as_plain(command), "ranks": chosen}

    async def flush(self) -> bool:
        """Commit everything followed so far."""
        return await self._flush()

    def stop(self) -> None:
        """Flush and end, soon."""
        self._stop()

    def _read(self, path: Path) -> asyncio.Future[bytes]:
        return asyncio.get_running_loop().run_in_executor(self._executor, _read_report, path)

    def _heatmaps(self) -> list[dict[str, Any]]:
        """Return the heat maps with a value: a rank may know of series that its settings never let it collect."""
        history = self._parts.history
        offered = history.heatmaps()
        for entry in offered:
            kind = entry["kind"]
            if kind not in self._shown and _has_values(history.heatmap(kind, entry["statistics"][0], 1)):
                self._shown.add(kind)
        return [entry for entry in offered if entry["kind"] in self._shown]

    def _model(self) -> dict[str, Any] | None:
        """Return how many parameters the ranks of this node account for, and whether that is the whole model."""
        files = self.rank_files.values()
        headers = self._parts.pipeline.follower.headers.values()
        world_size = max((header.coordinates.world_size for header in headers), default=0)
        counted = sum(file.parameters for file in files)
        return {"parameters": counted, "is_whole": len(files) >= world_size} if counted else None

    def _ranks(self, now_s: float) -> list[dict[str, Any]]:
        states = sorted(self._parts.watch.ranks.values(), key=lambda state: state.rank)
        headers = self._parts.pipeline.follower.headers
        return [
            {
                "rank": state.rank,
                "place": _place(headers[state.rank].coordinates) if state.rank in headers else {},
                "alive": state.alive,
                "step": state.step,
                "phase": state.phase.name.lower(),
                "lag_s": round(now_s - state.changed_s, 3),
            }
            for state in states
        ]


def read_rank_file(run_dir: Path, rank: int) -> RankFile:
    """Return what `rank` wrote about itself; zeros where it cannot be read."""
    try:
        plain = json.loads((run_dir / "ranks" / f"rank{rank:05d}.json").read_text(encoding="utf-8"))
        return RankFile(**{field.name: int(plain.get(field.name, 0)) for field in dataclasses.fields(RankFile)})
    except (OSError, ValueError, TypeError, AttributeError):
        return RankFile()


def _place(coordinates: Coordinates) -> dict[str, int]:
    """Return where a rank stands on each axis that the job is split over."""
    return {axis: getattr(coordinates, axis) for axis in AXES if getattr(coordinates, f"{axis}_size") > 1}


def _has_values(heatmap: bytes) -> bool:
    start = 4 + int.from_bytes(heatmap[:4], "little")
    return not bool(np.isnan(np.frombuffer(heatmap, "<f4", offset=start)).all())


def _checked_ranks(ranks: Any, steps: dict[int, int]) -> list[int]:
    if ranks is None:
        return sorted(steps)
    if not isinstance(ranks, list) or not all(type(rank) is int and rank in steps for rank in ranks):
        raise ConfigError(f"ranks: found {str(ranks)[:100]}, expected some of the living ranks {sorted(steps)}")
    return sorted(set(ranks))


def _read_report(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(MAX_REPORT_BYTES)
