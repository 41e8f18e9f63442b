"""Which steps are collected: a pure function of the step and the configuration."""

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
