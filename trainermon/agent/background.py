"""Work beside the agent's loop, of which at most one piece is under way."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any

_log = logging.getLogger(__name__)


class BackgroundTask:
    """Runs one coroutine at a time beside the event loop's work; an error in it is logged and ends that coroutine only.

    Args:
        fault: What the log says if one fails: "... could not be looked into".
    """

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self._task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the coroutine that was started last is still running."""
        return self._task is not None and not self._task.done()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start the coroutine `work` as a task; no other may be running."""
        self._task = asyncio.get_running_loop().create_task(self._contained(work))

    async def close(self) -> None:
        """Cancel the coroutine that is running, if one is."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _contained(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:  # noqa: BLE001 - the border: the agent goes on without it
            _log.exception("%s", self._fault)
