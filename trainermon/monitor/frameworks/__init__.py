"""How each training framework reduces, holds and steps its parameters: one small module per framework."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from trainermon.core.errors import AttachError
from trainermon.core.strict import shown
from trainermon.core.values import Coordinates
from trainermon.monitor.frameworks.optimizer_wrappers import last_teller, unwrapped
from trainermon.monitor.taps.training import Training

__all__ = ["FRAMEWORKS", "Training", "detect", "load"]

# Name -> the module that answers for it, in the order in which they are asked. `recognises(chunks, optimizer)` may
# import nothing of the framework, `describe(chunks, optimizer, coordinates)` may.
FRAMEWORKS = MappingProxyType(
    {
        name: f"trainermon.monitor.frameworks.{name}"
        for name in ("megatron", "deepspeed", "fsdp2", "fsdp1", "zero_redundancy", "ddp", "plain")
    }
)


def load() -> None:
    """Import what `detect` asks, and nothing of the frameworks themselves, so that no step has to."""
    for module in FRAMEWORKS.values():
        importlib.import_module(module)


def detect(
    chunks: Sequence[nn.Module],
    optimizer: Any,
    coordinates: Coordinates,
    *,
    framework: str | None = None,
    one_of_several: str = 'TrainerMon({"run_id": "generator"}).set_monitor(generator, its_optimizer)',
) -> Training:
    """Find out which framework trains a model; return how its gradients, parameters and steps are watched.

    Args:
        chunks: The model: one module, or its virtual pipeline stages in order.
        optimizer: The optimizer whose `step()` ends a training step.
        coordinates: The rank's position in the job, as far as the launcher tells.
        framework: Name of the only framework that is allowed; None: any.
        one_of_several: What to write where there are several optimizers.

    The choice depends on what the model and the optimizer *are*, never on which packages are installed. What is not
    recognised is refused.

    Raises:
        AttachError: A kind of wrapper or optimizer that this version cannot watch correctly.
    """
    names = [framework] if framework else list(FRAMEWORKS)
    if names[0] not in FRAMEWORKS:
        raise AttachError(f"framework: found {shown(framework)}, expected one of {', '.join(FRAMEWORKS)}")
    if isinstance(optimizer, list | tuple | Mapping):
        raise AttachError(
            f"optimizer: found {len(optimizer)} in a {type(optimizer).__name__}, expected the one whose step() ends a "
            f"training step; watch each with the model that it steps, under a name of its own: {one_of_several}"
        )
    teller, optimizer = last_teller(optimizer), unwrapped(optimizer)
    for name in names:
        module = importlib.import_module(FRAMEWORKS[name])
        if module.recognises(chunks, optimizer):
            training: Training = module.describe(chunks, optimizer, coordinates)
            if not training.parameters:
                raise AttachError("model: no parameter requires a gradient, so there is nothing to watch")
            training.tells_last = teller or training.tells_last
            return training
    model, used = (f"{type(x).__module__}.{type(x).__qualname__}" for x in (chunks[0], optimizer))
    raise AttachError(
        f"model {model} with optimizer {used}: this is not what {' or '.join(names)} training looks like; pass "
        "the model and the optimizer as the framework returned them, the one whose step() ends a training step"
        f"{_inner(optimizer)}"
    )


def _inner(wrapper: Any) -> str:
    """Return what to pass in the place of an object of the script's own that holds torch optimizers, if it does."""
    held = getattr(wrapper, "__dict__", {})
    found = [name for name, value in held.items() if isinstance(value, torch.optim.Optimizer)]
    if not found:
        return ""
    several = ", each with the model that it steps, to a monitor of its own" if len(found) > 1 else ""
    return f": not the wrapper, but what it holds as {' and '.join('.' + name for name in found)}{several}"
