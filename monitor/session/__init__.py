"""`TrainerMon`: the public face of the rank side, and the wiring of everything below it."""

from __future__ import annotations

from trainermon.monitor.session.trainer_mon import TrainerMon, set_monitor

__all__ = ["TrainerMon", "set_monitor"]
