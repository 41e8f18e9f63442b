"""For how long a rank may be silent: by phase, learnt from how long it usually is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType

from trainermon.core.config import HangConfig
from trainermon.core.control import Phase

WINDOW = 256

# Whose limit a phase has; None: the rank does not tell any more what it does, and is not judged.
_LIMITED_AS: Mapping[Phase, str | None] = MappingProxyType(
    {
        Phase.SETUP: "setup_s",
        Phase.STEP: "step_s",
        Phase.OPTIMIZER: "step_s",
        Phase.REPLAY: "checkpoint_s",
        Phase.DUMP: "checkpoint_s",
        Phase.CHECKPOINT: "checkpoint_s",
        Phase.EVALUATION: "evaluation_s",
        Phase.CLOSED: None,
        Phase.DETACHED: None,
        Phase.FAILED: None,
    }
)


class HangLimits:
    """Learns, for each rank of a node and each phase, how many seconds of silence are still normal.

    A limit is the phase's least one, or `factor` times the longest silence that is usual in the phase, if that is more.
    Usual is the second longest of the rank's last 256 silences in the phase: one standstill that ended by itself does
    not make the next one look normal. It never exceeds `max_s`, unless what is usual comes near that.
    """

    def __init__(self, settings: HangConfig) -> None:
        self._settings = settings
        self._seen: dict[tuple[int, Phase], deque[float]] = {}

    def learn(self, rank: int, phase: Phase, silent_s: float) -> None:
        """Record that the rank was silent for `silent_s` seconds in this phase, and then continued."""
        self._seen.setdefault((rank, phase), deque(maxlen=WINDOW)).append(silent_s)

    def limit_s(self, rank: int, phase: Phase) -> float:
        """Return how many seconds the rank may be silent in this phase; infinite where it is not judged."""
        key = _LIMITED_AS[phase]
        if key is None:
            return math.inf
        least: float = getattr(self._settings, key)
        usual_s = self._usual_s(rank, phase)
        return max(least, min(self._settings.factor * usual_s, max(self._settings.max_s, 2 * usual_s)))

    def _usual_s(self, rank: int, phase: Phase) -> float:
        seen = self._seen.get((rank, phase), ())
        if len(seen) < 2:
            return max(seen, default=0.0)
        return sorted(seen)[-2]
