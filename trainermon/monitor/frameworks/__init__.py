"""How each training framework reduces, holds and steps its parameters: one small module per framework."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainermon.core.errors import AttachError
from trainermon.core.strict import shown
from trainermon.core.values import Coordinates
from trainermon.monitor.frameworks.optimizer_wrappers import (
    calls_no_hooks,
    held_optimizers,
    last_teller,
    only_held,
    unwrapped,
)
from trainermon.monitor.taps.training import Training

__all__ = ["FRAMEWORKS", "Training", "detect", "load"]

logger = logging.getLogger("trainermon")

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
        optimizer: The optimizer whose `step()` ends a training step. Of an object that holds one, that one.
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
    given, optimizer = optimizer, unwrapped(optimizer)
    training = _described(names, chunks, optimizer, coordinates)
    if training is None and (inner := _stepper_within(optimizer, chunks)) is not None:
        optimizer, training = inner, _described(names, chunks, inner, coordinates)
    if training is None:
        raise AttachError(_refusal(names, chunks[0], optimizer))
    if not training.parameters:
        raise AttachError("model: no parameter requires a gradient, so there is nothing to watch")
    training.tells_last = last_teller(given) or training.tells_last
    if optimizer is not given:
        logger.info("the steps of %s are those of the %s in it", type(given).__name__, type(optimizer).__name__)
    return training


def _described(
    names: Sequence[str], chunks: Sequence[nn.Module], optimizer: Any, coordinates: Coordinates
) -> Training | None:
    """Return what the first framework that recognises model and optimizer says of them; None if none does."""
    if calls_no_hooks(optimizer):
        return None
    for name in names:
        module = importlib.import_module(FRAMEWORKS[name])
        if module.recognises(chunks, optimizer):
            training: Training = module.describe(chunks, optimizer, coordinates)
            return training
    return None


def _stepper_within(wrapper: object, chunks: Sequence[nn.Module]) -> Any:
    """Return the one optimizer of torch that an object of the script's own holds, if it steps the model itself."""
    inner = only_held(wrapper)
    own = {id(parameter) for chunk in chunks for parameter in chunk.parameters()}
    is_stepper = inner is not None and any(id(p) in own for group in inner.param_groups for p in group["params"])
    return unwrapped(inner) if is_stepper else None


def _refusal(names: Sequence[str], model: nn.Module, optimizer: object) -> str:
    held = held_optimizers(optimizer)
    several = ", each with the model that it steps, to a monitor of its own" if len(held) > 1 else ""
    instead = f"not the wrapper, but what it holds as {' and '.join('.' + name for name in held)}{several}"
    found, used = (f"{type(x).__module__}.{type(x).__qualname__}" for x in (model, optimizer))
    if isinstance(optimizer, Optimizer) and calls_no_hooks(optimizer):
        return (
            f"optimizer {used}: its __init__ does not call that of torch.optim.Optimizer, so no hook sees its steps; "
            + (f"pass {instead}" if held else "begin it with super().__init__(params, defaults)")
        )
    return (
        f"model {found} with optimizer {used}: this is not what {' or '.join(names)} training looks like; pass "
        "the model and the optimizer as the framework returned them, the one whose step() ends a training step"
        f"{': ' + instead if held else ''}"
    )
