"""Which dumps the run has, as the ranks report them, and the diagnosis of each.

A diagnosis reads dumps and stored statistics for seconds and with libraries that the agent must not load, so it is a
process of its own: one at a time, at low priority, with a time limit. It starts once the ranks' reports of a step have
settled and what they wrote is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import re
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from trainermon.agent.lifecycle.child import output_of
from trainermon.core.events import DumpEvent, DumpStatus, ReplayEvent
from trainermon.core.private_files import replace_file

SETTLE_S = 2.0
TIME_LIMIT_S = 180.0
MAX_REPORT_BYTES = 32 << 20
_PATH = re.compile(r"dumps/([A-Za-z0-9][A-Za-z0-9._-]{0,127})/attempt(\d+)/step(\d+)/rank(\d+)/?")
_RANKING = tuple(DumpStatus)

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class DumpKey:
    """Identifies a dump over all ranks.

    Attributes:
        id: That of the alert or command that led to it.
        attempt: The start of the job.
        step: The step that was dumped.
    """

    id: str
    attempt: int
    step: int

    @property
    def folder(self) -> str:
        """Path of the dump, relative to the run directory."""
        return f"dumps/{self.id}/attempt{self.attempt}/step{self.step}"

    @property
    def report(self) -> str:
        """Path of the diagnosis, relative to the run directory."""
        return f"reports/{self.id}-attempt{self.attempt}-step{self.step}.json"

    @property
    def url(self) -> str:
        """URL path under which the agent serves the diagnosis."""
        return f"/api/diagnosis/{self.id}/{self.attempt}/{self.step}"


@dataclasses.dataclass(slots=True)
class DumpEntry:
    """One dump, over all ranks that have reported on it.

    Attributes:
        key: Which dump.
        ranks: By rank, what became of it.
        diagnosed: Whether there is a diagnosis.
    """

    key: DumpKey
    ranks: dict[int, DumpStatus] = dataclasses.field(default_factory=dict)
    diagnosed: bool = False

    def as_plain(self) -> dict[str, Any]:
        """Return the entry as a mapping ready for JSON, for the page.

        Its `status` is the most telling one of any rank.
        """
        status = min(self.ranks.values(), key=_RANKING.index, default=DumpStatus.WRITTEN)
        return {
            "id": self.key.id,
            "attempt": self.key.attempt,
            "step": self.key.step,
            "ranks": sorted(self.ranks),
            "path": self.key.folder,
            "status": status.value,
            "diagnosis": self.key.url if self.diagnosed else None,
        }


class RunDumps:
    """Lists the dumps of the run by key: those on disk when the agent started, and those reported since."""

    def __init__(self) -> None:
        self.entries: dict[DumpKey, DumpEntry] = {}

    def record(self, event: DumpEvent | ReplayEvent) -> DumpEntry | None:
        """Note a dump that a rank reports (a `replay` or `dump` event); return its entry, or None if it wrote none."""
        match = _PATH.fullmatch(event.dump or "")
        if match is None:
            return None
        known = self.entries.get(_key(match))
        is_new = known is None or int(match[4]) not in known.ranks
        entry = self._add(match, event.status)
        entry.diagnosed = entry.diagnosed and not is_new  # one more rank may change the verdict
        return entry

    def scan(self, run_dir: Path) -> None:
        """Add the dumps that are in the run directory; blocks as long as the file system does."""
        for folder in sorted(run_dir.glob("dumps/*/attempt*/step*/rank*")):
            match = _PATH.fullmatch(folder.relative_to(run_dir).as_posix())
            if match is not None:
                entry = self._add(match, DumpStatus.WRITTEN)
                entry.diagnosed = (run_dir / entry.key.report).is_file()

    def find(self, *, identity: str, attempt: int, step: int) -> DumpEntry | None:
        """Return the dump made for the alert `identity`, else one of the very step, else None."""
        of_attempt = [entry for entry in self.entries.values() if entry.key.attempt == attempt]
        for entry in of_attempt:
            if entry.key.id == identity:
                return entry
        return next((entry for entry in of_attempt if entry.key.step == step), None)

    def _add(self, match: re.Match[str], status: DumpStatus) -> DumpEntry:
        key = _key(match)
        entry = self.entries.setdefault(key, DumpEntry(key))
        rank = int(match[4])
        is_known = status is not DumpStatus.UNKNOWN
        if rank not in entry.ranks or is_known:
            entry.ranks[rank] = status if is_known else DumpStatus.WRITTEN
        return entry


class DumpDiagnoser:
    """Runs `trainermon diagnose` on new dumps in the background, one at a time, and writes the reports.

    Args:
        run_dir: The run directory.
        executor: Writes the report.
        commit: Stores everything read so far; the diagnosis reads the store.
        finished: Called with the entry when its report is there.
        command: Program and arguments; the step and `--json` are appended.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        executor: Executor,
        commit: Callable[[], Awaitable[object]],
        finished: Callable[[DumpEntry], None],
        command: tuple[str, ...] = (sys.executable, "-m", "trainermon", "diagnose"),
    ) -> None:
        self._run_dir = run_dir
        self._executor = executor
        self._commit = commit
        self._finished = finished
        self._command = command
        self._due: dict[DumpKey, tuple[float, DumpEntry]] = {}
        self._task: asyncio.Task[None] | None = None
        self.failures = 0

    @property
    def idle(self) -> bool:
        """Whether no diagnosis is running or waiting."""
        return not self._due and (self._task is None or self._task.done())

    def schedule(self, entry: DumpEntry, *, settle_s: float = SETTLE_S) -> None:
        """Schedule the diagnosis of `entry` for when no rank has reported on it for `settle_s` seconds."""
        self._due[entry.key] = (time.monotonic() + settle_s, entry)

    def poll(self) -> None:
        """Start the next diagnosis that is due, if none is running; call it regularly from the loop."""
        if not self._due or (self._task is not None and not self._task.done()):
            return
        key, (due, entry) = min(self._due.items(), key=lambda item: item[1][0])
        if due <= time.monotonic():
            del self._due[key]
            self._task = asyncio.get_running_loop().create_task(self._diagnose(entry))

    async def close(self) -> None:
        """Stop the running diagnosis."""
        self._due.clear()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _diagnose(self, entry: DumpEntry) -> None:
        try:
            await self._commit()
            report = await self._run(entry.key)
            path = self._run_dir / entry.key.report
            await asyncio.get_running_loop().run_in_executor(self._executor, _write_report, path, report)
        except asyncio.TimeoutError:
            self._fail(entry, f"not ready after {TIME_LIMIT_S:g} s")
            return
        except OSError as error:
            self._fail(entry, str(error))
            return
        entry.diagnosed = True
        self._finished(entry)

    def _fail(self, entry: DumpEntry, reason: str) -> None:
        self.failures += 1
        _log.warning("no diagnosis of %s: %s", entry.key.folder, reason)

    async def _run(self, key: DumpKey) -> bytes:
        command = (*self._command, str(self._run_dir), "--step", str(key.step), "--json")
        report = await output_of(command, limit_s=TIME_LIMIT_S)
        if len(report) > MAX_REPORT_BYTES:
            raise OSError(f"the report has {len(report)} bytes, expected at most {MAX_REPORT_BYTES}")
        return report


def _key(match: re.Match[str]) -> DumpKey:
    return DumpKey(match[1], int(match[2]), int(match[3]))


def _write_report(path: Path, report: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(path, report)
