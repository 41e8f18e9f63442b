"""Which ranks have been silent for too long."""

from __future__ import annotations

from trainermon.agent.hang.limits import HangLimits
from trainermon.agent.watch import RankState, RankWatch
from trainermon.core.config import HangConfig
from trainermon.core.control import Phase

_BUSY = frozenset({Phase.SETUP, Phase.CHECKPOINT, Phase.EVALUATION, Phase.REPLAY, Phase.DUMP})


class SilenceWatch:
    """Compares the silence of each rank with its limit, which it learns from the silences that ended by themselves."""

    def __init__(self, settings: HangConfig, ranks: RankWatch) -> None:
        self._limits = HangLimits(settings)
        self._ranks = ranks
        ranks.on_silence = self._limits.learn

    def limit_s(self, state: RankState) -> float:
        """Return for how many seconds the rank may be silent in its present phase."""
        return self._limits.limit_s(state.rank, state.phase)

    def overdue(self, now_s: float) -> list[RankState]:
        """Return the ranks whose heartbeat has not moved for too long.

        None while a rank known to be busy explains it.
        """
        alive = [state for state in self._ranks.living if state.generation >= 0]
        overdue = [state for state in alive if now_s - state.changed_s > self.limit_s(state)]
        excuses = [state for state in alive if state.phase in _BUSY and state not in overdue]
        return [state for state in overdue if state.phase in _BUSY or not excuses]
