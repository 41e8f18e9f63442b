"""Signs and numbers of the gradients that optimizers use, in files that two runs are compared by.

The public name is resolved on first use: what MindSpore shares of this folder needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainermon.monitor.gradient_probe.gradient_monitor import GradientMonitor

__all__ = ["GradientMonitor"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.gradient_monitor"), name)
