"""Diagnoses as pages with code, values and plots: `trainermon diagnose --html` writes one when it is asked for."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import Executor
from pathlib import Path

from trainermon.agent.lifecycle.child import output_of
from trainermon.agent.orders.dumps import DumpKey, RunDumps

TIME_LIMIT_S = 50.0
MAX_PAGE_BYTES = 32 << 20


class DiagnosisPages:
    """Has the pages of diagnoses written, one at a time and each once, and reads them.

    Args:
        run_dir: The run directory.
        dumps: The dumps of the run.
        executor: Reads the files.
        command: Program and arguments; the run, the step and where to write are appended.
    """

    def __init__(
        self,
        run_dir: Path,
        dumps: RunDumps,
        *,
        executor: Executor,
        command: tuple[str, ...] = (sys.executable, "-m", "trainermon", "diagnose"),
    ) -> None:
        self._run_dir = run_dir
        self._dumps = dumps
        self._executor = executor
        self._command = command
        self._turn = asyncio.Lock()

    async def page(self, key: DumpKey) -> bytes | None:
        """Return the page about the dump `key`; None if it has no diagnosis. It takes a few seconds the first time.

        Raises:
            OSError: It cannot be written or read, or not in time.
        """
        entry = self._dumps.entries.get(key)
        if entry is None or not entry.diagnosed:
            return None
        report = self._run_dir / key.report
        page = report.with_suffix(".html")
        loop = asyncio.get_running_loop()
        async with self._turn:
            if not await loop.run_in_executor(self._executor, _is_newer, page, report):
                command = (*self._command, str(self._run_dir), "--step", str(key.step), "--html", str(page))
                try:
                    await output_of(command, limit_s=TIME_LIMIT_S)
                except asyncio.TimeoutError:
                    raise OSError(f"the page was not ready after {TIME_LIMIT_S:g} s") from None
            return await loop.run_in_executor(self._executor, _read, page)


def _is_newer(page: Path, report: Path) -> bool:
    """Whether the page was written after the report; one more rank may have changed that since."""
    try:
        return page.stat().st_mtime_ns >= report.stat().st_mtime_ns
    except FileNotFoundError:
        return False


def _read(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(MAX_PAGE_BYTES)
