"""`TrainerMon`: the public face of the rank side, and the wiring of everything below it."""

from __future__ import annotations

from trainermon.monitor.session.trainer_mon import TrainerMon, set_monitor
from trainermon.monitor.taps.compiled_regions import compile_friendly

__all__ = ["TrainerMon", "compile_friendly", "set_monitor"]
