"""Moments computed once more, by numpy in float64: the truth that statistics are held against."""

import torch

from tests.moments import numpy_moments
from trainermon.core.values import Moments


def reference(tensor: torch.Tensor) -> Moments:
    """Return the moments of a tensor of any dtype, computed by numpy in float64."""
    return Moments(*numpy_moments(tensor.detach().to(torch.float64).numpy()).tolist())


def assert_equal(found: Moments, tensor: torch.Tensor) -> None:
    """Fail unless counts and extrema are exact, the norm within 1e-6 and the sum within 1e-6 of the magnitudes."""
    expected = reference(tensor)
    exact = ("count", "min", "max", "zeros", "nans", "infs")
    assert {name: getattr(found, name) for name in exact} == {name: getattr(expected, name) for name in exact}
    values = tensor.detach().to(torch.float64)
    magnitude = float(values[values.isfinite()].abs().sum())
    assert abs(found.sum - expected.sum) <= 1e-6 * magnitude
    assert abs(found.norm - expected.norm) <= 1e-6 * expected.norm
