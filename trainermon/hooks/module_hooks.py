"""Hooks on the forward of modules, without the handles of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def hook_forward(module: nn.Module, before: Callable[..., Any], behind: Callable[..., Any]) -> None:
    """Have `before(module, args, kwargs)` and `behind(module, args, output)` called around each forward of `module`.

    Does what `register_forward_pre_hook(before, with_kwargs=True)` and `register_forward_hook(behind,
    always_call=True)` do, in the same order with others, but for the handles, which take most of the time: see
    `tensor_hooks.hook_gradient`. Modules that torch has scripted or traced are
    hooked, too, which torch refuses. Both objects must be hooks of no other kind on this module. Cost: 1 µs.
    """
    module._forward_pre_hooks[id(before)] = before
    module._forward_pre_hooks_with_kwargs[id(before)] = True
    module._forward_hooks[id(behind)] = behind
    module._forward_hooks_always_called[id(behind)] = True


def unhook_forward(module: nn.Module, before: Callable[..., Any], behind: Callable[..., Any]) -> None:
    """Take off what `hook_forward` has put on; what is not there any more is no error."""
    module._forward_pre_hooks.pop(id(before), None)
    module._forward_pre_hooks_with_kwargs.pop(id(before), None)
    module._forward_hooks.pop(id(behind), None)
    module._forward_hooks_always_called.pop(id(behind), None)
