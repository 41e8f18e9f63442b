"""Who is alive on this node, on which step, and for how long a rank has given no sign.

A rank's lock is the truth about its life: the kernel drops it when the process ends, a zombie included, and every pid
namespace sees it. A heartbeat only says how far a living rank has come. Ages are measured by this process's own
monotonic clock from the moment a change was *seen*: neither a stepped clock nor a rank's wrong one makes a rank look
hung.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from trainermon.core.control import ControlReader, Phase
from trainermon.core.errors import SpoolError
from trainermon.core.journal.names import FolderNames
from trainermon.core.spool import list_ranks, rank_alive
from trainermon.core.values import Command

MAX_PACE_LOOKS = 50

_log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class RankState:
    """What the agent knows of one rank from its control page.

    Attributes:
        rank: Its number.
        alive: Whether its process lives (it holds its lock).
        step: The step it is on; -1: not known.
        phase: What it does now.
        generation: Number of its heartbeats so far.
        pid: Its process id, as the rank itself sees it.
        changed_s: When its heartbeat was last seen to change, monotonic seconds.
    """

    rank: int
    alive: bool = False
    step: int = -1
    phase: Phase = Phase.SETUP
    generation: int = -1
    pid: int = 0
    changed_s: float = 0.0


class RankWatch:
    """Reads the heartbeats and locks of the ranks in one spool, and sends them commands.

    Attributes:
        ranks: By rank, its state at the last `look`.
        on_silence: Called with rank, phase and seconds whenever a rank gives a sign after a silence in that phase.
    """

    def __init__(self, spool: Path) -> None:
        self.ranks: dict[int, RankState] = {}
        self.on_silence: Callable[[int, Phase, float], None] | None = None
        self._spool = spool
        self._names = FolderNames(spool)
        self._known_names = -1
        self._readers: dict[int, ControlReader] = {}
        self._pace: deque[tuple[float, int]] = deque(maxlen=MAX_PACE_LOOKS)

    @property
    def states(self) -> list[RankState]:
        """The state of every rank, by rank."""
        return [state for _, state in sorted(self.ranks.items())]

    @property
    def living(self) -> list[RankState]:
        """The ranks that were alive at the last look."""
        return [state for state in self.ranks.values() if state.alive]

    @property
    def num_alive(self) -> int:
        """How many ranks were alive at the last look."""
        return len(self.living)

    @property
    def steps(self) -> dict[int, int]:
        """By living rank, the step it is on."""
        return {state.rank: state.step for state in self.living}

    @property
    def steps_per_s(self) -> float:
        """Pace of the fastest living rank over the last looks; 0 until it is known."""
        if len(self._pace) < 2:
            return 0.0
        (first_s, first_step), (last_s, last_step) = self._pace[0], self._pace[-1]
        return max(0.0, (last_step - first_step) / max(last_s - first_s, 1e-9))

    def look(self, now_s: float, *, ended: Collection[int] = ()) -> list[int]:
        """Read every rank's heartbeat anew; return the ranks that have gone since the last look. `now_s` is monotonic.

        `ended` are the ranks that closed their journal. A rank that still holds its lock after that has nothing more to
        tell, and is not waited for.
        """
        gone = []
        self._meet_ranks(now_s)
        for rank, state in self.ranks.items():  # also those whose files somebody has removed
            alive = rank not in ended and rank_alive(self._spool, rank)
            if state.alive and not alive:
                gone.append(rank)
            state.alive = alive
            self._read_beat(state, now_s)
        self._note_pace(now_s)
        return gone

    def _meet_ranks(self, now_s: float) -> None:
        self._names.look()
        if self._known_names != self._names.version:
            self._known_names = self._names.version
            for rank in list_ranks(self._spool):
                self.ranks.setdefault(rank, RankState(rank, changed_s=now_s))

    def _note_pace(self, now_s: float) -> None:
        newest = max(self.steps.values(), default=-1)
        if newest < 0:  # a run that resumes has not made the steps before its first
            self._pace.clear()
        else:
            self._pace.append((now_s, newest))

    def margin(self, reach_s: float, *, at_least: int) -> int:
        """Return how many steps ahead of the newest one is at least `reach_s` seconds away at the present pace.

        Until a pace is known, and for steps slower than `reach_s`, it is `at_least`.
        """
        pace = self.steps_per_s
        return max(at_least, math.ceil(pace * reach_s) + 1) if pace else at_least

    def skip(self, gap_s: float) -> None:
        """Subtract `gap_s` seconds from every rank's silence: this process itself was stopped, and has not looked.

        What was silent before stays so: an agent that is stopped now and then still finds a rank that hangs.
        """
        self._pace.clear()
        for state in self.ranks.values():
            state.changed_s += gap_s

    def send(self, rank: int, commands: Sequence[Command]) -> None:
        """Give `rank` these commands, in place of the ones it had.

        A rank that is gone could not carry them out: that is logged.
        """
        try:
            self._reader(rank).send(commands)
        except SpoolError as error:
            _log.warning("rank %d was not told its commands: %s", rank, error)

    def close(self) -> None:
        """Close the control pages (shared memory) of all ranks."""
        for reader in self._readers.values():
            reader.close()

    def _reader(self, rank: int) -> ControlReader:
        if rank not in self._readers:
            self._readers[rank] = ControlReader(self._spool, rank)
        return self._readers[rank]

    def _read_beat(self, state: RankState, now_s: float) -> None:
        beat = self._reader(state.rank).heartbeat()
        if beat is not None and beat.generation != state.generation:
            if self.on_silence is not None and state.pid == beat.pid:
                self.on_silence(state.rank, state.phase, now_s - state.changed_s)
            state.step, state.phase, state.generation = beat.step, beat.phase, beat.generation
            state.pid = beat.pid
            state.changed_s = now_s
