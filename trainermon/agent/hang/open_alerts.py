"""The alerts `hang` and `rank-dead` that are on, and when they are over."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Mapping

from trainermon.agent.hang.report import RULES
from trainermon.agent.watch import RankState
from trainermon.core.values import Alert, AlertState

HANG = "hang"
RANK_DEAD = "rank-dead"


@dataclasses.dataclass(frozen=True, slots=True)
class OpenAlert:
    """A `hang` or `rank-dead` alert that fires.

    Attributes:
        alert: The alert.
        generations: By rank that it is about, the number of its last heartbeat when it began.
    """

    alert: Alert
    generations: Mapping[int, int]

    def is_over(self, states: Mapping[int, RankState]) -> bool:
        """Return whether every rank that it is about gives signs of life again, or has come back in a later attempt."""
        return all(self._is_over_for(states[rank]) for rank in self.generations)

    def resolved(self, states: Mapping[int, RankState]) -> Alert:
        """Return the alert in its final state, as it ends now."""
        concerned = [states[rank] for rank in self.generations]
        lives = any(state.alive for state in concerned)
        step = max(self.alert.step, *(state.step for state in concerned)) if lives else self.alert.step
        became = "the ranks go on" if lives else "the ranks have gone"
        message = f"{self.alert.rule}: over at step {step}, {became}; began at step {self.alert.first_step}"
        return dataclasses.replace(
            self.alert, state=AlertState.RESOLVED, step=step, time_s=time.time(), message=message
        )

    def _is_over_for(self, state: RankState) -> bool:
        if not state.alive:
            return self.alert.rule == HANG
        return state.generation != self.generations[state.rank]


class OpenAlerts:
    """Keeps the `hang` and `rank-dead` alerts that fire, including those that an earlier agent began.

    Args:
        inherited: Alerts of an earlier agent that may still fire.
    """

    def __init__(self, inherited: Collection[Alert]) -> None:
        self._inherited = [alert for alert in inherited if alert.rule in RULES]
        self._open: list[OpenAlert] = []

    def __bool__(self) -> bool:
        return bool(self._open)

    @property
    def is_hanging(self) -> bool:
        """Whether a `hang` alert fires now, for any rank."""
        return any(entry.alert.rule == HANG for entry in self._open)

    @property
    def dead_ranks(self) -> set[int]:
        """The ranks that firing `rank-dead` alerts name."""
        return {entry.alert.rank for entry in self._open if entry.alert.rule == RANK_DEAD}

    def add(self, alert: Alert, generations: Mapping[int, int]) -> None:
        """Keep a new alert; `generations` are the numbers of the last heartbeats of the ranks that it is about."""
        self._open.append(OpenAlert(alert, generations))

    def take_over(self, states: Mapping[int, RankState]) -> None:
        """Adopt the alerts of an earlier agent; each ends when its ranks give a sign of life again."""
        for alert in self._inherited if states else ():
            about = [state for state in states.values() if alert.rule == HANG or state.rank == alert.rank]
            self.add(alert, {state.rank: state.generation for state in about})
            self._inherited = []

    def take_resolved(self, states: Mapping[int, RankState]) -> list[Alert]:
        """Remove the alerts that are over, and return them in their final state."""
        over = [entry for entry in self._open if entry.is_over(states)]
        self._open = [entry for entry in self._open if not entry.is_over(states)]
        return [entry.resolved(states) for entry in over]
