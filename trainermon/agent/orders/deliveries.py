"""Has dumps taken from the ranks' outbox to the run directory, by a process that a file system may keep waiting."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from pathlib import Path

from trainermon.agent.lifecycle.child import output_of
from trainermon.core.outbox import num_deliverable

MODULE = "trainermon.core.outbox"
LIMIT_S = 600.0
RETRY_S = 5.0
PAUSE_S = 0.1
EMPTY_LIMIT_S = 600.0

_log = logging.getLogger(__name__)


class DumpDeliveries:
    """Moves finished dumps from the node (the outbox in the spool) to the run directory, in the background.

    One process at a time; failures are repeated, and logged once.

    Args:
        spool: The spool; ranks write into its outbox.
        run_dir: The run directory.
    """

    def __init__(self, spool: Path, run_dir: Path) -> None:
        self._command = (sys.executable, "-m", MODULE, str(spool), str(run_dir))
        self._spool = spool
        self._task: asyncio.Task[None] | None = None
        self._next_s = 0.0
        self.problem = ""

    @property
    def idle(self) -> bool:
        """Whether no dump is being delivered or waits to be. Cost: listing one folder."""
        return (self._task is None or self._task.done()) and not num_deliverable(self._spool)

    def poll(self) -> None:
        """Start a delivery if any dump waits and none is running; call it regularly from the loop."""
        is_busy = self._task is not None and not self._task.done()
        if not is_busy and time.monotonic() >= self._next_s and num_deliverable(self._spool):
            self._task = asyncio.get_running_loop().create_task(self._deliver())

    async def done(self) -> None:
        """Wait until every dump is delivered, for ten minutes at most."""
        deadline = time.monotonic() + EMPTY_LIMIT_S
        while not self.idle and time.monotonic() < deadline:
            self.poll()
            await asyncio.sleep(PAUSE_S)

    async def close(self) -> None:
        """Stop the running delivery; the next agent goes on with it."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _deliver(self) -> None:
        try:
            await output_of(self._command, limit_s=LIMIT_S)
        except asyncio.TimeoutError:
            self._fail(f"not done within {LIMIT_S:g} s")
        except OSError as error:
            self._fail(str(error))
        else:
            self.problem = ""

    def _fail(self, problem: str) -> None:
        self._next_s = time.monotonic() + RETRY_S
        if not self.problem:
            _log.warning("dumps could not be taken to the run directory, which is tried again: %s", problem)
        self.problem = problem
