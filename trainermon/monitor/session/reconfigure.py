"""A new configuration, sent by the agent, put into force at the step that it names."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from trainermon.core.config import MonitorConfig, parse_config
from trainermon.core.control import ControlPage
from trainermon.core.errors import TrainermonError
from trainermon.core.events import ConfigurationEvent, ConfigurationStatus
from trainermon.core.journal import JournalWriter
from trainermon.core.values import Action, Command

logger = logging.getLogger("trainermon")

FIXED = [
    "framework",
    "run_id",
    "output_dir",
    "spool_dir",
    "spool_mb",
    "rules",
    "alert",
    "format",
    "ops",
    "ndigits",
    "step_count_per_record",
    "append_output",
    "influxdb",
    "pushgateway",
    "wandb",
    "mlflow",
    "agent",
    "escalation",
    "hang",
]
"""Keys that are read once, when a run begins."""


class LiveReconfiguration:
    """Applies configurations that arrive during training, each on its first step, or reports why it cannot.

    A rank that is past that step when it reads the command leaves everything as it is: otherwise ranks would differ
    from one another on the steps in between, without anybody knowing.

    Args:
        page: Where commands arrive.
        journal: Where it is reported what became of them.
        apply: Puts a configuration into force from the coming step on and returns the one that was in force; raises
            TrainermonError if the model does not have what it asks for, and has then changed nothing.

    Attributes:
        waiting: Configurations that have come, and whose first step has not.
    """

    def __init__(
        self, page: ControlPage, journal: JournalWriter, apply: Callable[[MonitorConfig], MonitorConfig]
    ) -> None:
        self._page = page
        self._journal = journal
        self._apply = apply
        self._epoch = page.epoch()
        self._known: set[str] = set()
        self.waiting: list[Command] = []

    def has_news(self, epoch: int) -> bool:
        """Return whether `poll` may have something to do at a control page of that `epoch`."""
        return epoch != self._epoch or bool(self.waiting)

    def poll(self, step: int, epoch: int) -> None:
        """Apply new configurations, read if the control page is at another `epoch`; `step` is the next one to begin."""
        if epoch != self._epoch:
            self._epoch = epoch
            for command in self._page.read_commands():
                if command.action is Action.CONFIGURE and command.id not in self._known:
                    self._known.add(command.id)
                    self.waiting.append(command)
        if self.waiting:
            due = [command for command in self.waiting if command.first_step <= step]
            self.waiting = [command for command in self.waiting if command.first_step > step]
            for command in due:
                self._put_into_force(command, step)

    def _put_into_force(self, command: Command, step: int) -> None:
        if command.first_step < step:
            reason = f"it was to apply from step {command.first_step} on, but this rank is at step {step}"
            self._tell(command, ConfigurationStatus.LATE, reason)
            return
        try:
            config, _ = parse_config(json.loads(command.config))
            before = self._apply(config)
        except (TrainermonError, ValueError) as error:
            self._tell(command, ConfigurationStatus.REFUSED, str(error))
            return
        kept = [key for key in FIXED if getattr(config, key) != getattr(before, key)]
        reason = f"but {', '.join(kept)}: read once, when a run begins" if kept else ""
        self._tell(command, ConfigurationStatus.APPLIED, reason)

    def _tell(self, command: Command, status: ConfigurationStatus, reason: str) -> None:
        self._journal.append_event(
            ConfigurationEvent(step=command.first_step, command=command.id, status=status, reason=reason)
        )
        if status is ConfigurationStatus.APPLIED:
            log = logger.warning if reason else logger.info
            log("the new configuration applies from step %d on%s", command.first_step, f", {reason}" if reason else "")
        else:
            logger.warning("the new configuration is %s, the old one stays: %s", status, reason)
