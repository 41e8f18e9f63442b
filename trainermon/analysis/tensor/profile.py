"""What is in a tensor: moments, extremes and non-finite elements with their positions, in bounded memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trainermon.analysis.tensor.dtypes import magnitudes
from trainermon.analysis.tensor.files import StoredTensor
from trainermon.analysis.tensor.index import IndexPart
from trainermon.statistics.pairs import norm_of

MAX_POSITIONS = 6
# Of longer dimensions it is not noted which indices hold what is not finite.
_MAX_TRACKED = 1 << 20
_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementPlace:
    """One element of a tensor.

    Attributes:
        position: Its index in each dimension of the whole tensor.
        value: Its value.
    """

    position: tuple[int, ...]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSpread:
    """How widely NaN and Inf are spread along one dimension of a tensor.

    Attributes:
        dim: The dimension.
        size: Its length.
        indices: Number of its indices at which there is such an element.
        first: The first of these indices.
    """

    dim: int
    size: int
    indices: int
    first: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorProfile:
    """The statistics of a tensor, and where its NaNs and Infs are.

    Extremes and moments (`min`, `max`, `mean`, `std`, `rms`, `norm`) are over finite elements, None without any; of
    complex numbers they are of the magnitudes. `count`, `nans`, `positive_infs`, `negative_infs` and `zeros` are
    numbers of elements. `bad` are the first positions of non-finite elements, `spread` tells for each dimension over
    how many indices they are spread (none of a tensor of one dimension, or of a dimension of more than a million).
    """

    label: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    nans: int
    positive_infs: int
    negative_infs: int
    zeros: int
    min: ElementPlace | None
    max: ElementPlace | None
    mean: float | None
    std: float | None
    rms: float | None
    norm: float | None
    bad: tuple[ElementPlace, ...] = ()
    spread: tuple[IndexSpread, ...] = ()

    @property
    def finite(self) -> int:
        """Number of finite elements."""
        return self.count - self.nans - self.infs

    @property
    def infs(self) -> int:
        """Number of infinite elements."""
        return self.positive_infs + self.negative_infs


@dataclass(slots=True)
class _ChunkSums:
    """What is known of all chunks so far, in float64."""

    shape: tuple[int, ...]
    count: int = 0
    nans: int = 0
    positive: int = 0
    negative: int = 0
    zeros: int = 0
    total: float = 0.0
    norm: float = 0.0
    low: tuple[float, int] | None = None
    high: tuple[float, int] | None = None
    bad: list[tuple[int, float]] = field(default_factory=list)
    hits: dict[int, npt.NDArray[np.bool_]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.shape) > 1:
            self.hits = {dim: np.zeros(size, bool) for dim, size in enumerate(self.shape) if size <= _MAX_TRACKED}

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Take in the next chunk of elements."""
        finite = np.isfinite(values)
        self.zeros += int(values.size - np.count_nonzero(values))
        if finite.all():
            self._add_finite(values, None)
        else:
            self._add_bad(values, np.flatnonzero(~finite))
            if finite.any():
                self._add_finite(values[finite], finite)
        self.count += values.size

    def _add_finite(self, values: npt.NDArray[np.float64], mask: _Mask | None) -> None:
        self.total += float(values.sum())
        self.norm = math.hypot(self.norm, norm_of(values))
        low, high = int(values.argmin()), int(values.argmax())
        if self.low is None or values[low] < self.low[0]:
            self.low = (float(values[low]), self._place(low, mask))
        if self.high is None or values[high] > self.high[0]:
            self.high = (float(values[high]), self._place(high, mask))

    def _place(self, index: int, mask: _Mask | None) -> int:
        return self.count + (index if mask is None else int(np.flatnonzero(mask)[index]))

    def _add_bad(self, values: npt.NDArray[np.float64], places: npt.NDArray[np.intp]) -> None:
        found = values[places]
        self.nans += int(np.count_nonzero(np.isnan(found)))
        self.positive += int(np.count_nonzero(found == math.inf))
        self.negative += int(np.count_nonzero(found == -math.inf))
        room = MAX_POSITIONS - len(self.bad)
        self.bad += [(self.count + int(place), float(values[place])) for place in places[:room]]
        if self.hits:
            for dim, indices in enumerate(np.unravel_index(places + self.count, self.shape)):
                if dim in self.hits:
                    self.hits[dim][indices] = True


def profile(tensor: StoredTensor, part: IndexPart | None = None) -> TensorProfile:
    """Compute the statistics of `tensor`, or of a `part` of it; positions are always those in the whole tensor."""
    seen = tensor if part is None else tensor.part(part.index)
    sums = _ChunkSums(seen.shape)
    with np.errstate(over="ignore"):
        for chunk in seen.chunks():
            sums.add(magnitudes(chunk))
    return _finish(sums, seen, part)


def _finish(sums: _ChunkSums, tensor: StoredTensor, part: IndexPart | None) -> TensorProfile:
    def place(found: tuple[float, int] | None) -> ElementPlace | None:
        if found is None:
            return None
        return ElementPlace(position=position_of(found[1], tensor.shape, part), value=found[0])

    finite = sums.count - sums.nans - sums.positive - sums.negative
    mean = sums.total / finite if finite else None
    rms = sums.norm / math.sqrt(finite) if finite else None
    return TensorProfile(
        label=tensor.label,
        dtype=tensor.kind,
        shape=tensor.shape,
        count=sums.count,
        nans=sums.nans,
        positive_infs=sums.positive,
        negative_infs=sums.negative,
        zeros=sums.zeros,
        min=place(sums.low),
        max=place(sums.high),
        mean=mean,
        std=_std(tensor, mean) if mean is not None else None,
        rms=rms,
        norm=sums.norm if finite else None,
        bad=tuple(
            ElementPlace(position=position_of(flat, tensor.shape, part), value=value) for flat, value in sums.bad
        ),
        spread=tuple(_spread(sums, part)) if sums.bad else (),
    )


def _std(tensor: StoredTensor, mean: float) -> float:
    """Return the standard deviation by a second pass, which loses nothing where the mean is large against it."""
    norm, count = 0.0, 0
    with np.errstate(over="ignore"):
        for chunk in tensor.chunks():
            values = magnitudes(chunk)
            finite = values[np.isfinite(values)] - mean
            norm = math.hypot(norm, norm_of(finite))
            count += finite.size
    return norm / math.sqrt(count)


def _spread(sums: _ChunkSums, part: IndexPart | None) -> list[IndexSpread]:
    ranges: list[Any] = [range(size) for size in sums.shape]
    numbers = list(range(len(sums.shape)))
    if part is not None:
        kept = [(number, dim) for number, dim in enumerate(part.dims) if isinstance(dim, range)]
        numbers, ranges = [number for number, _ in kept], [dim for _, dim in kept]
    found = []
    for dim, hits in sums.hits.items():
        indices = np.flatnonzero(hits)
        first = tuple(ranges[dim][int(index)] for index in indices[:MAX_POSITIONS])
        found.append(IndexSpread(dim=numbers[dim], size=len(hits), indices=len(indices), first=first))
    return found


def position_of(flat: int, shape: tuple[int, ...], part: IndexPart | None = None) -> tuple[int, ...]:
    """Return the index, in each dimension of the whole tensor, of element number `flat` in C order.

    `shape` is that of the tensor, or of its `part`.
    """
    position = tuple(int(index) for index in np.unravel_index(flat, shape)) if shape else ()
    return part.whole(position) if part is not None else position
