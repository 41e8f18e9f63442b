"""Which ranks have died, in which order, and which deaths are still to be looked into."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from trainermon.agent.hang.evidence import ProcessExit
from trainermon.agent.hang.exits import ExitWatch
from trainermon.agent.hang.kept_notes import KeptNotes
from trainermon.agent.hang.process import read_process
from trainermon.agent.watch import RankState, RankWatch
from trainermon.core.control import Phase
from trainermon.core.journal import Header
from trainermon.core.spool import rank_pid

SETTLE_S = 3.0
"""For how long others may follow a rank that has died, before it is asked who was first."""

SETTLE_ALONE_S = 0.5
"""The same where no rank is left."""

EXIT_LIMIT_S = 10.0
"""For how long the process of a rank that has closed the monitor is awaited, to see by which status it ends."""

READ_LIMIT_S = 20.0
"""For how long a judgement on dead ranks waits until what they wrote last, their exceptions among it, was read."""

_SAID_GOOD_BYE = frozenset({Phase.CLOSED})


class DeathWatch:
    """Watches the processes of the local ranks; remembers those that died until they come back.

    Args:
        spool: Where the ranks are.
        ranks: Their heartbeats, read by the caller.
        headers: Returns, by rank, the header of its journal.

    Attributes:
        num_dead: Number of deaths so far.
        awaits_exit: Whether, at the last `note`, a rank had closed the monitor a moment ago and its process had not
            ended: by which status it will is still to be seen.
    """

    def __init__(self, spool: Path, ranks: RankWatch, headers: Callable[[], Mapping[int, Header]]) -> None:
        self.num_dead = 0
        self.awaits_exit = False
        self._spool = spool
        self._ranks = ranks
        self._headers = headers
        self._exits = ExitWatch()
        self._notes = KeptNotes(spool)
        self._died_s: dict[int, float] = {}  # in the order in which they died
        self._told: set[int] = set()
        self._followed: dict[int, int] = {}
        self._closed_s: dict[int, float] = {}

    @property
    def pending(self) -> bool:
        """Whether a rank has died whose death was not reported (as an alert) yet."""
        return bool(self._died_s.keys() - self._told)

    def is_settled(self, now_s: float, *, has_read_all: bool) -> bool:
        """Return whether it is time to judge the deaths: others that follow have had time to, all records were read.

        `now_s` is monotonic; `has_read_all` whether the journals were read to their ends. They are not waited for for
        ever.
        """
        settled_s = SETTLE_S if self._ranks.num_alive else SETTLE_ALONE_S
        waited_s = now_s - max(self._died_s.values())
        return waited_s >= settled_s and (has_read_all or waited_s >= READ_LIMIT_S)

    def poll(self) -> None:
        """Record processes that have ended; call it every turn, as exit statuses are available only briefly."""
        self._exits.poll()

    def note(self, now_s: float, gone: Sequence[int], *, told: Collection[int]) -> None:
        """Record who lives, who has gone since the last look, and who had gone before the first one.

        Args:
            now_s: Monotonic time of the look.
            gone: Ranks that have left since the last one.
            told: Ranks whose death an earlier agent has told of.
        """
        for state in self._ranks.living:
            if self._followed.get(state.rank) != state.pid:
                self._followed[state.rank] = state.pid
                self._exits.follow(state.rank, rank_pid(self._spool, state.rank))
            self._notes.follow(state.rank, self._exits.pid(state.rank))
        unseen = self._never_seen(told)
        for rank in self._exits.in_order([*gone, *unseen]):
            if self._ranks.ranks[rank].phase not in _SAID_GOOD_BYE:
                self._died_s[rank] = now_s
                self.num_dead += 1
        for rank in self._failed_after_good_bye():
            self._died_s[rank] = now_s
        for rank in [rank for rank in self._died_s if self._ranks.ranks[rank].alive]:  # a new attempt
            del self._died_s[rank]
            self._told.discard(rank)
        self._note_closed(now_s)

    @property
    def order(self) -> list[int]:
        """The dead ranks, in the order in which they died as far as it is known."""
        return list(self._died_s)

    def unordered(self, ranks: Collection[int]) -> list[int]:
        """Return those of dead `ranks` that may each have died first: gone at the same look, with no known exit."""
        first_s = min(self._died_s.values())
        return [rank for rank in ranks if self._died_s[rank] == first_s and self.exit_of(rank) is None]

    def mark_told(self, ranks: Collection[int]) -> None:
        """Mark the deaths of `ranks` as reported: they are no longer pending."""
        self._told |= set(ranks)

    def is_dead(self, rank: int) -> bool:
        """Return whether the rank's process was gone at the last `note`, and the rank has not come back.

        A rank that closed in good order is not dead, unless its process then ended with a status other than 0.
        """
        return rank in self._died_s

    def pid_of(self, rank: int) -> int:
        """Return the id of the process that was last watched as `rank`; 0 if none was."""
        return self._exits.pid(rank)

    def exit_of(self, rank: int) -> ProcessExit | None:
        """Return how the rank's process ended (signal, exit status); None if it has not, or was never watched."""
        return self._exits.exit_of(rank)

    def notes_of(self, rank: int) -> bytes:
        """Return what the rank has noted of its collectives, also if it is dead; empty if it keeps no notes."""
        return self._notes.read(rank, self._exits.pid(rank))

    def close(self) -> None:
        """Stop watching all processes."""
        self._exits.close()
        self._notes.close()

    def _note_closed(self, now_s: float) -> None:
        """Note since when ranks that have closed the monitor are on the way to the end of their processes."""
        on_the_way = {rank for rank in self._closed_ranks() if self._exits.pid(rank) and self.exit_of(rank) is None}
        self._closed_s = {rank: self._closed_s.get(rank, now_s) for rank in on_the_way}
        self.awaits_exit = any(now_s - closed_s < EXIT_LIMIT_S for closed_s in self._closed_s.values())

    def _closed_ranks(self) -> list[int]:
        return [rank for rank, state in self._ranks.ranks.items() if state.phase in _SAID_GOOD_BYE and not state.alive]

    def _failed_after_good_bye(self) -> list[int]:
        """Return the ranks that closed the monitor, and whose processes have ended since with a status other than 0."""
        found = []
        for rank in self._closed_ranks():
            ended = None if rank in self._died_s else self._exits.exit_of(rank)
            if ended is not None and ended.status:
                found.append(rank)
        return self._exits.in_order(found)

    def _never_seen(self, told: Collection[int]) -> list[int]:
        """Return the ranks of this attempt that were gone before anybody looked, where nobody has told of them."""
        headers = self._headers()
        attempt = max((header.attempt for header in headers.values()), default=0)
        found = []
        for rank, header in headers.items():
            state = self._ranks.ranks.get(rank)
            if state is not None and not state.alive and state.generation >= 0 and rank not in self._followed:
                self._follow_dead(state)
                found += [rank] if header.attempt == attempt and rank not in told else []
        return found

    def _follow_dead(self, state: RankState) -> None:
        self._followed[state.rank] = state.pid
        process = read_process(state.pid)
        if process is not None and process.state == "Z":  # nobody has collected it: it tells how it ended
            self._exits.follow(state.rank, state.pid)
            self._exits.poll()
