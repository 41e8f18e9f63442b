"""What is known of the local ranks without asking them: heartbeats, journals and exits, as evidence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from trainermon.agent.hang.deaths import DeathWatch
from trainermon.agent.hang.evidence import DEAD, ENDED, RUNNING, RankEvidence
from trainermon.agent.hang.records import LastRecords
from trainermon.agent.hang.silence import SilenceWatch
from trainermon.agent.watch import RankState, RankWatch
from trainermon.core.control import Phase
from trainermon.core.journal import Header


class KnownEvidence:
    """Collects what the agent knows of the local ranks without asking them, as the first evidence of a hang or a death.

    Args:
        host: Name of this node.
        ranks: Heartbeats of the ranks.
        headers: Returns, by rank, the header of its journal.
        records: The ranks' last steps and exceptions.
        silence: How long each may be silent.
        deaths: How they ended.
    """

    def __init__(  # noqa: PLR0913 - the sources of the evidence
        self,
        host: str,
        *,
        ranks: RankWatch,
        headers: Callable[[], Mapping[int, Header]],
        records: LastRecords,
        silence: SilenceWatch,
        deaths: DeathWatch,
    ) -> None:
        self.host = host
        self._ranks = ranks
        self._headers = headers
        self._records = records
        self._silence = silence
        self._deaths = deaths

    @property
    def attempt(self) -> int:
        """Number of the newest attempt (start of the job) that a journal names; 0 before that."""
        return max((header.attempt for header in self._headers().values()), default=0)

    def collect(self, now_s: float) -> list[RankEvidence]:
        """Return what is known now of each rank, in the order of ranks; `now_s` is monotonic."""
        return [self._of(state, now_s) for state in self._ranks.states]

    def _of(self, state: RankState, now_s: float) -> RankEvidence:
        header = self._headers().get(state.rank)
        attempt = header.attempt if header else 0
        limit_s = self._silence.limit_s(state)
        failure = self._records.failure(state.rank, attempt=attempt)
        return RankEvidence(
            rank=state.rank,
            world_size=header.coordinates.world_size if header else 1,
            host=self.host,
            attempt=attempt,
            pid=self._deaths.pid_of(state.rank) if state.alive else 0,
            life=self._life_of(state),
            phase=state.phase.name.lower(),
            step=state.step,
            silent_s=round(now_s - state.changed_s, 3),
            limit_s=limit_s if math.isfinite(limit_s) else 0.0,
            exit=self._deaths.exit_of(state.rank),
            error=failure.message if failure else "",
            failed_s=failure.time_s if failure else 0.0,
        )

    def _life_of(self, state: RankState) -> str:
        if self._deaths.is_dead(state.rank) and not state.alive:
            return DEAD
        return RUNNING if state.alive and state.phase is not Phase.CLOSED else ENDED
