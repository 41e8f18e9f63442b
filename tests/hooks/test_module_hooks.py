"""Hooks on modules are called as those of torch's own handles are: with the same, in the same order with others."""

import pytest
import torch
from torch import nn

from trainermon.hooks.module_hooks import hook_forward, unhook_forward


class Doubled(nn.Module):
    def forward(self, x, *, shift=0.0):
        if shift is None:
            raise ValueError("no shift")
        return 2 * x + shift


def hook_by_torch(module, before, behind):
    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(behind, always_call=True)


def calls_of(hook, **kwargs):
    """Return what hooks put on by `hook`, between two others, are called with."""
    module = Doubled()
    seen: list[object] = []
    module.register_forward_pre_hook(lambda *given: seen.append(("other before", given[1:])))
    module.register_forward_hook(lambda *given: seen.append(("other behind", given[1:])))
    hook(
        module,
        lambda *given: seen.append(("before", given[0] is module, given[1:])),
        lambda *given: seen.append(("behind", given[0] is module, given[1:])),
    )
    module.register_forward_pre_hook(lambda *given: seen.append(("last before", given[1:])))
    module.register_forward_hook(lambda *given: seen.append(("last behind", given[1:])))
    try:
        module(torch.ones(1), **kwargs)
    except ValueError as error:
        seen.append(str(error))
    return seen


@pytest.mark.parametrize("kwargs", [{}, {"shift": 1.0}, {"shift": None}])
def test_they_are_called_as_by_torch_also_where_the_forward_raises(kwargs):
    ours, torchs = calls_of(hook_forward, **kwargs), calls_of(hook_by_torch, **kwargs)

    assert ours == torchs
    assert [call[0] for call in ours].count("behind") == 1


def test_taken_off_they_leave_nothing_and_those_of_others_stay():
    module = Doubled()
    seen: list[object] = []
    other = module.register_forward_hook(lambda *_: seen.append("other"))
    before, behind = (lambda *_: seen.append("before")), (lambda *_: seen.append("behind"))
    hook_forward(module, before, behind)
    unhook_forward(module, before, behind)
    unhook_forward(module, before, behind)

    module(torch.ones(1))

    assert seen == ["other"]
    other.remove()
    assert not module._forward_pre_hooks
    assert not module._forward_pre_hooks_with_kwargs
    assert not module._forward_hooks
    assert not module._forward_hooks_always_called


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_module_which_torch_gives_no_handles_is_hooked_too():
    module, seen = torch.jit.script(nn.Linear(3, 2)), []
    x = torch.ones(1, 3)
    hook_forward(module, lambda *given: seen.append(given[1:]), lambda *given: seen.append(given[1:]))

    output = module(x)

    assert seen == [((x,), {}), ((x,), output)]
