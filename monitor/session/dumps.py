"""Dumps of this rank: the replay of a step whose gradients are not finite, and dumps that a command ordered."""

from __future__ import annotations

from trainermon.monitor.config import MonitorConfig
from trainermon.monitor.control import ControlPage
from trainermon.monitor.frameworks import Training
from trainermon.monitor.journal import JournalWriter
from trainermon.monitor.topology import Run
from trainermon.monitor.values import Coordinates


class Dumps:
    """Decides what is dumped on which step, and says in the journal what became of it."""

    def __init__(
        self,
        run: Run,
        coordinates: Coordinates,
        config: MonitorConfig,
        training: Training,
        *,
        journal: JournalWriter,
        page: ControlPage,
    ) -> None:
        self.replay_armed = False

    def prepare(self, step: int, *, gradients_due: bool) -> None:
        pass

    def gradients_finite(self) -> None:
        pass

    def replay(self, step: int) -> None:
        pass

    def finish_step(self, step: int) -> None:
        pass

    def poll_commands(self, step: int) -> None:
        pass
