"""A tensor of which several ranks have dumped parts, put together when it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorAssembly:
    """A tensor that is split over ranks, and how to put it together from the parts' files.

    Attributes:
        parts: Files of the parts in order, or assemblies themselves.
        dim: The dimension along which they are joined; None: they are summed.
        stride: Each part has this many blocks along it, which alternate with those of the others: in a gated MLP all
            gates come before all that they gate.
        scale: Every element is multiplied by it.
    """

    parts: tuple[Path | TensorAssembly, ...]
    dim: int | None = None
    stride: int = 1
    scale: float = 1.0

    def whole(self, read: Callable[[Path], Array]) -> Array:
        """Return the whole tensor as a numpy array in float64 or complex128; `read` loads a part's file.

        Holds all parts in memory.
        """
        arrays = [part.whole(read) if isinstance(part, TensorAssembly) else read(part) for part in self.parts]
        if self.dim is None:
            whole: Array = np.asarray(np.sum(arrays, axis=0))  # of single numbers, numpy makes one that is no array
        else:
            blocks = [np.split(array, self.stride, axis=self.dim) for array in arrays]
            whole = np.concatenate([block[i] for i in range(self.stride) for block in blocks], axis=self.dim)
        return whole if self.scale == 1.0 else np.asarray(whole * self.scale)
