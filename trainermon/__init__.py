"""trainermon watches distributed PyTorch training from the inside.

    from trainermon import TrainerMon

    monitor = TrainerMon("monitor_config.json")
    monitor.set_monitor(model, optimizer=optimizer)

Importing trainermon does not import torch; the public names are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trainermon.core.log import set_level

if TYPE_CHECKING:
    from trainermon.analysis.check.dumps import check
    from trainermon.analysis.checkpoint.comparison import compare_checkpoints
    from trainermon.analysis.checkpoint.opening import open_checkpoint
    from trainermon.analysis.compare import compare, compare_distributed
    from trainermon.analysis.environment.checker import ConfigChecker
    from trainermon.analysis.environment.recorder import EnvironmentRecorder
    from trainermon.analysis.rl.single_comparator import SingleComparator
    from trainermon.dump.debugger import PrecisionDebugger
    from trainermon.dump.online.dispatch import AccuracyDispatch, PtdbgDispatch
    from trainermon.monitor.gradient_probe import GradientMonitor
    from trainermon.monitor.taps.compiled_regions import compile_friendly
    from trainermon.monitor.trainer_mon import TrainerMon
    from trainermon.rl.single_save import SingleSave

__all__ = [
    "AccuracyDispatch",
    "ConfigChecker",
    "EnvironmentRecorder",
    "GradientMonitor",
    "PrecisionDebugger",
    "PtdbgDispatch",
    "SingleComparator",
    "SingleSave",
    "TrainerMon",
    "__version__",
    "check",
    "compare",
    "compare_checkpoints",
    "compare_distributed",
    "compile_friendly",
    "open_checkpoint",
]
__version__ = "0.1.0"

set_level()


# Some of these load torch, so each is imported only when it is asked for.
_HOMES = {
    "AccuracyDispatch": "trainermon.dump.online.dispatch",
    "ConfigChecker": "trainermon.analysis.environment.checker",
    "EnvironmentRecorder": "trainermon.analysis.environment.recorder",
    "GradientMonitor": "trainermon.monitor.gradient_probe",
    "PrecisionDebugger": "trainermon.dump.debugger",
    "PtdbgDispatch": "trainermon.dump.online.dispatch",
    "SingleComparator": "trainermon.analysis.rl.single_comparator",
    "SingleSave": "trainermon.rl.single_save",
    "TrainerMon": "trainermon.monitor.trainer_mon",
    "check": "trainermon.analysis.check.dumps",
    "compare": "trainermon.analysis.compare",
    "compare_checkpoints": "trainermon.analysis.checkpoint.comparison",
    "compare_distributed": "trainermon.analysis.compare",
    "compile_friendly": "trainermon.monitor.taps.compiled_regions",
    "open_checkpoint": "trainermon.analysis.checkpoint.opening",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
