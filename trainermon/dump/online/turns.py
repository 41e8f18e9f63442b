"""Whose turn it is: which calls of a step are tried, so that the cost is bounded and every call is tried some day."""

from __future__ import annotations

_IDLE_FROM = 20
_STEPS_AT_ONCE = 10


class Turns:
    """Chooses calls of each step by their position in it.

    One in `every` is chosen, another one in the next step. From 20 on, nine steps of ten are idle, and the tenth makes
    up for them: to count the calls of a step costs more than to try so few. A step that has spent `budget_ms` chooses
    no more, and the next one that is not idle passes over what came before that point.
    """

    def __init__(self, *, every: int, budget_ms: float) -> None:
        self._stride = _STEPS_AT_ONCE if every >= _IDLE_FROM else 1
        self._every, self._budget_s = -(-every // self._stride), budget_ms / 1000
        self._step = self._position = self._resumes_at = 0
        self._spent_s = 0.0
        self._ended_at: int | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no call of this step is tried."""
        return bool((self._step - 1) % self._stride)

    def begin_step(self) -> None:
        """Start to count from the first call of the next step."""
        self._step += 1
        if self.is_idle:
            return
        self._resumes_at = self._ended_at or 0
        self._position, self._spent_s, self._ended_at = 0, 0.0, None

    def next(self) -> bool:
        """Return whether the call that comes now is tried."""
        position = self._position
        self._position += 1
        if (position + -(-self._step // self._stride)) % self._every or position < self._resumes_at:
            return False
        if self._budget_s and self._spent_s >= self._budget_s:
            self._ended_at = position if self._ended_at is None else self._ended_at
            return False
        return True

    def spend(self, duration_s: float) -> None:
        """Note that trying took so long."""
        self._spent_s += duration_s
