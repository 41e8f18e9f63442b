"""Hooks on tensors see what those of `Tensor.register_hook` see, in the same order with them."""

import weakref

import pytest
import torch
from torch import nn

from trainermon.hooks.tensor_hooks import hook_gradient


class Marked(torch.Tensor):
    """A tensor of a subclass, as those of users are."""


@pytest.fixture(params=[torch.Tensor, Marked])
def output(request):
    torch.manual_seed(0)
    return nn.Linear(3, 2)(torch.randn(4, 3)).as_subclass(request.param)


def test_the_gradient_is_that_which_torch_hands_to_its_own_hooks_in_the_order_of_all(output):
    seen = []
    output.register_hook(lambda gradient: seen.append(("first", gradient.clone())))
    hook_gradient(output, lambda gradient: seen.append(("ours", gradient.clone())))
    output.register_hook(lambda gradient: seen.append(("last", gradient.clone())))

    output.square().sum().backward()

    assert [name for name, _ in seen] == ["first", "ours", "last"]
    expected = 2 * output.detach().as_subclass(torch.Tensor)
    assert all(torch.equal(gradient.as_subclass(torch.Tensor), expected) for _, gradient in seen)


def test_several_on_one_tensor_are_called_and_what_one_returns_replaces_the_gradient(output):
    seen = []
    hook_gradient(output, lambda gradient: gradient * 3)
    hook_gradient(output, seen.append)

    output.sum().backward()

    assert torch.equal(seen[0].as_subclass(torch.Tensor), torch.full((4, 2), 3.0))


def test_a_handle_of_torch_removes_its_own_hook_only(output):
    seen = []
    handle = output.register_hook(lambda _: seen.append("torch's"))
    hook_gradient(output, lambda _: seen.append("ours"))
    handle.remove()

    output.sum().backward()

    assert seen == ["ours"]


def test_nothing_is_left_when_the_tensor_is_gone():
    class Hook:
        def __call__(self, gradient):
            pass

    tensor, hook = nn.Linear(1, 1)(torch.ones(1)), Hook()
    hook_gradient(tensor, hook)
    gone = weakref.ref(hook)
    del hook
    assert gone() is not None

    del tensor
    assert gone() is None


def leaf_of(kind: type[torch.Tensor]) -> torch.Tensor:
    return nn.Parameter(torch.ones(3)) if kind is nn.Parameter else torch.ones(3).as_subclass(kind).requires_grad_()


@pytest.fixture(params=[torch.Tensor, nn.Parameter, Marked, "view"])
def parameter(request):
    """A leaf of a type, or what FSDP1 puts in the place of a parameter: a part of a flat one, which is no leaf."""
    return nn.Parameter(torch.ones(5))[1:4] if request.param == "view" else leaf_of(request.param)


@pytest.mark.parametrize("is_first", [True, False])
def test_hooks_on_a_parameter_are_called_in_the_order_of_all_until_they_are_taken_off(parameter, is_first):
    seen: list[object] = []
    first = None if is_first else parameter.register_hook(lambda _: seen.append("torch's"))
    take_off = hook_gradient(parameter, lambda gradient: seen.append(gradient.sum().item()))
    hook_gradient(parameter, lambda gradient: gradient * 2)
    hook_gradient(parameter, lambda gradient: seen.append(gradient.sum().item()))

    (parameter * 5).sum().backward()
    assert seen == [*([] if is_first else ["torch's"]), 15, 30]

    seen.clear()
    take_off()
    if first is not None:
        first.remove()
    (parameter * 5).sum().backward()
    assert seen == [30]


def test_a_hook_can_be_taken_off_twice_and_after_its_leaf():
    leaf = leaf_of(nn.Parameter)
    take_off = hook_gradient(leaf, lambda _: None)

    take_off()
    take_off()
    assert not leaf._backward_hooks
    del leaf
    take_off()
