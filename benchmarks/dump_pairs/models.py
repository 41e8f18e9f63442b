"""A family's model in a variant: its precision, its attention, its names, and a step of it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.dump_pairs.cases import Variant
from benchmarks.families.catalogue import COMPARED
from benchmarks.families.family import Batch

RENAMED = "renamed_part"
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "autocast": torch.float32}
_SHIFT = 0.03


class Wrapped(nn.Module):
    """Holds a model as `module`, as DDP does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A model and a batch; `mapping` gives the golden name of what was renamed."""

    model: nn.Module
    batch: Batch
    mapping: dict[str, str]


def prepare(family: str, variant: Variant) -> Prepared:
    """Return the model with weights that are no longer those it began with, and a batch; no dropout is left in it."""
    kind = COMPARED[family]
    torch.manual_seed(1)
    model = kind.build().train()
    _without_dropout(model)
    draws = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += _SHIFT * torch.randn(parameter.shape, generator=draws)
    if variant.attention:
        model.set_attn_implementation(variant.attention)  # type: ignore[operator]
    dtype = _DTYPES[variant.precision]
    model = model.to(dtype)
    if hasattr(model, "rival"):
        model.rival[0].to(dtype)
    batch = {name: _converted(value, dtype) for name, value in kind.draw(draws).items()}
    mapping = _rename(model) if variant.renamed else {}
    if variant.extra:
        _add_nothing(model)
    return Prepared(model=Wrapped(model) if variant.wrapped else model, batch=batch, mapping=mapping)


def step(family: str, variant: Variant, prepared: Prepared) -> None:
    """Run the forward and the backward."""
    torch.manual_seed(3)
    with contextlib.ExitStack() as stack:
        if not variant.kernels:
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        if variant.precision == "autocast":
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        loss = COMPARED[family].loss(prepared.model, prepared.batch)
    loss.backward()  # type: ignore[no-untyped-call]


def leaves(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that have parameters of their own, by name."""
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            yield name, module


def _without_dropout(model: nn.Module) -> None:
    """Two ways to compute the same draw other random numbers."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _converted(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _rename(model: nn.Module) -> dict[str, str]:
    """Give the last child that holds other modules, or else the last, another name; code still finds the old one."""
    names = [name for name, child in model.named_children() if any(child.children())] or list(model._modules)
    name = names[-1]
    child = model._modules.pop(name)
    model._modules[RENAMED] = child
    vars(model)[name] = child
    return {RENAMED: name}


def _add_nothing(model: nn.Module) -> None:
    """Add zero to what a linear or convolution in the first half returns."""
    found = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d | nn.Conv1d)]
    found = found or [module for _, module in leaves(model)]
    module = found[len(found) // 3]
    inner = module.forward
    module.forward = lambda *args, **kwargs: inner(*args, **kwargs) + 0.0
