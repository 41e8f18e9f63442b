"""What runs inside the training process: taps, statistics, journal, and `TrainerMon` that wires them together.

Importing this package loads neither torch nor any part of it; the public names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainermon.monitor.trainer_mon import TrainerMon, set_monitor

__all__ = ["TrainerMon", "set_monitor"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from trainermon.monitor import trainer_mon

        return getattr(trainer_mon, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
