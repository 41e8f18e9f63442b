"""How the elements of two split tensors differ: the compiled kernel over files that are mapped, else numpy."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import lru_cache, reduce
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainermon.analysis.checkpoint.boxes import Overlap, PlacedView
from trainermon.analysis.checkpoint.formats.regular_files import RegularFile
from trainermon.analysis.tensor.dtypes import Raw, numbers, parts, storage_dtype
from trainermon.core.errors import CheckpointError
from trainermon.statistics import pairs
from trainermon.statistics.pairs import BOX_WORDS, MAX_DIMS, PairSums, norm_of

_MAX_MAPPED = 128
_MAX_TOUCHED = 1 << 24  # bytes of the files that stay in memory
_AROUND = 1 << 16  # bytes that the system maps at once
_CHUNK = 1 << 17  # elements that numpy looks at together: 1 MiB in float64


class MappedFiles:
    """Files mapped for reading, those used last; each thread has its own."""

    def __init__(self) -> None:
        self._files: OrderedDict[Path, tuple[mmap.mmap, npt.NDArray[np.uint8]]] = OrderedDict()
        self._num_touched = 0  # bytes, about

    def of(self, views: Sequence[PlacedView]) -> Iterator[tuple[npt.NDArray[np.uint8], int]]:
        """Yield for views of one dtype the bytes of their files, and where in them the first element of each is.

        Raises:
            CheckpointError: a file is gone, cannot be read, or is shorter than it was.
        """
        width = storage_dtype(views[0].stored.dtype).itemsize
        path, found = None, None
        for view in views:
            stored = view.stored
            if found is None or stored.path is not path:
                path, found = stored.path, self._mapped(stored.path)
            first = stored.offset + view.first * width
            size = width * _span(view.sizes, view.strides)
            if first < 0 or first + size > len(found):
                raise CheckpointError(f"{path} has {len(found):,} bytes, {first + size:,} are needed: copy it again")
            self._num_touched += max(size, _AROUND)
            yield found, first

    def let_go(self) -> None:
        """Give back the memory of what has been read if it is much; it is read from the files again if need be."""
        if self._num_touched >= _MAX_TOUCHED:
            self._num_touched = 0
            for mapped, _ in self._files.values():
                mapped.madvise(mmap.MADV_DONTNEED)

    def _mapped(self, path: Path) -> npt.NDArray[np.uint8]:
        if path not in self._files:
            self._add(path)
        self._files.move_to_end(path)
        return self._files[path][1]

    def _add(self, path: Path) -> None:
        try:
            if not path.is_file():
                raise CheckpointError(f"{path} is not a regular file any more: open the checkpoint again")
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: nothing is in it
            raise CheckpointError(f"{path} cannot be read ({error}): copy it again") from error
        self._files[path] = mapped, np.frombuffer(mapped, np.uint8)
        if len(self._files) > _MAX_MAPPED:
            self._files.popitem(last=False)  # the map ends with the last array on it


def sums_of(files: MappedFiles, overlaps: Sequence[Overlap]) -> PairSums:
    """Return how the elements of both sides differ over all overlaps; places are counted over them in C order.

    Views of one side may have several dtypes: parts that are joined here need not be of one.

    Raises:
        CheckpointError: a file is gone, or shorter than it was.
    """
    return reduce(PairSums.merge, (_sums(files, list(part)) for _, part in groupby(overlaps, _dtypes)), PairSums())


def _dtypes(overlap: Overlap) -> tuple[str, str]:
    return overlap.ours.stored.dtype, overlap.theirs.stored.dtype


def _sums(files: MappedFiles, overlaps: Sequence[Overlap]) -> PairSums:
    ours, theirs = _dtypes(overlaps[0])
    if _compiled(overlaps, ours, theirs):
        boxes, alive = _boxes(files, overlaps)
        with _no_cut(overlaps):
            found = pairs.pair_sums(boxes, ours, theirs)
        del alive  # the maps had to stay until now
        if found is not None:
            return found
    together = PairSums()
    for one, other in _chunks(overlaps):
        together = together.merge(_numpy_sums(one, other, ours, theirs))
    return together


def are_rounded(files: MappedFiles, overlaps: Sequence[Overlap], target: str) -> bool:
    """Whether every element of the second side is that of the first rounded to `target`, of 16 or 32 bits.

    Raises:
        CheckpointError: a file is gone, or shorter than it was.
    """
    return all(_are_rounded(files, list(part), target) for _, part in groupby(overlaps, _dtypes))


def _are_rounded(files: MappedFiles, overlaps: Sequence[Overlap], target: str) -> bool:
    ours, theirs = _dtypes(overlaps[0])
    if _compiled(overlaps, ours, theirs):
        boxes, alive = _boxes(files, overlaps)
        with _no_cut(overlaps):
            found = pairs.is_rounded(boxes, ours, theirs, target)
        del alive
        return found
    return all(
        np.array_equal(_rounded(numbers(one, ours), target), numbers(other, theirs), equal_nan=True)
        for one, other in _chunks(overlaps)
    )


@contextlib.contextmanager
def _no_cut(overlaps: Sequence[Overlap]) -> Iterator[None]:
    try:
        yield
    except pairs.MemoryFaultError as error:
        files = sorted({str(view.stored.path) for overlap in overlaps for view in overlap})
        raise CheckpointError(
            f"{' or '.join(files[:2])} became shorter while it was read, or its disk fails: wait until it is written"
        ) from error


def place_of(overlaps: Sequence[Overlap], number: int) -> tuple[int, ...]:
    """Return the position in the whole tensor of the element `number`, counted as `sums_of` does."""
    for ours, _ in overlaps:
        if number < ours.num_elements:
            inside = np.unravel_index(number, ours.sizes) if ours.sizes else ()
            return tuple(start + int(step) for start, step in zip(ours.starts, inside, strict=True))
        number -= ours.num_elements
    raise IndexError(number)


def values_at(overlaps: Sequence[Overlap], place: tuple[int, ...]) -> tuple[Any, Any]:
    """Return the elements of both sides at a position of the whole tensor, as numbers."""
    for overlap in overlaps:
        if all(s <= p < s + n for s, p, n in zip(overlap.ours.starts, place, overlap.ours.sizes, strict=True)):
            both = (view.cut(place, (1,) * len(place)) for view in overlap)
            one, other = (numbers(read_of(view).reshape(1), view.stored.dtype)[0].item() for view in both)
            return one, other
    raise IndexError(place)


def read_of(view: PlacedView) -> Raw:
    """Return the elements of a view as they are stored. They are read, not mapped: a file may be cut meanwhile.

    Raises:
        CheckpointError: the file is gone, or shorter than it was.
    """
    found: Raw = np.empty(view.sizes, storage_dtype(view.stored.dtype))
    if found.size:
        with RegularFile(view.stored.path) as file:
            _read_into(file, view, found)
    return found


def _read_into(file: RegularFile, view: PlacedView, into: Raw) -> None:
    """Read a view by parts whose elements lie close together."""
    reach = [(size - 1) * stride for size, stride in zip(view.sizes, view.strides, strict=True)]
    width = into.itemsize
    if sum(reach) < _CHUNK or into.size == 1:
        content = file.read(view.stored.offset + view.first * width, (sum(reach) + 1) * width)
        strides = [stride * width for stride in view.strides]
        into[...] = np.ndarray(view.sizes, into.dtype, content, strides=strides)
        return
    dim = reach.index(max(reach))
    half = view.sizes[dim] // 2
    for start, size in ((0, half), (half, view.sizes[dim] - half)):
        starts, sizes = (list(whole) for whole in (view.starts, view.sizes))
        starts[dim], sizes[dim] = starts[dim] + start, size
        part = np.moveaxis(np.moveaxis(into, dim, 0)[start : start + size], 0, dim)
        _read_into(file, view.cut(tuple(starts), tuple(sizes)), part)


def _compiled(overlaps: Sequence[Overlap], ours: str, theirs: str) -> bool:
    is_known = ours in pairs.KINDS and theirs in pairs.KINDS
    return is_known and len(overlaps[0].ours.sizes) <= MAX_DIMS and pairs.is_available()


def _boxes(files: MappedFiles, overlaps: Sequence[Overlap]) -> tuple[pairs.Boxes, list[Any]]:
    """Return the table that the kernel takes, and what must stay alive meanwhile."""
    table = np.ones((len(overlaps), BOX_WORDS), np.int64)
    dims = len(overlaps[0].ours.sizes)
    alive: dict[int, tuple[Any, int]] = {}  # maps and their addresses
    for side, end in ((0, 2 + 2 * MAX_DIMS), (1, BOX_WORDS)):
        views = [overlap[side] for overlap in overlaps]
        starts = []
        for mapped, first in files.of(views):
            if id(mapped) not in alive:
                alive[id(mapped)] = mapped, mapped.ctypes.data
            starts.append(alive[id(mapped)][1] + first)
        table[:, side] = starts
        if dims:
            table[:, end - dims : end] = [view.strides for view in views]
    if dims:
        table[:, 2 + MAX_DIMS - dims : 2 + MAX_DIMS] = [overlap.ours.sizes for overlap in overlaps]
    return table, list(alive.values())


@lru_cache(maxsize=1024)
def _span(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return how many elements lie from the first of a view to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def _chunks(overlaps: Sequence[Overlap]) -> Iterator[tuple[Raw, Raw]]:
    """Yield the elements of both sides, flat, a few at a time, in the order of `place_of`."""
    for overlap in overlaps:
        for starts, sizes in _blocks(overlap.ours.starts, overlap.ours.sizes):
            one, other = (read_of(view.cut(starts, sizes)).reshape(-1) for view in overlap)
            yield one, other


def _blocks(starts: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield boxes of at most `_CHUNK` elements that make up a box, in C order."""
    if not sizes or math.prod(sizes) <= _CHUNK:
        yield starts, sizes
        return
    step = max(1, _CHUNK // math.prod(sizes[1:]))
    for start in range(0, sizes[0], step):
        first, size = starts[0] + start, min(step, sizes[0] - start)
        if size * math.prod(sizes[1:]) <= _CHUNK:
            yield (first, *starts[1:]), (size, *sizes[1:])
        else:  # a single row
            for inner, extent in _blocks(starts[1:], sizes[1:]):
                yield (first, *inner), (1, *extent)


def _numpy_sums(one: Raw, other: Raw, ours: str, theirs: str) -> PairSums:
    """Return the sums over two short arrays of any dtypes; of complex numbers, real and imaginary parts count alike."""
    numbers_a, numbers_b = numbers(one, ours), numbers(other, theirs)
    if np.iscomplexobj(numbers_a) or np.iscomplexobj(numbers_b):
        numbers_a, numbers_b = numbers_a.astype(np.complex128), numbers_b.astype(np.complex128)
    if ours == theirs:
        unequal = np.frombuffer(one.tobytes(), np.uint8) != np.frombuffer(other.tobytes(), np.uint8)
        unequal = unequal.reshape(len(one), -1).any(axis=1)
    else:
        unequal = (numbers_a != numbers_b) & ~(np.isnan(numbers_a) & np.isnan(numbers_b))
    a, b = parts(numbers_a), parts(numbers_b)
    finite = np.isfinite(a) & np.isfinite(b)
    x, y = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
    with np.errstate(over="ignore"):
        gap = np.abs(x - y)
    largest = float(gap.max(initial=0.0))
    places = np.flatnonzero(unequal)
    nans = [int(np.isnan(side).sum()) for side in (a, b)]
    infs = [int(np.isinf(side).sum()) for side in (a, b)]
    width = len(a) // max(1, len(one))
    return PairSums(
        our_norm=norm_of(x),
        their_norm=norm_of(y),
        distance=norm_of(gap),
        largest=largest,
        count=len(one),
        largest_at=int(gap.argmax()) // width if largest else -1,
        unequal=len(places),
        first_unequal=int(places[0]) if len(places) else -1,
        our_nans=nans[0],
        our_infs=infs[0],
        their_nans=nans[1],
        their_infs=infs[1],
    )


def _rounded(values: npt.NDArray[Any], target: str) -> npt.NDArray[Any]:
    """Return numbers rounded to a type of 16 or 32 bits, as float32; see `pairs.is_rounded`."""
    with np.errstate(over="ignore", invalid="ignore"):
        single = np.asarray(values, np.float32)
        if target == "float16":
            return single.astype(np.float16).astype(np.float32)
        if target != "bfloat16":
            return single
        bits = single.view(np.uint32)
        kept = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
        return np.where(np.isnan(single), single, kept.view(np.float32))
