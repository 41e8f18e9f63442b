"""Which models one rank can replay alone, and what is inside of their wrappers."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def unwrap(root: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return the module whose hooks see the training loop's calls, and the user's own model inside."""
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


def refusal_of(root: nn.Module, entry: nn.Module, model: nn.Module) -> str:
    """Return why this model cannot be replayed by one rank alone, "" if it can."""
    if entry._compiled_call_impl is not None:
        return "the model was compiled in place (model.compile()): its calls cannot be seen"
    if isinstance(root, DistributedDataParallel) and getattr(root, "mixed_precision", None) is not None:
        return "DistributedDataParallel's mixed precision changes the parameters during the forward"
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.SyncBatchNorm) or kind == "FullyShardedDataParallel":
            return f"{name or 'the model'} is a {kind}, which communicates in its forward"
        if any(_is_placeholder(parameter) for parameter in module._parameters.values()):
            return f"a parameter of {name or 'the model'} is sharded, not initialised, or on the meta device"
    return ""


def _is_placeholder(parameter: Any) -> bool:
    if parameter is None:
        return False
    return nn.parameter.is_lazy(parameter) or hasattr(parameter, "device_mesh") or parameter.device.type == "meta"
