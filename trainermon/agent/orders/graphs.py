"""The graphs of the run's dumps: pages that a process of its own writes when somebody asks for one.

Building one reads dumps for seconds and with libraries that the agent must not load. So it is done as diagnoses are:
one at a time, at low priority, with a time limit. A page is built again when a rank has written one more dump.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from concurrent.futures import Executor
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from trainermon.agent.lifecycle.child import output_of
from trainermon.agent.orders.dumps import DumpKey, RunDumps
from trainermon.dashboards.graph_details import DETAILS_SUFFIX, PIECES_SUFFIX, read_part
from trainermon.dashboards.graph_notes import keep_change, parse_change, read_notes

TIME_LIMIT_S = 600.0
READ_LIMIT_S = 10.0
MAX_PAGE_BYTES = 64 << 20
MAX_TOGETHER = 64
"""So many dumps of single ranks are steps and ranks of one graph; of more, each dump has its own."""

_ALL = "dumps"
Found = TypeVar("Found")
_log = logging.getLogger(__name__)


class GraphState(Enum):
    """What there is to show of a graph."""

    READY = "ready"
    BUILDING = "building"
    FAILED = "failed"
    UNKNOWN = "unknown"


class GraphAnswer(NamedTuple):
    """What is answered to who asks for the graph of a dump.

    Attributes:
        state: What there is to show.
        page: The page, if it is ready.
        reason: Why it could not be built.
    """

    state: GraphState
    page: bytes = b""
    reason: str = ""


class _GraphSource(NamedTuple):
    """Which dumps a graph is of: their folder, and the page's file, both below the run directory; and the dumps."""

    folder: str
    page: str
    dumps: tuple[tuple[DumpKey, tuple[int, ...]], ...]


class DumpGraphs:
    """Has the graphs of dumps built by `trainermon graph`, and reads them.

    Args:
        run_dir: The run directory.
        dumps: The dumps of the run.
        executor: Reads the files.
        command: Program and arguments; the folder of the dumps and where to write are appended.
    """

    def __init__(
        self,
        run_dir: Path,
        dumps: RunDumps,
        *,
        executor: Executor,
        command: tuple[str, ...] = (sys.executable, "-m", "trainermon", "graph"),
    ) -> None:
        self._run_dir = run_dir
        self._dumps = dumps
        self._executor = executor
        self._command = command
        self._built: dict[str, _GraphSource] = {}
        self._spoiled: set[_GraphSource] = set()
        self._failed: dict[_GraphSource, str] = {}
        self._waiting: list[_GraphSource] = []
        self._task: asyncio.Task[None] | None = None

    async def page(self, key: DumpKey) -> GraphAnswer:
        """Return the page with the dump `key`, or that it is being built; a first question begins with that."""
        source = self._source(key)
        if source is None:
            return GraphAnswer(GraphState.UNKNOWN)
        if self._built.get(source.page) == source:
            page = await self._read(lambda: _limited(self._run_dir / source.page))
            if page is not None:
                return GraphAnswer(GraphState.READY, page=page)
        if source in self._failed:  # the next question tries again
            return GraphAnswer(GraphState.FAILED, reason=self._failed.pop(source))
        if source not in self._waiting:
            self._waiting.append(source)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._build())
        return GraphAnswer(GraphState.BUILDING)

    async def detail(self, key: DumpKey, number: int) -> bytes | None:
        """Return the details of a node of the page with the dump `key`, packed by gzip; None if there are none."""
        return await self._part(key, DETAILS_SUFFIX, number)

    async def piece(self, key: DumpKey, number: int) -> bytes | None:
        """Return a piece of the data of the page with the dump `key`, packed by gzip; None if there is none."""
        return await self._part(key, PIECES_SUFFIX, number)

    async def notes(self, key: DumpKey) -> dict[str, Any] | None:
        """Return what was written at nodes of the graph with the dump `key`, ready for JSON; None: no such dump.

        Raises:
            DumpError: The file with it is damaged.
        """
        source = self._source(key)
        if source is None:
            return None
        found = await self._read(lambda: read_notes(self._run_dir / source.folder))
        return None if found is None else found.as_json()

    async def keep_notes(self, key: DumpKey, content: bytes) -> dict[str, Any] | None:
        """Keep a change of notes as JSON beside the dumps; return what there is now. None: there is no such dump.

        Raises:
            DumpError: The file with the notes is damaged.
            ValueError: It is not of that form.
            OSError: It cannot be written.
        """
        source, change = self._source(key), parse_change(content)
        if source is None:
            return None
        path = self._run_dir / source.folder
        notes = await asyncio.get_running_loop().run_in_executor(self._executor, keep_change, path, change)
        return notes.as_json()

    async def _part(self, key: DumpKey, suffix: str, number: int) -> bytes | None:
        source = self._source(key)
        if source is None or source.page not in self._built:
            return None
        path = (self._run_dir / source.page).with_suffix(suffix)
        return await self._read(lambda: read_part(path, number))

    async def close(self) -> None:
        """Stop the process that is building a graph."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _source(self, key: DumpKey) -> _GraphSource | None:
        """Return which dumps are shown with `key`: all of the run, where it is of the last attempt and they are few."""
        entries = self._dumps.entries
        if key not in entries:
            return None
        last = max(known.attempt for known in entries)
        of_last = tuple((one, tuple(sorted(entries[one].ranks))) for one in sorted(entries) if one.attempt == last)
        is_one_per_step = len({one.step for one, _ in of_last}) == len(of_last)
        together = _GraphSource(_ALL, "reports/graph.html", of_last)
        is_small = sum(len(ranks) for _, ranks in of_last) <= MAX_TOGETHER
        if key.attempt == last and is_one_per_step and is_small and together not in self._spoiled:
            return together
        own = key.report.removesuffix(".json")
        return _GraphSource(key.folder, f"{own}-graph.html", ((key, tuple(sorted(entries[key].ranks))),))

    async def _build(self) -> None:
        while self._waiting:
            source = self._waiting[0]
            target = self._run_dir / source.page
            folder = str(self._run_dir / source.folder)  # one process: the node's processors are the training's
            command = (*self._command, folder, "-o", str(target), "--details", "beside", "--jobs", "1")
            try:
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                await output_of(command, limit_s=TIME_LIMIT_S)
                self._built[source.page] = source
            except asyncio.TimeoutError:
                self._fail(source, f"it was not ready after {TIME_LIMIT_S:g} s")
            except OSError as error:
                self._fail(source, str(error))
            finally:
                if self._waiting:
                    self._waiting.pop(0)

    def _fail(self, source: _GraphSource, reason: str) -> None:
        if source.folder == _ALL:  # one damaged dump must not hide the others
            self._spoiled.add(source)
        else:
            self._failed[source] = reason
        _log.warning("no graph of %s: %s", source.folder, reason)

    async def _read(self, read: Callable[[], Found]) -> Found | None:
        job = asyncio.get_running_loop().run_in_executor(self._executor, read)
        try:
            return await asyncio.wait_for(job, READ_LIMIT_S)
        except (OSError, asyncio.TimeoutError) as error:
            _log.warning("a graph cannot be read: %s", error)
            return None


def _limited(path: Path) -> bytes:
    with path.open("rb") as stream:
        page = stream.read(MAX_PAGE_BYTES + 1)
    if len(page) > MAX_PAGE_BYTES:
        raise OSError(f"{path} has more than {MAX_PAGE_BYTES} bytes")
    return page
