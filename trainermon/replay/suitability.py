"""Which models can be replayed, and what is inside of their wrappers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainermon.dump.gradients import is_foreign
from trainermon.hooks.replayable import Replayable


class ModelStage(NamedTuple):
    """One root of a model that is replayed: the model, or one of its virtual pipeline stages.

    Attributes:
        entry: The module whose calls by the training loop are seen.
        called: The module that a replay calls.
        model: The user's own module inside of the wrappers, whose modules and parameters are watched.
        wrapper: DistributedDataParallel around all of it; None: there is none.
    """

    entry: nn.Module
    called: nn.Module
    model: nn.Module
    wrapper: nn.Module | None = None


def stage_of(root: nn.Module) -> ModelStage:
    """Return how to see and to repeat the calls of `root`, which may be in DistributedDataParallel or compiled."""
    entry, model = unwrap(root)
    return ModelStage(entry, model, model, root if isinstance(root, DistributedDataParallel) else None)


def unwrap(root: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return (the module whose hooks see the training loop's calls, the user's own model inside it)."""
    entry = root.module if isinstance(root, DistributedDataParallel) else root
    model = entry
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, DistributedDataParallel):
            inner = model.module
        if inner is None:
            return entry, model
        model = inner


def is_compiled(entry: nn.Module, model: nn.Module) -> bool:
    """Return whether a part of the model is compiled; never so where torch's compiler was not even loaded."""
    if "torch._dynamo" not in sys.modules:
        return False
    modules = [entry, *model.modules()]
    return any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in modules)


def refusal_of(stages: Sequence[ModelStage], replayable: Replayable) -> str:
    """Return why this model cannot be replayed, "" if it can."""
    return next(filter(None, (_refusal_of(stage, replayable) for stage in stages)), "")


def _refusal_of(stage: ModelStage, replayable: Replayable) -> str:
    if stage.entry._compiled_call_impl is not None:
        return "the model was compiled in place (model.compile()): its calls cannot be seen"
    if getattr(stage.wrapper, "mixed_precision", None) is not None:
        return "DistributedDataParallel's mixed precision changes the parameters during the forward"
    refusals = (_refusal_of_module(name or "the model", m, replayable) for name, m in stage.model.named_modules())
    return next(filter(None, refusals), "")


def _refusal_of_module(name: str, module: nn.Module, replayable: Replayable) -> str:
    kind = type(module).__name__
    own = list(module._parameters.values())
    if not replayable.shadowed:  # the parameters are the framework's
        acts = "a hook of the script's acts on gradients of {} as soon as they are reduced"
        return acts.format(name) if replayable.accumulates and any(map(_is_stepped_in_backward, own)) else ""
    if kind == "FullyShardedDataParallel" or (isinstance(module, nn.SyncBatchNorm) and not replayable.joint):
        return f"{name} is a {kind}, which communicates in its forward"
    if any(map(_is_placeholder, own)):
        return f"a parameter of {name} is sharded, not initialised, or on the meta device"
    return ""


def _is_stepped_in_backward(parameter: Any) -> bool:
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(map(is_foreign, hooks.values()))


def _is_placeholder(parameter: Any) -> bool:
    if parameter is None:
        return False
    return nn.parameter.is_lazy(parameter) or hasattr(parameter, "device_mesh") or parameter.device.type == "meta"
