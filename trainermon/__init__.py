"""trainermon watches distributed PyTorch training from the inside.

    from trainermon import TrainerMon

    monitor = TrainerMon("monitor_config.json")
    monitor.set_monitor(model, optimizer=optimizer)

Importing trainermon does not import torch; the public names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainermon.core.log import set_level

if TYPE_CHECKING:
    from trainermon.analysis.check.dumps import check
    from trainermon.analysis.compare import compare, compare_distributed
    from trainermon.dump.debugger import PrecisionDebugger
    from trainermon.dump.online.dispatch import AccuracyDispatch, PtdbgDispatch
    from trainermon.monitor.session import TrainerMon, compile_friendly

__all__ = [
    "AccuracyDispatch",
    "PrecisionDebugger",
    "PtdbgDispatch",
    "TrainerMon",
    "__version__",
    "check",
    "compare",
    "compare_distributed",
    "compile_friendly",
]
__version__ = "0.1.0"

set_level()


def __getattr__(name: str) -> Any:
    if name in ("TrainerMon", "compile_friendly"):
        from trainermon.monitor import session  # loads torch, so only when asked for

        return getattr(session, name)
    if name == "PrecisionDebugger":
        from trainermon.dump import debugger

        return debugger.PrecisionDebugger
    if name in ("AccuracyDispatch", "PtdbgDispatch"):
        from trainermon.dump.online import dispatch

        return getattr(dispatch, name)
    if name in ("compare", "compare_distributed"):
        from trainermon.analysis import compare

        return getattr(compare, name)
    if name == "check":
        from trainermon.analysis.check import dumps

        return dumps.check
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
