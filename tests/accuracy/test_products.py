"""How far a gradient may be off: truth is autograd in float64, and the fault that was planted."""

import pytest
import torch
from torch.nn import functional

from trainermon.accuracy.calls import OperationCall
from trainermon.accuracy.families import family_of
from trainermon.accuracy.products import BackwardCall, VectorProduct

UNIT = 2.0**-24


def product_of(name, function, tensors, gradient):
    call = OperationCall(function, tensors, {})
    return VectorProduct(BackwardCall(call, [gradient], family_of(name), range(len(tensors))))


def excess(product, number, found, unit=UNIT):
    """Return how many times what is allowed the worst element of a gradient is off."""
    allowed = product.allowed(number, unit) + 1e-30
    return float(((found.double() - product.results[number]).abs() / allowed).max())


def test_a_gradient_that_is_only_passed_on_may_not_grow():
    torch.manual_seed(0)
    tensor, gradient = torch.randn(40, 30), torch.randn(40, 30)
    product = product_of("relu", torch.relu, [tensor], gradient)

    sound = gradient * (tensor > 0)
    assert excess(product, 0, sound) == 0
    assert excess(product, 0, sound * (1 + 64 * UNIT)) > 1
    assert excess(product, 0, gradient) > 1e6  # also of what was below zero


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sum_that_cancels_is_allowed_the_rounding_of_its_terms(dtype):
    """The gradient of a bias is summed over rows, in the order of the rows, in its own type."""
    torch.manual_seed(1)
    tensor, bias, gradient = torch.randn(512, 8), torch.randn(8), torch.randn(512, 8)
    gradient -= gradient.mean(0)
    product = product_of("add", torch.add, [tensor, bias], gradient)
    total = torch.zeros(8, dtype=dtype)
    for row in gradient:
        total += row.to(dtype)

    unit = torch.finfo(dtype).eps / 2
    assert excess(product, 1, total, unit) < 1
    assert excess(product, 1, total + 600 * unit * gradient.norm(dim=0), unit) > 1


def test_a_mask_of_the_least_number_of_its_type_hides_no_fault():
    torch.manual_seed(2)
    query, key, value, gradient = (torch.randn(2, 2, 6, 8) for _ in range(4))
    mask = torch.full((2, 2, 6, 6), torch.finfo(torch.float32).min).triu(1)
    attend = functional.scaled_dot_product_attention
    product = product_of("scaled_dot_product_attention", attend, [query, key, value, mask], gradient)

    taken = query.requires_grad_(), key.requires_grad_(), value.requires_grad_()
    found = torch.autograd.grad(attend(query, key, value, mask), taken, gradient)
    for number, one in enumerate(found):
        assert excess(product, number, one) < 1
        assert excess(product, number, one * 1.001) > 1


@pytest.mark.parametrize(("form", "other"), [("none", "tanh"), ("tanh", "none")])
def test_the_derivative_of_gelu_is_rounded_at_one_where_it_cancels(form, other):
    """For negative numbers 1 + erf and 1 - tanh^2 keep the rounding of 1; a wrong formula is far beyond that."""
    torch.manual_seed(3)
    tensor, gradient = torch.randn(256, 256) * 3, torch.randn(256, 256)
    call = OperationCall(functional.gelu, [tensor], {"approximate": form})
    product = VectorProduct(BackwardCall(call, [gradient], family_of("gelu"), [0]))

    def backward(approximate):
        return torch.ops.aten.gelu_backward(gradient, tensor, approximate=approximate)

    assert excess(product, 0, backward(form)) < 1
    assert excess(product, 0, backward(other)) > 10
    assert excess(product, 0, backward(form) * 1.01) > 10
    assert excess(product, 0, gradient * torch.special.ndtr(tensor)) > 10
