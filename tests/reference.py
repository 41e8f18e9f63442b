"""Moments computed once more, by numpy in float64: the truth that statistics are held against."""

import numpy as np
import torch

from trainermon.core.values import Moments


def reference(tensor: torch.Tensor) -> Moments:
    """Return the moments of a tensor of any dtype, computed by numpy in float64."""
    values = tensor.detach().to(torch.float64).numpy().ravel()
    finite = values[np.isfinite(values)]
    return Moments(
        float(values.size),
        float(finite.min(initial=np.inf)),
        float(finite.max(initial=-np.inf)),
        float(finite.sum()),
        float(np.square(finite).sum()),
        float((values == 0).sum()),
        float(np.isnan(values).sum()),
        float(np.isinf(values).sum()),
    )


def assert_equal(found: Moments, tensor: torch.Tensor) -> None:
    """Fail unless counts and extrema are exact, the norm within 1e-6 and the sum within 1e-6 of the magnitudes."""
    expected = reference(tensor)
    exact = ("count", "min", "max", "zeros", "nans", "infs")
    assert {name: getattr(found, name) for name in exact} == {name: getattr(expected, name) for name in exact}
    values = tensor.detach().to(torch.float64)
    magnitude = float(values[values.isfinite()].abs().sum())
    assert abs(found.sum - expected.sum) <= 1e-6 * magnitude
    assert abs(found.norm - expected.norm) <= 1e-6 * expected.norm
