"""Activations and norms over many magnitudes: torch's own kernels are sound, and a hundredth more is wrong."""

import pytest
import torch
from torch.nn import functional

from trainermon.accuracy.calls import OperationCall
from trainermon.accuracy.families import family_of
from trainermon.accuracy.judge import Status, judge_call, judge_gradient
from trainermon.accuracy.products import BackwardCall, GradientSum, VectorProduct, gradients_on

FUNCTIONS = [
    *((name, getattr(functional, name), {}) for name in ("gelu", "silu", "mish", "softplus", "elu", "selu", "celu")),
    *((name, getattr(functional, name), {}) for name in ("hardswish", "logsigmoid")),
    *((name, getattr(torch, name), {}) for name in ("tanh", "sigmoid", "erf")),
    ("gelu", functional.gelu, {"approximate": "tanh"}),
    ("softmax", functional.softmax, {"dim": -1}),
    ("log_softmax", functional.log_softmax, {"dim": -1}),
    ("layer_norm", functional.layer_norm, {"normalized_shape": (64,)}),
    ("rms_norm", functional.rms_norm, {"normalized_shape": (64,)}),
    ("group_norm", functional.group_norm, {"num_groups": 8}),
]
# where terms cancel, an exponential overflows, a tangent becomes one
HARD = [
    -0.7517916,
    -0.75,
    -5.06,
    -5.16,
    -88.8,
    -89.33,
    -103.0,
    1.8e-7,
    -1e-40,
    17.3,
    0.0,
    88.9,
    -14.0,
    9.1,
    1e-3,
    -87.4,
]


def inputs(dtype, magnitude, hard=HARD):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, 64, generator=generator) * magnitude
    x[0, : len(hard)] = torch.tensor(hard)
    return x.to(dtype), torch.randn(120, 64, generator=generator).to(dtype)


def judge_backward(name, call, gradient, factor=1.0):
    backward = BackwardCall(call, [gradient], family_of(name), [0])
    [found] = gradients_on(backward, "cpu")
    return judge_gradient(found * factor, GradientSum([(VectorProduct(backward), 0)], call.args[0]), backward.coarsest)


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "function", "options"), FUNCTIONS)
def test_torchs_own_is_no_error(name, function, options, dtype, magnitude):
    x, gradient = inputs(dtype, magnitude)
    call = OperationCall(function, [x], options)

    [forward] = judge_call(name, call, function(x, **options))
    backward = judge_backward(name, call, gradient)

    assert forward.status is not Status.ERROR, (forward.reason, forward.worst)
    assert backward.status is not Status.ERROR, (backward.reason, backward.worst)


@pytest.mark.parametrize(("name", "function", "options"), FUNCTIONS)
def test_a_hundredth_more_is_an_error(name, function, options):
    x, gradient = inputs(torch.float32, 1.0, hard=[])
    call = OperationCall(function, [x], options)

    [forward] = judge_call(name, call, function(x, **options) * 1.01)
    backward = judge_backward(name, call, gradient, 1.01)

    assert (forward.status, backward.status) == (Status.ERROR, Status.ERROR)
    assert min(forward.worst, backward.worst) > 10
