"""How far two dumped tensors are apart, element by element, in one pass over both and in bounded memory.

Files of torch are mapped and read with `weights_only`, those of numpy without pickles. Sums are in float64.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainermon.analysis.compare.frameworks import dtype_name
from trainermon.analysis.compare.items import DumpRow, DumpRows
from trainermon.analysis.compare.merging.assembly import TensorAssembly
from trainermon.analysis.compare.metrics import DumpRowDifference, ItemPair, is_discrete, relative_size
from trainermon.analysis.compare.noise import LARGEST, ROUNDOFF
from trainermon.core.errors import DumpError
from trainermon.statistics.pairs import cosine_of, norm_of

CHUNK = 1 << 13
"""Elements that are looked at together: 64 KiB in float64. With twice as many, each array costs page faults."""

_LEAST_EXPONENT = {
    "float64": -1021,
    "float32": -125,
    "tf32": -125,
    "bfloat16": -125,
    "float16": -13,
    "float8_e4m3fn": -5,
    "float8_e4m3fnuz": -6,
    "float8_e5m2": -13,
    "float8_e5m2fnuz": -14,
    "float8_e8m0fnu": -126,
    "float4_e2m1fn_x2": 1,
    "complex32": -13,
    "complex64": -125,
    "complex128": -1021,
}
"""Exponent of the smallest normal number, with a mantissa from 0.5 to 1 as `frexp` has it. Below, none lie closer."""

_EPS = float(np.finfo(np.float32).eps)
_LEAST_LIMIT = min(LARGEST.values()) / 2
_NUM_COLUMNS = 11
_WAITING_PER_THREAD = 8
_Array = npt.NDArray[np.float64]


@dataclass(slots=True)
class FiniteSums:
    """Sums over the elements of two tensors that are finite on both sides, chunk by chunk.

    The metrics are made of them.

    Attributes:
        count: Number of elements.
        norm: The target's.
        golden_norm: The golden tensor's.
        distance: Norm of the difference.
        largest: Largest absolute difference.
        largest_share: Largest difference relative to the golden element.
        sum_share: Sum of the relative differences.
        below_thousandth: Elements whose relative difference is below 0.001.
        below_five_thousandths: Those below 0.005.
        ulps: Largest difference in units in the last place.
    """

    count: int = 0
    norm: float = 0.0
    golden_norm: float = 0.0
    distance: float = 0.0
    largest: float = 0.0
    largest_share: float = 0.0
    sum_share: float = 0.0
    below_thousandth: int = 0
    below_five_thousandths: int = 0
    ulps: float = 0.0

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between both sides, 1 for two zero vectors; None where only one is zero."""
        return cosine_of(self.norm, self.golden_norm, self.distance)

    def add(self, ours: _Array, theirs: _Array, dtype: str) -> None:
        """Add one chunk of both tensors, not empty; units in the last place are those of `dtype`, if it has such."""
        gap, size = np.abs(ours - theirs), np.abs(theirs)
        share = gap / np.where(size > 0, size, _EPS)
        self.count += ours.size
        self.norm = math.hypot(self.norm, norm_of(ours))
        self.golden_norm = math.hypot(self.golden_norm, norm_of(theirs))
        self.distance = math.hypot(self.distance, norm_of(gap))
        self.largest = max(self.largest, float(gap.max()))
        self.largest_share = max(self.largest_share, float(share.max()))
        self.sum_share += float(share.sum())
        self.below_thousandth += int(np.count_nonzero(share < 1e-3))
        self.below_five_thousandths += int(np.count_nonzero(share < 5e-3))
        if dtype in ROUNDOFF:
            _, exponent = np.frexp(np.maximum(size, np.abs(ours)))
            place = np.ldexp(ROUNDOFF[dtype], np.maximum(exponent, _LEAST_EXPONENT[dtype]))
            self.ulps = max(self.ulps, float((gap / place).max()))


@dataclass(slots=True)
class ElementSums:
    """Sums and counts over all elements of two tensors, chunk by chunk.

    Attributes:
        finite: Sums over the positions that are finite on both sides.
        nonfinite: The target's elements that are NaN or infinite.
        golden_nonfinite: The golden tensor's.
        differing: Positions at which the two are not equal.
    """

    finite: FiniteSums = field(default_factory=FiniteSums)
    nonfinite: int = 0
    golden_nonfinite: int = 0
    differing: int = 0

    def add(self, ours: _Array, theirs: _Array, dtype: str, our_dtype: str = "") -> None:
        """Add one chunk of both tensors; units in the last place are those of `dtype`, if it has such.

        Where both have the limits of their types (`dtype`, `our_dtype`), as a mask does, they are equal.
        """
        if ours.size and max(_reach(ours), _reach(theirs)) >= _LEAST_LIMIT:
            limits = _limits(ours, our_dtype or dtype) & _limits(theirs, dtype) & ((ours > 0) == (theirs > 0))
            ours, theirs = ours[~limits], theirs[~limits]
        finite, their_finite = np.isfinite(ours), np.isfinite(theirs)
        self.nonfinite += int(ours.size - np.count_nonzero(finite))
        self.golden_nonfinite += int(theirs.size - np.count_nonzero(their_finite))
        both = finite & their_finite
        if not both.all():
            same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
            self.differing += int(np.count_nonzero(~both & ~same))
            ours, theirs = ours[both], theirs[both]
        if ours.size:
            self.finite.add(ours, theirs, dtype)

    def difference(self) -> DumpRowDifference:
        """Return the difference of the two tensors: its relative size, and the cells of the result table."""
        sums = self.finite
        norm, golden_norm, distance = sums.norm, sums.golden_norm, sums.distance
        share = [
            part / sums.count if sums.count else 1.0 for part in (sums.below_thousandth, sums.below_five_thousandths)
        ]
        mean_share = sums.sum_share / sums.count if sums.count else 0.0
        ratio = norm / golden_norm if golden_norm else 1.0 if not norm else math.inf
        msprobe = (sums.cosine, distance, sums.largest, sums.largest_share, *share)
        ours = (mean_share, sums.ulps, ratio, self.nonfinite, self.golden_nonfinite)
        size = math.nan if self.differing else distance / max(norm, golden_norm) if distance else 0.0
        return DumpRowDifference(size, (*msprobe, *ours), norm=max(norm, golden_norm))


def tensor_differences(
    pairs: Sequence[ItemPair], *, target: DumpRows, golden: DumpRows, threads: int = 1
) -> Iterator[DumpRowDifference]:
    """Yield for each pair of rows how far the elements of their tensors are apart (`tensor_difference`), in order.

    `threads` read and compute at a time, as numpy holds no lock meanwhile; few tensors are in memory at any time.
    """
    with warnings.catch_warnings(), ThreadPoolExecutor(threads) as pool:
        # Who made such tensors was told of them; whoever compares them can do nothing about it.
        warnings.filterwarnings("ignore", module=r"torch\b")
        waiting: deque[Future[DumpRowDifference]] = deque()
        for ours, theirs in pairs:
            waiting.append(pool.submit(tensor_difference, ours, theirs, target=target, golden=golden))
            if len(waiting) > _WAITING_PER_THREAD * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def tensor_difference(ours: DumpRow, theirs: DumpRow, *, target: DumpRows, golden: DumpRows) -> DumpRowDifference:
    """Return how far the tensors of two rows are apart; where one was not dumped, what the statistics tell.

    Elements that are NaN, or the same infinity, on both sides are equal. With other non-finite ones the size is NaN,
    and the columns are those of the remaining elements. Of tensors that torch loads, but cannot make numbers of, the
    statistics tell, too; and where a file is missing or damaged, or does not hold what its dump says, which `unread` of
    the difference says.

    Raises:
        DumpError: a file is one of torch, and torch is not installed.
    """
    path, their_path = target.tensor_path(ours), golden.tensor_path(theirs)
    by_statistics = DumpRowDifference(relative_size(ours, theirs), (None,) * _NUM_COLUMNS)
    if path is None or their_path is None or ours.shape != theirs.shape:
        return by_statistics
    try:
        flat, their_flat = _flat_pair((path, their_path), (ours, theirs))
    except UnreadTensorError as error:
        return by_statistics._replace(unread=str(error))
    if flat is None or their_flat is None:
        return by_statistics
    sums = ElementSums()
    name, our_name = dtype_name(theirs.dtype), dtype_name(ours.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        for chunk, their_chunk in zip(_chunks(flat), _chunks(their_flat), strict=True):
            sums.add(chunk, their_chunk, name, our_name)
    found = sums.difference()
    if is_discrete(ours) and is_discrete(theirs) and (found.relative or _differ_beyond_doubles(flat, their_flat)):
        return found._replace(relative=math.inf)
    return found


class UnreadTensorError(DumpError):
    """A tensor's file is missing or damaged, or does not hold what its dump says."""


def _flat_pair(sources: Sequence[Path | TensorAssembly], rows: ItemPair) -> tuple[Any, Any]:
    """Return the tensors of both sides as `_flat` does; None for one of which torch cannot read the numbers.

    Where both files have another form than their dump.json says, that is how they were dumped.

    Raises:
        UnreadTensorError: One cannot be read, or it alone is not what its dump.json says.
    """
    wholes = [_whole(source) for source in sources]
    others = [_other_form(*each) for each in zip(sources, wholes, rows, strict=True)]
    flats = tuple(None if whole is None else _flat(whole) for whole in wholes)
    sizes = [f"{len(flat):,}" for flat in flats if flat is not None]
    if not all(others) and any(others):
        raise UnreadTensorError(f"{max(others)}: dump that step again")
    if len(set(sizes)) > 1:
        raise UnreadTensorError(
            f"{sources[0]} and {sources[1]} have {' and '.join(sizes)} elements: dump that step again"
        )
    return flats[0], flats[1]


def _other_form(source: Path | TensorAssembly, whole: Any, row: DumpRow) -> str:
    """Return what a file holds that is not what its dump.json says; "" if it is, or the tensor is put together.

    An array may have another dtype where numpy has not the tensor's.
    """
    if whole is None or not isinstance(source, Path):
        return ""
    is_array = isinstance(whole, np.ndarray)
    shape, dtype, said = tuple(whole.shape), whole.dtype.name if is_array else str(whole.dtype), dtype_name(row.dtype)
    is_same = dtype_name(dtype) == said or (is_array and said not in np.sctypeDict)
    if is_same and shape == (row.shape or ()):
        return ""
    return f"{source} holds {dtype_name(dtype)} {list(shape)}, where dump.json says {said} {list(row.shape or ())}"


def _reach(values: _Array) -> float:
    return max(-float(values.min()), float(values.max()))


def _limits(values: _Array, dtype: str) -> npt.NDArray[np.bool_]:
    size = np.abs(values)
    limits: npt.NDArray[np.bool_] = (size >= LARGEST.get(dtype, math.inf) / 2) & np.isfinite(size)
    return limits


def _chunks(flat: Any) -> Iterator[_Array]:
    for start in range(0, len(flat), CHUNK):
        part = flat[start : start + CHUNK]
        yield np.asarray(part if isinstance(part, np.ndarray) else part.double().numpy(), dtype=np.float64)


def _differ_beyond_doubles(flat: Any, their_flat: Any) -> bool:
    """Return whether 64-bit integers differ that are the same as float64, as hashes may be."""
    one, other = (each if isinstance(each, np.ndarray) else each.numpy() for each in (flat, their_flat))
    return one.dtype.itemsize == other.dtype.itemsize == 8 and not np.array_equal(one, other)


def _whole(source: Path | TensorAssembly) -> Any:
    """Return a tensor, mapped from its file, or put together; None if torch cannot read its numbers."""
    if isinstance(source, Path):
        return _load(source)
    try:
        return source.whole(_read)
    except ValueError as error:
        raise UnreadTensorError(f"{source.parts[0]} and its like cannot be put together ({error})") from error


def _flat(whole: Any) -> Any:
    """Return a tensor with one dimension; of complex numbers both parts."""
    if isinstance(whole, np.ndarray):
        flat = whole.reshape(-1)
        return flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat
    if whole.is_complex():
        import torch

        whole = torch.view_as_real(whole)
    return whole.reshape(-1)


def _read(path: Path) -> _Array:
    """Return the tensor in a file in float64, or complex128.

    Raises:
        UnreadTensorError: There is none, or torch cannot read its numbers.
    """
    tensor = _load(path)
    if tensor is None:
        raise UnreadTensorError(f"{path} is of a type that cannot be put together: compare with --mode statistics")
    if isinstance(tensor, np.ndarray):
        return tensor.astype(np.complex128 if tensor.dtype.kind == "c" else np.float64)
    array: _Array = tensor.cdouble().numpy() if tensor.is_complex() else tensor.double().numpy()
    return array


def _load(path: Path) -> Any:
    """Return an array or a tensor, mapped from its file; None if torch cannot read its numbers."""
    if not path.exists():
        raise UnreadTensorError(f"{path} is missing: copy the dump again, or use --mode statistics")
    try:
        if path.suffix == ".npy":
            return np.load(path, mmap_mode="r", allow_pickle=False)
        import torch

        tensor = torch.load(path, map_location="cpu", weights_only=True, mmap=True).detach()
    except ImportError as error:
        raise DumpError(f"{path} needs torch: install it, or compare with --mode statistics") from error
    except Exception as error:  # readers of files raise anything on a damaged one: there is no common type
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnreadTensorError(
            f"{path} is not a tensor file ({why}): copy the dump again, or use --mode statistics"
        ) from error
    return _numbers(tensor)


def _numbers(tensor: Any) -> Any:
    """Return a dense tensor of a dtype that torch computes with; None if it cannot make one of it."""
    from trainermon.statistics.layout import dense

    try:
        return dense(tensor).resolve_conj().resolve_neg()  # msprobe saves a conjugate as the tensor and a flag
    except (RuntimeError, TypeError):
        return None
