"""Whose turn it is: which calls of a step are tried, so that the cost is bounded and every call is tried some day."""

from __future__ import annotations


class Turns:
    """Chooses calls of each step by their position in it.

    One in `every` is chosen, another one in the next step. A step that has spent `budget_ms` chooses no more, and the
    next one passes over what came before that point.
    """

    def __init__(self, *, every: int, budget_ms: float) -> None:
        self._every, self._budget_s = every, budget_ms / 1000
        self._step = self._position = self._resumes_at = 0
        self._spent_s = 0.0
        self._ended_at: int | None = None

    def begin_step(self) -> None:
        """Start to count from the first call of the next step."""
        self._resumes_at = self._ended_at or 0
        self._step += 1
        self._position, self._spent_s, self._ended_at = 0, 0.0, None

    def next(self) -> bool:
        """Return whether the call that comes now is tried."""
        position = self._position
        self._position += 1
        if (position + self._step) % self._every or position < self._resumes_at:
            return False
        if self._budget_s and self._spent_s >= self._budget_s:
            self._ended_at = position if self._ended_at is None else self._ended_at
            return False
        return True

    def spend(self, duration_s: float) -> None:
        """Note that trying took so long."""
        self._spent_s += duration_s
