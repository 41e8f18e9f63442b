"""Dumps of this rank: the replay of a step whose gradients are not finite, and what a command ordered."""

from __future__ import annotations

from trainermon.core.control import ControlPage
from trainermon.core.journal import JournalWriter
from trainermon.monitor.session.dump_origin import DumpOrigin
from trainermon.monitor.session.ordered_dumps import OrderedDumps
from trainermon.monitor.session.step_replays import StepReplays


class RankDumps:
    """Makes both kinds of dump on this rank: replays of steps with bad gradients, and dumps that commands order.

    Attributes:
        replays: Replays of bad steps.
        ordered: What commands ask for.
    """

    def __init__(self, origin: DumpOrigin, *, journal: JournalWriter, page: ControlPage) -> None:
        self.replays = StepReplays(origin, journal)
        self.ordered = OrderedDumps(origin, journal, page)

    def prepare(self, step: int, *, gradients_due: bool) -> None:
        """Attach what `step` needs: the recorder of inputs for a replay, the capture of an ordered dump.

        `gradients_due`: gradients are collected on it.
        """
        self.replays.prepare(gradients_due=gradients_due)
        self.ordered.prepare(step)

    def poll_commands(self, step: int, epoch: int) -> None:
        """Read commands that have come for `step` and later ones.

        Looks at memory, at no file, unless something has come.
        """
        self.ordered.poll_commands(step, epoch)

    def finish_step(self) -> None:
        """Release what was kept for a replay, and finish the dump of this step if there is one."""
        self.replays.reset()
        self.ordered.finish_step()

    def detach(self) -> None:
        """Remove every hook, and finish an unfinished dump with what was captured."""
        self.ordered.finish_step()
        self.replays.detach()
