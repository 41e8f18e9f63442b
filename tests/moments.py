"""The eight moments by numpy in float64, for tests with torch or without."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def numpy_moments(elements: NDArray[np.floating] | Sequence[float]) -> NDArray[np.float64]:
    """Return the moments of an array of any shape, or of a list, in the order of `Moments`."""
    values = np.asarray(elements, np.float64).ravel()
    finite = values[np.isfinite(values)]
    return np.array(
        [
            values.size,
            finite.min(initial=np.inf),
            finite.max(initial=-np.inf),
            finite.sum(),
            np.square(finite).sum(),
            (values == 0).sum(),
            np.isnan(values).sum(),
            np.isinf(values).sum(),
        ]
    )
