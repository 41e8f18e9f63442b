"""Tells a forward that trains from one that only looks at the model."""

from __future__ import annotations

import torch

_FAKE, _PROXY = torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY


def is_transformed() -> bool:
    """Return whether a function transform of torch.func (vmap, grad …) is running. 0.1 us."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_traced() -> bool:
    """Return whether a forward now only traces the model: torch.jit, torch.func, fake tensors, export.

    A torch call of ours in there would become part of what is recorded. Half a microsecond, once per forward of a root.
    """
    return (
        torch._C._get_tracing_state() is not None
        or is_transformed()
        or (torch._C._len_torch_dispatch_stack() > 0 and _is_faked())
    )


def _is_faked() -> bool:
    return any(torch._C._get_dispatch_mode(key) is not None for key in (_FAKE, _PROXY))
