"""What is put around an optimizer: its `step` may do nothing, or call no hooks, so the inner one is watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

ACCELERATE = "AcceleratedOptimizer"
WRAPPERS = frozenset({ACCELERATE, "LightningOptimizer"})


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer below any wrapper of accelerate or Lightning, and below those whose steps tell too little.

    With gradient accumulation `AcceleratedOptimizer.step()` is called in every micro step, and steps in the last one;
    neither library is imported. torch's own PostLocalSGDOptimizer calls no hooks, as many a Lookahead; one that holds
    another one over all its parameters, as a SAM, may be stepped through methods of its own, which call the other's
    `step`. Only where such a one holds one optimizer is that returned.
    """
    inner = optimizer.optimizer if _names(optimizer) & WRAPPERS else None
    if inner is None and (calls_no_hooks(optimizer) or _leaves_its_steps(optimizer)):
        inner = only_held(optimizer)
    return optimizer if inner is None else unwrapped(inner)


def _leaves_its_steps(optimizer: object) -> bool:
    """Return whether a class that is not torch's holds one optimizer, and that one exactly what it holds itself."""
    if not isinstance(optimizer, Optimizer) or type(optimizer).__module__.startswith("torch."):
        return False
    inner = only_held(optimizer)
    if inner is None:
        return False
    ours, theirs = ({id(p) for group in one.param_groups for p in group["params"]} for one in (optimizer, inner))
    return ours == theirs


def calls_no_hooks(optimizer: object) -> bool:
    """Return whether this is one of torch's optimizers whose class never called `torch.optim.Optimizer.__init__`."""
    return isinstance(optimizer, Optimizer) and not (
        hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(type(optimizer).step, "hooked")
    )


def only_held(wrapper: object) -> Optimizer | None:
    """Return the optimizer of torch that an object holds in its attributes; None where it holds another number."""
    held = list(held_optimizers(wrapper).values())
    return held[0] if len(held) == 1 else None


def held_optimizers(wrapper: object) -> dict[str, Optimizer]:
    """Return the optimizers of torch that an object holds, by attribute; each once."""
    found: dict[str, Optimizer] = {}
    for name, value in getattr(wrapper, "__dict__", {}).items():
        if isinstance(value, Optimizer) and not any(value is other for other in (wrapper, *found.values())):
            found[name] = value
    return found


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
