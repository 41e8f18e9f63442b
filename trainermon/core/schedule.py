"""Which steps are collected, and on which of these is read what is not read on all of them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """The steps to collect: `start_step`, `start_step + step_interval`, …, `collect_times` of them.

    Doctest:

        >>> schedule = Schedule(start_step=2, step_interval=3, collect_times=2)
        >>> [step for step in range(10) if schedule.due(step)]
        [2, 5]
    """

    start_step: int = 0
    step_interval: int = 1
    collect_times: int = 100_000_000

    def due(self, step: int) -> bool:
        """Return whether the schedule says that `step` is collected."""
        index, rest = divmod(step - self.start_step, self.step_interval)
        return rest == 0 and 0 <= index < self.collect_times

    def next_due(self, step: int) -> int | None:
        """Return the first step from `step` on that is collected; None if there is none.

        >>> schedule = Schedule(start_step=2, step_interval=3, collect_times=2)
        >>> [schedule.next_due(step) for step in range(7)]
        [2, 2, 2, 5, 5, 5, None]
        """
        index = max(0, -((self.start_step - step) // self.step_interval))
        return self.start_step + index * self.step_interval if index < self.collect_times else None


class DueSteps:
    """The first collected step, and the first one in each `interval_steps` steps.

    Args:
        interval_steps: How often; 0: never.
        step_interval: Every how many steps are collected.
    """

    def __init__(self, interval_steps: int, step_interval: int) -> None:
        self._interval_steps = interval_steps
        self._step_interval = step_interval
        self._first: int | None = None

    def include(self, step: int) -> bool:
        """Return whether `step` is one of them; it is collected."""
        if not self._interval_steps:
            return False
        if self._first is None:
            self._first = step
        return step == self._first or step % self._interval_steps < self._step_interval
