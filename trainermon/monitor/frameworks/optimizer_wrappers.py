"""What accelerate and Lightning put around an optimizer: its `step` may do nothing, so the inner one is watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ACCELERATE = "AcceleratedOptimizer"
WRAPPERS = frozenset({ACCELERATE, "LightningOptimizer"})


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer below any wrapper of accelerate or Lightning; neither is imported.

    With gradient accumulation `AcceleratedOptimizer.step()` is called in every micro step, and steps in the last one.
    """
    while _names(optimizer) & WRAPPERS:
        optimizer = optimizer.optimizer
    return optimizer


def last_teller(optimizer: Any) -> Callable[[], bool | None] | None:
    """Return a function that tells, by accelerate, whether the running backward is the last of its step.

    None if accelerate has not wrapped this optimizer. What it returns is None where accelerate does not accumulate: it
    then says "last" of every backward.
    """
    state = getattr(optimizer, "gradient_state", None) if ACCELERATE in _names(optimizer) else None
    if state is None:
        return None
    return lambda: (state.num_steps > 1 or None) if state.sync_gradients else False


def _names(optimizer: Any) -> set[str]:
    return {cls.__name__ for cls in type(optimizer).__mro__}
