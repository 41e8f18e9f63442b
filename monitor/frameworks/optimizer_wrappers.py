"""What accelerate and Lightning put around an optimizer: its `step` may do nothing, so the inner one is watched."""

from __future__ import annotations

from typing import Any

WRAPPERS = frozenset({"AcceleratedOptimizer", "LightningOptimizer"})


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer below any wrapper of accelerate or Lightning; neither is imported.

    With gradient accumulation `AcceleratedOptimizer.step()` is called in every micro step, and steps in the last one.
    """
    while any(cls.__name__ in WRAPPERS for cls in type(optimizer).__mro__):
        optimizer = optimizer.optimizer
    return optimizer
