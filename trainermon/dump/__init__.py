"""Full tensors of a step: capture, the file contract, readers and writers.

The public names are resolved on first use: the readers need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainermon.dump.debugger import PrecisionDebugger, module_dump, module_dump_end
    from trainermon.dump.draws import random_save
    from trainermon.dump.seeds import seed_all

__all__ = ["PrecisionDebugger", "module_dump", "module_dump_end", "random_save", "seed_all"]
_MODULES = {"random_save": "draws", "seed_all": "seeds"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'debugger')}"), name)
