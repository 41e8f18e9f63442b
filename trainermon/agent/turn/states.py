"""The agent's states, and for how long it has had no rank.

    running ── every rank gone ──▶ draining ── all stored ──▶ finished ── linger over ──▶ end
       ▲                              │                          │
       └────── a rank is there ◀──────┴──────────────────────────┘

Time is this process's monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from trainermon.agent.lifecycle.lock import DRAINING, FINISHED, RUNNING
from trainermon.agent.lifecycle.release import give_up_s, linger_s

GAP_S = 5.0


class AgentStates:
    """Tracks the agent's state, and since when it has had no rank; a rank may come back at any time.

    Args:
        spool: Where `trainermon run` says for how long to wait.
        linger_s: For how long to wait for a restarted job where it does not.
        drain: Begins to store what is left; the future is done when it is.

    Attributes:
        state: `running`, `draining` or `finished`.
    """

    def __init__(self, spool: Path, *, linger_s: float, drain: Callable[[], Future[None]]) -> None:
        self.state = RUNNING
        self._spool = spool
        self._linger_s = linger_s
        self._drain = drain
        self._draining: Future[None] | None = None
        self._gone_s = self._last_turn_s = time.monotonic()

    def advance(self, now_s: float, num_records: int, *, has_ranks: bool, is_written: bool) -> None:
        """Choose the next state after a turn that read `num_records`; `is_written`: all alerts are in the log."""
        if has_ranks:
            self._gone_s = now_s
            self._draining = None
            self.state = RUNNING
        elif num_records:
            self.go_back()  # what the last of them have left is still being read
        elif self._draining is None:
            self.state = DRAINING
            self._draining = self._drain()
        elif self._draining.done() and is_written:
            self.state = FINISHED

    def go_back(self) -> None:
        """Set the state back to `draining`, as there is more to read and store."""
        self.state, self._draining = DRAINING, None

    def leave(self, *, is_over: bool) -> None:
        """Set the state of an agent that ends early: `finished` if the run `is_over`, else `draining`."""
        self.state = FINISHED if is_over else DRAINING

    def notice_gap(self, now_s: float) -> float:
        """Return for how many seconds this process itself was stopped since the last call, 0 if it was not.

        Waiting for a restarted job begins anew after that: nobody looked in that time.
        """
        gap_s = now_s - self._last_turn_s
        self._last_turn_s = now_s
        if gap_s <= GAP_S:
            return 0.0
        self._gone_s = now_s
        return gap_s

    def has_lingered(self, now_s: float) -> bool:
        """Whether all is stored, and the time to wait for a restarted job has passed."""
        return self.state == FINISHED and now_s - self._gone_s >= linger_s(self._spool, self._linger_s)

    def is_overdue(self, now_s: float) -> bool:
        """Whether no rank has been there for so long that the agent ends, whatever is left to do."""
        return now_s - self._gone_s > give_up_s(self._spool, self._linger_s)
